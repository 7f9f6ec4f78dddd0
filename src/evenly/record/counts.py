"""What a rank counts between two meetings: the samples it used, and where its time went."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenly.record.coverage import added, digest

# Hashing has a fixed cost of some 20 microseconds, so it is done for many samples at once.
_MANY = 8192
_HALF = 2**32


class Counts:
    """One rank's, as a few numbers that any exchange of floats can carry."""

    def __init__(self) -> None:
        self._digest = self._samples = self._steps = 0
        self._seconds = self._alone = self._longest = self._wait = 0.0
        self._waiting: list[tuple[int, NDArray[np.int64]]] = []
        self._held = 0

    def add(
        self,
        step: int,
        samples: NDArray[np.int64],
        *,
        seconds: float,
        alone: float,
        data_wait: float,
    ) -> None:
        """A step: its number in the epoch, this rank's samples, how long it took in all, until the
        ranks met (``alone``), and of that waiting for data.
        """
        self._waiting.append((step, samples))
        self._held += len(samples)
        self._steps += 1
        self._seconds += seconds
        self._alone += alone
        self._wait += data_wait
        if alone > self._longest:
            self._longest = alone
        if self._held > _MANY:
            self._hash()

    def taken(self) -> list[float]:
        """The numbers, for `together`; counting begins anew."""
        self._hash()
        high, low = divmod(self._digest, _HALF)  # a double holds 53 bits exactly
        numbers = [
            *(float(high), float(low), float(self._samples), float(self._steps)),
            *(self._seconds, self._alone, self._longest, self._wait),
        ]
        self.__init__()  # type: ignore[misc]
        return numbers

    def _hash(self) -> None:
        if not self._waiting:
            return
        samples = np.concatenate([one for _, one in self._waiting])
        steps = np.repeat(
            np.array([step for step, _ in self._waiting], np.int64),
            [len(one) for _, one in self._waiting],
        )
        self._digest = added(self._digest, digest(steps, samples))
        self._samples += len(samples)
        self._waiting, self._held = [], 0


@dataclass(frozen=True)
class Together:
    """What all ranks counted."""

    digest: int
    samples: int
    steps: int
    """The same on all ranks."""
    seconds: list[float]
    """Of a step, in the mean, by rank."""
    alone: list[float]
    """Until the ranks met in a step, in the mean: data, preparation, the forward pass."""
    longest: list[float]
    """As ``alone``, of the step where it was most."""
    data_wait: list[float]


def together(ranks: list[list[float]]) -> Together:
    """From the numbers of all ranks."""
    steps = int(ranks[0][3])
    each = max(1, steps)
    return Together(
        digest=added(*(int(high) * _HALF + int(low) for high, low, *_ in ranks)),
        samples=sum(int(numbers[2]) for numbers in ranks),
        steps=steps,
        seconds=[numbers[4] / each for numbers in ranks],
        alone=[numbers[5] / each for numbers in ranks],
        longest=[numbers[6] for numbers in ranks],
        data_wait=[numbers[7] / each for numbers in ranks],
    )


def in_slots(numbers: list[float], rank: int, size: int) -> list[float]:
    """A rank's numbers at their place among those of all: the largest of each, over the ranks, is
    then everybody's, so that an exchange of largest numbers is a gathering too.
    """
    empty = [-math.inf] * len(numbers)
    return empty * rank + numbers + empty * (size - rank - 1)


def from_slots(numbers: list[float], size: int) -> list[list[float]]:
    """The numbers of each rank."""
    each = len(numbers) // size
    return [numbers[rank * each : (rank + 1) * each] for rank in range(size)]
