"""``evenly report``: runs as one page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it. Default: report.html in the run's folder, of several runs here.",
)
@click.option("--title", help="The page's heading. Default: the names of the runs.")
def report(runs: tuple[Path, ...], out: Path | None, title: str | None) -> None:
    """Write RUNS, folders with a run record, as one HTML file that needs nothing else.

    Several are laid over each other in this order; the first is what the others are compared with.
    """
    from evenly.errors import EvenlyError
    from evenly.report import write_report

    first = runs[0] if runs[0].is_dir() else runs[0].parent
    place = out or (first / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        path = write_report(runs, place, title=title)
    except EvenlyError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
