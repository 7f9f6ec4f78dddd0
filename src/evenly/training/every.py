"""How often something happens: every so many steps, or epochs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evenly.errors import SettingError


@dataclass(frozen=True)
class Every:
    """Says when something is due; depends on the position alone, so all ranks agree."""

    steps: int = 0
    epochs: int = 0

    def after_step(self, step: int) -> bool:
        """Whether it is due after this many steps of the run."""
        return self.steps > 0 and step % self.steps == 0

    def after_epoch(self, epoch: int) -> bool:
        """Whether it is due after this many epochs of the run."""
        return self.epochs > 0 and epoch % self.epochs == 0


def every(name: str, value: object) -> Every:
    """From what users type: 50 (steps), "epoch", "3 epochs"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Every(steps=value)
    if isinstance(value, str):
        found = re.fullmatch(r"(?:(\d+) )?epochs?", value)
        if found and found[1] != "0":
            return Every(epochs=int(found[1] or 1))
    raise SettingError(
        f"{name}={value!r} does not say how often: give a number of steps (50), 'epoch', or "
        "'3 epochs'."
    )
