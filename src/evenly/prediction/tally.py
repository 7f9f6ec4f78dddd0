"""Proof that every sample was predicted exactly once, in a few numbers per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evenly.errors import DataError
from evenly.plan import split

_BLOCK = 2**18


class Tally:
    """Counts samples and adds up a mark of each.

    The marks are scrambled, so that only the same samples, each as often, add up to the same
    (but for one chance in 2**64). A rank also adds up a run of what is due.
    """

    def __init__(self, length: int, rank: int, size: int) -> None:
        self.count = 0
        self.found = 0
        self.due = 0
        self._length = length
        start, stop = split(length, rank, size)
        for begin in range(start, stop, _BLOCK):
            self.due += _marks(np.arange(begin, min(begin + _BLOCK, stop), dtype=np.int64))

    def add(self, indices: NDArray[np.int64]) -> None:
        """Count these samples; refuse those that the data set does not have."""
        if indices.min() < 0 or indices.max() >= self._length:
            raise DataError(
                f"a part holds the samples {indices.min()} to {indices.max()} of a data set of "
                f"{self._length}. Give the length of the data set that the parts come from."
            )
        self.count += len(indices)
        self.found += _marks(indices)


def every_sample_once(tallies: Sequence[Tally], length: int) -> None:
    """Raise unless the ranks together had each sample exactly once."""
    count = sum(tally.count for tally in tallies)
    if count == length and _total(t.found for t in tallies) == _total(t.due for t in tallies):
        return
    raise DataError(
        f"{count} predictions for a data set of {length} samples, not one for each. Give all parts "
        "of one epoch of Loader(dataset, batch_size=...), with tail='keep', on every rank."
    )


def _total(marks: Iterable[int]) -> int:
    return sum(marks) % 2**64


def _marks(indices: NDArray[np.int64]) -> int:
    """The sum of the samples' marks (the finalizer of splitmix64; its sums wrap)."""
    mixed = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum())
