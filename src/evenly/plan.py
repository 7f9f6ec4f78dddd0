"""Which sample, which step, which rank.

Pure arithmetic: a plan fixes which samples form each step of an epoch, and `split` cuts a step over
the ranks. Nothing here talks to another process or holds a list of the samples, so every rank
knows what every rank gets, and any step can be sought at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evenly.errors import SettingError
from evenly.permutation import LONGEST, Permutation

Tail = Literal["keep", "drop"]
Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]

# `walk` starts with few indices, so the first step comes at once, and doubles up to many, so the
# fixed cost of a permutation call is shared by many steps.
_FIRST_BLOCK = 2048
_LAST_BLOCK = 16384


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fix which samples form each step of each epoch, whatever the number of processes.

    The same five settings give the same steps on any machine. An epoch of no samples has no
    steps. With more ranks than samples in a step, the last ranks get none.
    """

    length: int
    """The number of samples in an epoch: 0 to 2**40."""

    batch_size: int
    """What one optimizer step sees over all processes together: at least 1."""

    shuffle: bool = False
    """Whether each epoch has an order of its own; otherwise it is the order of the data set."""

    seed: int = 0
    """Picks the orders together with the epoch; any integer. Without ``shuffle`` it is unused."""

    tail: Tail = "keep"
    """What happens to a last step with fewer than ``batch_size`` samples: used, or dropped."""

    def __post_init__(self) -> None:
        checked = {
            "length": _integer("length", self.length, 0),
            "batch_size": _integer("batch_size", self.batch_size, 1),
            "seed": _integer("seed", self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.length > LONGEST:
            raise SettingError(
                f"length={self.length} is beyond 2**40, the longest order there is: "
                "make each sample larger, or split the data set"
            )
        if not isinstance(self.shuffle, bool):
            raise SettingError(
                f"shuffle={self.shuffle!r} is neither True nor False, so the order is not settled: "
                "give one of the two"
            )
        if self.tail not in get_args(Tail):
            raise SettingError(
                f"tail={self.tail!r} does not say what happens to a short last step: "
                'give "keep" to use it or "drop" to leave it out'
            )

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (1 if rest and self.tail == "keep" else 0)

    def bounds(self, step: int) -> tuple[int, int]:
        """Where a step starts and stops in the order of its epoch."""
        step = _integer("step", step)
        if not 0 <= step < self.steps:
            raise SettingError(
                f"step={step} is not in this epoch of {self.steps} steps (length={self.length}, "
                f'batch_size={self.batch_size}, tail="{self.tail}"): '
                f"count steps from 0 and stop before {self.steps}"
            )
        start = step * self.batch_size
        return start, min(start + self.batch_size, self.length)

    def count(self, step: int) -> int:
        """The number of samples in a step, over all ranks."""
        start, stop = self.bounds(step)
        return stop - start

    def count_of(self, step: int, rank: int, size: int) -> int:
        """The number of samples one rank gets in a step; O(1) at any size."""
        start, stop = split(self.count(step), rank, size)
        return stop - start

    def counts(self, step: int, size: int) -> list[int]:
        """The number of samples each of ``size`` ranks gets in a step, in rank order."""
        size = _integer("size", size, 1)
        each, more = divmod(self.count(step), size)
        return [each + 1] * more + [each] * (size - more)

    def indices(self, epoch: int, step: int, rank: int = 0, size: int = 1) -> NDArray[np.int64]:
        """One rank's samples of one step, found directly.

        With ``shuffle`` a call costs about 0.1 ms; for step after step, `walk` is much cheaper.
        """
        return self._order(epoch)(self._positions(step, rank, size))

    def walk(
        self,
        epoch: int,
        *,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
        pieces: int | None = None,
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Go through an epoch from step ``start``: (step, this rank's samples), step after step.

        Indices are made for many steps at once; it holds 16,384 of them, or one step's if that is
        more. ``start`` may equal ``steps``, which leaves nothing to do. With ``pieces`` a rank
        gets whole ones, as `share` says.
        """
        order = self._order(epoch)
        start = _integer("start", start, 0)
        if start > self.steps:
            raise SettingError(
                f"start={start} lies behind this epoch of {self.steps} steps: "
                f"give 0 to {self.steps}, or go on with the next epoch"
            )
        # A generator would refuse a bad rank only at its first step, far from the mistake.
        share(self.batch_size, rank, size, pieces)
        return self._walk(order, rank, size, start, pieces)

    def _walk(
        self, order: Order, rank: int, size: int, step: int, pieces: int | None
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        first, last = share(self.batch_size, rank, size, pieces)
        full = self.length // self.batch_size
        offsets = np.arange(first, last if full else first, dtype=np.int64)
        stride = min(self.batch_size, self.length)  # a batch may be larger than any index
        block = _FIRST_BLOCK
        while step < self.steps:
            stop = min(self.steps, step + max(1, block // max(1, offsets.size)))
            starts = np.arange(step, min(stop, full), dtype=np.int64) * stride
            positions = (starts[:, None] + offsets).ravel()
            # The short last step joins the last block: a permutation call has a fixed cost.
            short = positions[:0]
            if stop > full:
                short = self._positions(stop - 1, rank, size, pieces)
            samples = order(np.concatenate([positions, short]))
            whole = samples[: positions.size].reshape(starts.size, offsets.size)
            yield from enumerate(whole, step)
            if stop > full:
                yield stop - 1, samples[positions.size :]
            step, block = stop, min(2 * block, _LAST_BLOCK)

    def _positions(
        self, step: int, rank: int, size: int, pieces: int | None = None
    ) -> NDArray[np.int64]:
        begin, end = self.bounds(step)
        start, stop = share(end - begin, rank, size, pieces)
        return np.arange(begin + start, begin + stop, dtype=np.int64)

    def _order(self, epoch: int) -> Order:
        epoch = _integer("epoch", epoch, 0)
        if self.shuffle and self.length:
            return Permutation(self.length, self.seed, epoch)
        return _as_stored


def split(count: int, rank: int, size: int) -> tuple[int, int]:
    """Where one rank's run of ``count`` samples starts and stops.

    The runs are contiguous, in rank order, and their counts differ by at most one, larger ones
    first. Ranks beyond the count get an empty run.
    """
    count = _integer("count", count, 0)
    size = _integer("size", size, 1)
    rank = _integer("rank", rank, 0)
    if rank >= size:
        raise SettingError(
            f"rank={rank} does not exist among size={size} ranks: give 0 to {size - 1}"
        )
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (1 if rank < more else 0)


def pieces_of(pieces: int, rank: int, size: int) -> range:
    """Which of a step's ``pieces`` one rank runs: contiguous, and none without a piece."""
    if _integer("size", size, 1) > _integer("pieces", pieces, 1):
        raise SettingError(
            f"pieces={pieces} cannot be given to {size} processes, one of which would have none: "
            f"start at most {pieces}, or give as many pieces as the most processes you will use"
        )
    return range(*split(pieces, rank, size))


def share(count: int, rank: int, size: int, pieces: int | None = None) -> tuple[int, int]:
    """Where one rank's run of a step of ``count`` samples starts and stops.

    With ``pieces`` the step is split into that many whatever the size, and a rank's run is that of
    `pieces_of` it; a short step leaves the last pieces empty. Without, it is `split` over ranks.
    """
    if pieces is None:
        return split(count, rank, size)
    own = pieces_of(pieces, rank, size)
    return split(count, own.start, pieces)[0], split(count, own.stop - 1, pieces)[1]


def microbatches(count: int, limit: int) -> list[tuple[int, int]]:
    """Cut ``count`` samples into the fewest balanced runs of at most ``limit``.

    Each is (start, stop); counts differ by at most one, larger ones first. No samples, no runs.
    """
    count = _integer("count", count, 0)
    limit = _integer("limit", limit, 1)
    parts = -(-count // limit)
    return [split(count, part, parts) for part in range(parts)]


def _as_stored(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


def _integer(name: str, value: Any, lowest: int | None = None) -> int:
    """Accept what counts as an integer (numpy's too) and refuse True, 3.0 and "3"."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise SettingError(
            f"{name}={value!r} is of type {type(value).__name__} and counts nothing: "
            "give an integer"
        ) from None
    if lowest is not None and number < lowest:
        raise SettingError(
            f"{name}={number} is below {lowest} and means nothing: give {lowest} or more"
        )
    return number
