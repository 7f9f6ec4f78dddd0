"""Which checkpoints stay: the newest, the best by a number, and every so many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from evenly.errors import SettingError
from evenly.training.every import Every, every

Mode = Literal["min", "max"]


class About(NamedTuple):
    """What can be known of a checkpoint without reading its state."""

    step: int
    epoch: int
    position: int
    """Steps made in the epoch."""
    values: Mapping[str, float]
    """What was measured at this very step, by name."""

    @staticmethod
    def read(entry: Any) -> About:
        """From a manifest; raises TypeError, ValueError or KeyError where it is another's."""
        values = {str(name): float(value) for name, value in dict(entry["values"]).items()}
        return About(int(entry["step"]), int(entry["epoch"]), int(entry["position"]), values)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """A checkpoint stays if one of these rules wants it. The newest always does."""

    last: int | None = 3
    """So many of the newest; None for all."""
    best: int = 0
    """So many of the best by ``monitor``, of those that were evaluated just then. With it every
    evaluation that is among the best is followed by a checkpoint."""
    monitor: str = "validation/loss"
    mode: Mode = "min"
    """Whether lower ("min") or higher ("max") is better."""
    every: int | str | None = None
    """Those at multiples of so many steps (1000), or after so many epochs ("5 epochs")."""
    _every: Every = field(init=False, repr=False, default=Every())

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise SettingError(
                f"{self.last} newest checkpoints to keep: give keep=, or Retention(last=), 1 or "
                "more, or None to keep all."
            )
        if self.best < 0:
            raise SettingError(f"Retention(best={self.best}): give 0 or more.")
        check_mode("Retention", self.mode)
        if self.every is not None:
            object.__setattr__(self, "_every", every("Retention(every=)", self.every))

    def stay(self, found: Sequence[About]) -> set[int]:
        """The steps of those that stay."""
        newest = sorted((one.step for one in found), reverse=True)
        kept = set(newest if self.last is None else newest[: self.last])
        kept |= {one.step for one in self._ranked(found)[: self.best]}
        for one in found:
            whole_epoch = one.position == 0 and self._every.after_epoch(one.epoch)
            if whole_epoch or self._every.after_step(one.step):
                kept.add(one.step)
        return kept

    def wants(self, now: About, found: Sequence[About]) -> bool:
        """Whether this point is among the best, given the checkpoints that there are."""
        if not self.best or self.monitor not in now.values:
            return False
        others = [one for one in found if one.step != now.step]
        return now in self._ranked([*others, now])[: self.best]

    def _ranked(self, found: Sequence[About]) -> list[About]:
        return ranked(found, self.monitor, self.mode)


def ranked(found: Sequence[About], monitor: str, mode: Mode) -> list[About]:
    """Those that have a value, the best first; of equal ones the earlier. nan is none."""
    sign = 1 if mode == "min" else -1
    have = [one for one in found if not math.isnan(one.values.get(monitor, math.nan))]
    return sorted(have, key=lambda one: (sign * one.values[monitor], one.step))


def check_mode(what: str, mode: object) -> None:
    if mode not in ("min", "max"):
        raise SettingError(f"{what}(mode={mode!r}): give 'min' or 'max'.")


def retention(keep: object) -> Retention:
    """From what users type: 3, None, or the rules themselves."""
    if isinstance(keep, Retention):
        return keep
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool)):
        return Retention(last=keep)
    raise SettingError(f"keep={keep!r}: give a number, None to keep all, or evenly.Retention(...).")
