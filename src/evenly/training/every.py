"""How often something happens: every so many steps, epochs or minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evenly.errors import SettingError


@dataclass(frozen=True)
class Every:
    """Says when something is due. By steps and epochs all ranks agree; by time one must tell."""

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0

    def after_step(self, step: int) -> bool:
        """Whether it is due after this many steps of the run."""
        return self.steps > 0 and step % self.steps == 0

    def after_epoch(self, epoch: int) -> bool:
        """Whether it is due after this many epochs of the run."""
        return self.epochs > 0 and epoch % self.epochs == 0


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def every(name: str, value: object, *, timed: bool = False) -> Every:
    """From what users type: 50 (steps), "epoch", "3 epochs" and, where ``timed``, "10m"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Every(steps=value)
    if isinstance(value, str):
        found = re.fullmatch(r"(?:(\d+) )?epochs?", value)
        if found and found[1] != "0":
            return Every(epochs=int(found[1] or 1))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value)
        if found and timed and float(found[1]):
            return Every(seconds=float(found[1]) * _UNITS[found[2]])
    forms = "a number of steps (50), 'epoch', '3 epochs'" + (", '10m', '2h'" if timed else "")
    raise SettingError(f"{name}={value!r} does not say how often: give {forms}.")
