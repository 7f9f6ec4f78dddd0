"""``evenly watch``: a run on a page, while it trains."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to serve the page.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Default: 8765, or any that is free.",
)
@click.option(
    "--open/--no-open",
    "opens",
    default=None,
    help="Open it in a browser. Default: where there is a screen.",
)
def watch(run: Path, host: str, port: int | None, opens: bool | None) -> None:
    """Show RUN, the folder of a run that trains or is about to, on a page that follows it.

    It is for this machine alone unless --host says otherwise, and only reads. Ctrl-C ends it.
    """
    from evenly.errors import EvenlyError
    from evenly.watch import server

    try:
        server.check_installed()
        server.check_folder(run)
        opened = server.listen(host, port)
    except EvenlyError as error:
        raise click.ClickException(str(error)) from error
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{opened.getsockname()[1]}/"
    if not server.is_loopback(host):
        click.echo("evenly: whoever can reach this machine can see the run: no password.", err=True)
    click.echo(f"{run} is at {address} (Ctrl-C ends this)")
    if opens if opens is not None else _has_screen():
        import webbrowser

        webbrowser.open(address)
    server.serve(run, opened, host)


def _has_screen() -> bool:
    """Elsewhere a browser would open in the terminal, or on another machine than the user's."""
    import os
    import sys

    if "SSH_CONNECTION" in os.environ:
        return False
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in screens)
