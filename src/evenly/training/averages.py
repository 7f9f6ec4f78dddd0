"""Averages in the making: totals and weights by name, brought together only when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from evenly.collectives import all_gather_object, any_rank
from evenly.errors import SettingError
from evenly.objective import Total

Number = Tensor | float
Numbers = dict[str, tuple[float, float]]


class Averages:
    """This rank's totals and weights. A GPU is not waited for until they are read."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Number, Number]] = {}

    def log(self, name: str, value: Total | Number, weight: Number) -> None:
        """As `add`, under a name that a user gave."""
        if name == "loss":
            raise SettingError(
                "a number named 'loss' would take the place of the loss; log it by another name."
            )
        self.add(name, value, weight)

    def add(self, name: str, value: Total | Number, weight: Number = 1.0) -> None:
        """A total with its weight, or a number that counts ``weight`` times."""
        if isinstance(value, Total):
            total, weight = _one(name, value.sum), _one(name, value.weight)
        else:
            total = _one(name, value) * weight
        before = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (before[0] + total, before[1] + weight)

    def numbers(self) -> Numbers:
        return {name: (float(total), float(w)) for name, (total, w) in self._totals.items()}

    def load(self, numbers: Mapping[str, Sequence[float]]) -> None:
        """Go on from what `numbers`, or several ranks' added up, gave."""
        self._totals = {name: (total, weight) for name, (total, weight) in numbers.items()}

    def clear(self) -> None:
        self._totals = {}


def added(ranks: Iterable[Numbers]) -> Numbers:
    """The totals and weights of all ranks together."""
    sums: Numbers = {}
    for numbers in ranks:
        for name, (total, weight) in numbers.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + weight)
    return sums


def gathered(averages: Averages, known: bool | None = None) -> dict[str, float]:
    """The means over all ranks; a meeting of all. Ranks may have different names, or none.

    ``known`` says whether any rank has some, where that is known already.
    """
    numbers = averages.numbers()
    if not (any_rank(bool(numbers)) if known is None else known):
        return {}
    sums = added(all_gather_object(numbers))
    return {name: t / weight if weight else float("nan") for name, (t, weight) in sums.items()}


def _one(name: str, value: object) -> Number:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()  # sums over an epoch need the digits
    if isinstance(value, int | float):
        return value
    given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise SettingError(
        f"log({name!r}): {given} is not one number. Give a number, or evenly.Total(sum, weight)."
    )
