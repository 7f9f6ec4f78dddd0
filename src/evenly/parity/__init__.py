"""`evenly verify`: is a program's training the same on every number of processes?

::

    runs       the user's program at each process count, with tracing on
    reading    what the ranks wrote down
    rounding   how much is rounding
    undecided  parameters whose update rounding decides
    case       two runs, and what was found of each quantity
    comparing  one run beside the reference, step by step
    reasons    why they differ, and what to do
    report     the outcome as a table and as JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evenly.parity.case import QUANTITIES, Case, Finding
from evenly.parity.comparing import compared
from evenly.parity.reading import Run
from evenly.parity.reasons import Reason, reasons

Promise = Literal["numbers", "bits"]

__all__ = ["Comparison", "Count", "Finding", "Promise", "Reason", "compare"]


@dataclass(frozen=True)
class Count:
    """One process count beside the reference."""

    processes: int
    steps: int
    """Optimizer steps that were compared."""
    findings: dict[str, Finding]
    reasons: list[Reason]

    def holds(self, promise: Promise) -> bool:
        """Whether the promise is kept in every quantity that was recorded."""
        kept = {"absent", "identical"} if promise == "bits" else {"absent", "identical", "rounding"}
        return all(finding.status in kept for finding in self.findings.values())


@dataclass(frozen=True)
class Comparison:
    """A program on several process counts: what is equal, what is not, and why."""

    reference: int
    """The process count that the others are compared with."""
    promise: Promise
    counts: list[Count]

    @property
    def holds(self) -> bool:
        """Whether the promise asked for is kept at every count."""
        return all(count.holds(self.promise) for count in self.counts)

    @property
    def reasons(self) -> list[Reason]:
        """The reasons of all counts."""
        return [reason for count in self.counts for reason in count.reasons]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from evenly.parity.report import as_dict

        return as_dict(self)

    def __str__(self) -> str:
        from evenly.parity.report import text

        return text(self)


def compare(runs: Sequence[Run], promise: Promise) -> Comparison:
    """Each run beside the first."""
    for run in runs:
        run.check()
    cases = [compared(runs[0], run) for run in runs[1:]]
    return Comparison(runs[0].size, promise, [_count(case) for case in cases])


def _count(case: Case) -> Count:
    findings = {name: case.findings[name] for name in QUANTITIES}
    return Count(case.run.size, case.last, findings, reasons(case))
