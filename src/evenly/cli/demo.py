"""``evenly demo``: the same training on 1 to 4 processes, beside the usual recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from evenly.demo import Row


@click.command()
@click.option("-n", "counts", default="1,2,3,4", show_default=True, help="Process counts.")
def demo(counts: str) -> None:
    """Train on the embedded digits at several process counts and compare the numbers."""
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

    console = Console()
    found = list(
        track(
            demonstration.rows(numbers),
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
