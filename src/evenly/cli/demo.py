"""``evenly demo``: the same training on 1, 2 and 4 processes, beside the usual recipe."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from evenly.demo import Row


@click.command()
@click.option("-n", "counts", default="1,2,4", show_default=True, help="Process counts.")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new folder for the runs and their report. Default: runs/demo-DATE-TIME.",
)
def demo(counts: str, out: Path | None) -> None:
    """Train on the embedded digits at several process counts and compare the numbers.

    A table shows both, and one page, report.html, lays Evenly's runs over each other.
    """
    try:
        numbers = tuple(int(text) for text in counts.split(","))
        if min(numbers) < 1:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"{counts!r} is not a list such as 1,2,4", param_hint="-n"
        ) from None

    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from evenly import demo as demonstration
    from evenly.errors import EvenlyError
    from evenly.report.bundle import installed

    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} is not empty; name a new folder.", param_hint="-o")
    console = Console()
    found = list(
        track(
            demonstration.rows(numbers, folder),
            description="training the digits",
            total=len(numbers),
            console=console,
            transient=True,
        )
    )
    table = Table(
        title=f"Digits, {demonstration.EPOCHS} epochs, global batch {demonstration.BATCH}"
    )
    for name in ("", "processes", "seen", "duplicates", "missing", "loss", "accuracy"):
        table.add_column(name, justify="right" if name else "left")
    for label, field in (("Evenly", "evenly"), ("the usual recipe", "usual")):
        for row in found:
            one = getattr(row, field)
            table.add_row(
                label if row is found[0] else "",
                str(row.processes),
                f"{one.seen:,}",
                str(one.duplicates),
                str(one.missing),
                f"{one.loss:.6f}",
                f"{one.accuracy:.4%}",
                end_section=row is found[-1],
            )
    console.print(table)
    console.print(_verdict(found))
    if not installed():
        console.print(
            f"The runs are in {folder}. For their page: pip install vl-convert-python, then "
            f"evenly report {folder}/*",
            soft_wrap=True,
        )
        return
    try:
        page = demonstration.report(numbers, folder)
    except EvenlyError as error:
        raise click.ClickException(str(error)) from error
    console.print(f"The runs as one page, laid over each other: {page.resolve()}", soft_wrap=True)


def _verdict(found: list[Row]) -> str:
    """In one line, what the table shows; computed, so that it cannot praise a failure."""
    from evenly.demo import largest_difference

    wrong = [row.processes for row in found if row.evenly.duplicates or row.evenly.missing]
    once = "used every sample exactly once at each count"
    if wrong:
        once = f"repeated or missed samples at {', '.join(map(str, wrong))} processes"
    ours = max(largest_difference(found[0].evenly, row.evenly) for row in found)
    usual = max(largest_difference(found[0].usual, row.usual) for row in found)
    return (
        f"Evenly {once}; its weights differ between counts by {ours:.0e} (float32 rounding is "
        f"6e-08), those of the usual recipe (DistributedSampler, DDP) by {usual:.0e}."
    )
