"""The outcome of a comparison as a table, and as JSON."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from evenly.parity.case import QUANTITIES, Finding
from evenly.parity.rounding import STEP

if TYPE_CHECKING:
    from rich.console import Console

    from evenly.parity import Comparison, Count

VERSION = 1

_SAMPLES = {"identical": "the same", "rounding": "the same, reordered"}
_RANKS = {"identical": "all equal"}


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, the reasons and one line that says how it ends."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    steps = max((count.steps for count in comparison.counts), default=0)
    table = Table(title=f"{steps} steps, beside {_processes(comparison.reference)}")
    table.add_column("")
    for count in comparison.counts:
        table.add_column(_processes(count.processes), justify="left")
    for name in QUANTITIES:
        cells = [cell(count.findings[name]) for count in comparison.counts]
        if any(count.findings[name].status != "absent" for count in comparison.counts):
            styles = [_style(count.findings[name], comparison) for count in comparison.counts]
            table.add_row(name, *(Text(c, style=s) for c, s in zip(cells, styles, strict=True)))
    console.print(table)
    for count in comparison.counts:
        for name, found in count.findings.items():
            if found.note and found.status != "different":
                console.print(Text(f"{_processes(count.processes)}: {name}: {found.note}."))
        for finding, line in lines(count):
            console.print(Text(f"{_processes(count.processes)}: {finding}", style="bold"))
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print(Text(verdict(comparison)))


def text(comparison: Comparison) -> str:
    """The same without colours."""
    from rich.console import Console

    written = io.StringIO()
    show(comparison, Console(file=written, width=100, no_color=True, highlight=False))
    return written.getvalue()


def cell(finding: Finding) -> str:
    if finding.status == "absent":
        return "-"
    if finding.quantity == "samples" and finding.status in _SAMPLES:
        return _SAMPLES[finding.status]
    if finding.quantity == "ranks" and finding.status in _RANKS:
        return _RANKS[finding.status]
    if finding.status == "identical":
        return "identical bits"
    if finding.status == "rounding":
        grown = "grown to " if finding.units > STEP else ""
        return f"rounding, {grown}{finding.units:.2g} units"
    at = {None: "", 0: " from the start"}.get(finding.step, f" from step {finding.step} on")
    return f"different{at}"


def lines(count: Count) -> list[tuple[str, str]]:
    """For each reason: where it shows, and the reason with the remedy."""
    found = []
    for reason in count.reasons:
        where = count.findings[reason.quantity]
        if where.status != "different":  # it shows in another quantity of the same step
            where = next(f for f in count.findings.values() if f.status == "different")
        size = "" if not math.isfinite(where.units) else f", {where.units:.2g} units of rounding"
        tensor = f" ({where.tensor}{size})" if where.tensor else ""
        step = f" at step {where.step}" if where.step else ""
        found.append(
            (
                f"{where.quantity} differs{step}{tensor}: {reason.name}",
                f"{reason.text}\nWhat to do: {reason.remedy}",
            )
        )
    return found


def verdict(comparison: Comparison) -> str:
    """In one line, computed from the findings."""
    counts = ", ".join(str(count.processes) for count in comparison.counts)
    if comparison.holds and comparison.promise == "bits":
        return f"The same bits on {counts} as on {_processes(comparison.reference)}."
    if comparison.holds:
        units = max(
            (f.units for c in comparison.counts for f in c.findings.values()),
            default=0.0,
        )
        return (
            f"The same numbers on {counts} as on {_processes(comparison.reference)}, to rounding "
            f"(at most {units:.2g} units)."
        )
    wrong = [c.processes for c in comparison.counts if not c.holds(comparison.promise)]
    line = f"Not the same {comparison.promise} on {', '.join(map(str, wrong))}"
    line += f" as on {_processes(comparison.reference)}."
    if comparison.promise == "bits" and all(c.holds("numbers") for c in comparison.counts):
        line += (
            " They are equal to rounding: sums over ranks are added up in another order. "
            "Trainer(pieces=P) adds them up in one order on any number of processes."
        )
    return line


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "version": VERSION,
        "promise": comparison.promise,
        "holds": comparison.holds,
        "reference": comparison.reference,
        "counts": [
            {
                "processes": count.processes,
                "holds": count.holds(comparison.promise),
                "steps": count.steps,
                "quantities": {name: _finding(f) for name, f in count.findings.items()},
                "reasons": [
                    {
                        "name": reason.name,
                        "quantity": reason.quantity,
                        "step": reason.step,
                        "text": reason.text,
                        "remedy": reason.remedy,
                    }
                    for reason in count.reasons
                ],
            }
            for count in comparison.counts
        ],
        "verdict": verdict(comparison),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    """JSON has no infinity, so what cannot be measured is null."""
    return {
        "status": finding.status,
        "units": finding.units if math.isfinite(finding.units) else None,
        "largest": finding.largest if math.isfinite(finding.largest) else None,
        "step": finding.step,
        "where": finding.tensor,
        "note": finding.note,
    }


def _style(finding: Finding, comparison: Comparison) -> str:
    if finding.status == "different":
        return "red"
    broken = finding.status == "rounding" and comparison.promise == "bits"
    return "red" if broken else "" if finding.status == "absent" else "green"


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
