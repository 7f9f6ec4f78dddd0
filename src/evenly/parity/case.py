"""A case: two runs, what was found of each quantity, and what the reasons are read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evenly.parity.reading import Key, Run
from evenly.parity.rounding import Gap
from evenly.parity.undecided import Undecided

Status = Literal["identical", "rounding", "different", "absent"]

TRAINING = ("ranks", "samples", "loss", "gradient", "parameters", "buffers")
"""In the order in which a difference comes about within a step."""

QUANTITIES = (*TRAINING, "metrics", "predictions")


@dataclass
class Finding:
    """How one quantity compares with the reference, over all steps."""

    quantity: str
    status: Status = "absent"
    units: float = 0.0
    """The largest difference in units of rounding, of what is called equal to rounding."""
    largest: float = 0.0
    step: int | None = None
    """The first step that is different; 0 is before the first."""
    tensor: str = ""
    """Where: the tensor, metric or rank."""
    note: str = ""
    grown: bool = False
    """It is different only because rounding was so large already."""

    def take(self, found: Gap, allowed: float, step: int | None, *, grown: bool = False) -> None:
        """Count one more comparison in; after the first that is different nothing changes."""
        if self.status == "different":
            return
        if self.status == "absent":
            self.status = "identical"
        if found.identical:
            return
        if found.units > (allowed if found.allowed is None else found.allowed):
            self.status, self.step, self.grown = "different", step, grown
            self.units, self.largest, self.tensor = found.units, found.largest, found.tensor
            return
        self.status = "rounding"
        if found.units >= self.units:
            self.units, self.largest, self.tensor = found.units, found.largest, found.tensor


@dataclass
class Trail:
    """How far apart the runs were at one step, in units of rounding."""

    key: Key
    before: float
    gradient: Gap
    parameters: Gap


@dataclass
class Case:
    """Two runs and all that was found, which the reasons are read from."""

    reference: Run
    run: Run
    eps: float
    keys: list[Key] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)
    trail: list[Trail] = field(default_factory=list)
    undecided: Undecided = field(default_factory=Undecided)
    tipped: float = 0.0
    """The largest relative difference of a gradient that is put down to tipped activations."""

    @property
    def last(self) -> int:
        """The last step that both runs made."""
        return max(key[1] for key in self.keys)

    @property
    def trained_apart(self) -> bool:
        """Whether training itself differs, so that what is measured afterwards must."""
        return any(self.of(name).status == "different" for name in TRAINING)

    def of(self, quantity: str) -> Finding:
        return self.findings[quantity]
