"""Averages in the making: totals and weights by name, brought together only when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from evenly.collectives import all_gather_object, any_rank
from evenly.errors import SettingError
from evenly.objective import Total
from evenly.pieces.tree import fold

Number = Tensor | float
Numbers = dict[str, tuple[float, float]]


class Averages:
    """This rank's totals and weights. A GPU is not waited for until they are read."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Number, Number]] = {}

    def log(
        self, name: str, value: Total | Number, weight: Number, piece: int | None = None
    ) -> None:
        """As `add`, under a name that a user gave."""
        if name == "loss":
            raise SettingError(
                "a number named 'loss' would take the place of the loss; log it by another name."
            )
        self.add(name, value, weight, piece)

    def add(
        self, name: str, value: Total | Number, weight: Number = 1.0, piece: int | None = None
    ) -> None:
        """A total with its weight, or a number that counts ``weight`` times."""
        if isinstance(value, Total):
            total, weight = _one(name, value.sum), _one(name, value.weight)
        else:
            total = _one(name, value) * weight
        before = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (before[0] + total, before[1] + weight)

    def __bool__(self) -> bool:
        return bool(self._totals)

    def numbers(self) -> Numbers:
        return {name: (float(total), float(w)) for name, (total, w) in self._totals.items()}

    def gathered(self, known: bool | None = None) -> dict[str, float]:
        """The means over all ranks; a meeting of all. Ranks may have different names, or none.

        ``known`` says whether any rank has some, where that is known already.
        """
        if not (any_rank(bool(self)) if known is None else known):
            return {}
        sums = added(all_gather_object(self.numbers()))
        return {name: t / weight if weight else float("nan") for name, (t, weight) in sums.items()}

    def merged(self) -> Any:
        """What all ranks hold together, for a checkpoint; a meeting of all."""
        return added(all_gather_object(self.numbers()))

    def load(self, numbers: Mapping[str, Sequence[float]], *, mine: bool) -> None:
        """Go on from what `merged` gave, on the one rank it is given to."""
        if mine:
            self._totals = {name: (total, weight) for name, (total, weight) in numbers.items()}

    def clear(self) -> None:
        self._totals = {}


class PieceAverages(Averages):
    """Totals and weights of each piece apart, over all its steps; added up along the tree, so that
    the sums do not depend on which rank has which piece.
    """

    def __init__(self, pieces: int, own: range) -> None:
        self._pieces, self._own = pieces, own
        self._by_piece = {piece: Averages() for piece in own}

    def add(
        self, name: str, value: Total | Number, weight: Number = 1.0, piece: int | None = None
    ) -> None:
        """Of a piece; what belongs to none counts with the first one here."""
        self._by_piece[self._own.start if piece is None else piece].add(name, value, weight)

    def __bool__(self) -> bool:
        return any(self._by_piece.values())

    def numbers(self) -> Numbers:
        return self._sums(self._held())

    def gathered(self, known: bool | None = None) -> dict[str, float]:
        if not (any_rank(bool(self)) if known is None else known):
            return {}
        sums = self._sums(self._everyones())
        return {name: t / weight if weight else float("nan") for name, (t, weight) in sums.items()}

    def merged(self) -> Any:
        return {str(piece): numbers for piece, numbers in self._everyones().items()}

    def load(self, numbers: Mapping[str, Any], *, mine: bool) -> None:
        for piece in self._own:
            self._by_piece[piece].load(numbers.get(str(piece), {}), mine=True)

    def clear(self) -> None:
        for averages in self._by_piece.values():
            averages.clear()

    def _held(self) -> dict[int, Numbers]:
        return {piece: averages.numbers() for piece, averages in self._by_piece.items()}

    def _everyones(self) -> dict[int, Numbers]:
        return {
            p: numbers for held in all_gather_object(self._held()) for p, numbers in held.items()
        }

    def _sums(self, by_piece: Mapping[int, Numbers]) -> Numbers:
        names = {name: None for numbers in by_piece.values() for name in numbers}
        return {
            name: fold(
                self._pieces,
                {(p, p + 1): numbers[name] for p, numbers in by_piece.items() if name in numbers},
                lambda one, other: (one[0] + other[0], one[1] + other[1]),
            )
            for name in names
        }


def added(ranks: Iterable[Numbers]) -> Numbers:
    """The totals and weights of all ranks together."""
    sums: Numbers = {}
    for numbers in ranks:
        for name, (total, weight) in numbers.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + weight)
    return sums


def _one(name: str, value: object) -> Number:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()  # sums over an epoch need the digits
    if isinstance(value, int | float):
        return value
    given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise SettingError(
        f"log({name!r}): {given} is not one number. Give a number, or evenly.Total(sum, weight)."
    )
