"""``evenly verify``: is a program's training the same on every number of processes?"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evenly.errors import EvenlyError

if TYPE_CHECKING:
    from evenly.parity import Promise


@click.command()
@click.option(
    "-n",
    "--processes",
    "counts",
    default="1,2,3",
    metavar="COUNTS",
    show_default=True,
    help="Process counts; each is compared with the first.",
)
@click.option("--steps", default=20, metavar="N", show_default=True, help="Steps to compare.")
@click.option(
    "--promise",
    type=click.Choice(["numbers", "bits"]),
    default="numbers",
    show_default=True,
    help="What must hold: equal to rounding, or to the bit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module's name, as for python -m.")
@click.option(
    "--threads",
    type=int,
    metavar="T",
    help="OMP_NUM_THREADS at every count. Default: your own, else cores // the largest count.",
)
@click.option("--device", metavar="DEVICE", help="As for evenly run.")
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    metavar="SECONDS",
    show_default=True,
    help="The most that one run may take.",
)
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def verify(
    counts: str,
    steps: int,
    promise: Promise,
    as_json: bool,
    module: bool,
    threads: int | None,
    device: str | None,
    timeout: float,
    target: str,
    arguments: tuple[str, ...],
) -> None:
    """Run TARGET, a script or (with -m) a module, on each number of processes, and compare its
    training step by step. Its own ARGUMENTS come after --.

    Exit code: 0 if the promise holds, 1 if not, 2 if the program could not be run.
    """
    try:
        numbers = tuple(int(text) for text in counts.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{counts!r} is not a list such as 1,2,3", param_hint="-n"
        ) from None

    from rich.console import Console

    from evenly.parity import compare
    from evenly.parity.report import show
    from evenly.parity.runs import Program, run_all

    console, progress = Console(), Console(stderr=True)
    try:
        program = Program(
            target=target,
            arguments=arguments,
            module=module,
            counts=numbers,
            steps=steps,
            threads=threads,
            device=device,
            timeout=timeout,
        )
        with tempfile.TemporaryDirectory(prefix="evenly-verify-") as folder:
            with progress.status("starting") as status:
                runs = run_all(
                    program,
                    Path(folder),
                    lambda count: status.update(f"running {target} on {count} (of {counts})"),
                )
                status.update("comparing")
                comparison = compare(runs, promise)
    except EvenlyError as error:
        if as_json:
            click.echo(json.dumps({"version": 1, "promise": promise, "error": str(error)}))
        else:
            click.echo(f"evenly: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps(comparison.as_dict(), indent=1))
    else:
        show(comparison, console)
    sys.exit(0 if comparison.holds else 1)
