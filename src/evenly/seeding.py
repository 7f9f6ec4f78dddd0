"""Random streams that depend on what is drawn for, never on which process draws.

A stream is keyed by words and numbers, such as (seed, epoch, sample). Equal keys give equal
numbers on any rank and in any worker; unequal keys give unrelated ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenly.errors import DataError

if TYPE_CHECKING:
    import torch

_fetching: tuple[int, int, Sequence[int]] | None = None
"""(seed, epoch, samples) of the fetch that is going on in this process."""


class OneByOneNeeded(Exception):  # noqa: N818 - a request to the loader, not an error
    """A sample's own stream was asked for while several samples were fetched together."""


def key(*parts: int | str) -> int:
    """64 bits that identify a stream."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keys_of_samples(seed: int, epoch: int, samples: Sequence[int]) -> NDArray[np.uint64]:
    """One key for each sample: the finaliser of splitmix64 over a counter, vectorised."""
    with np.errstate(over="ignore"):
        start = np.uint64(key("samples", seed, epoch))
        mixed = start + np.asarray(samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


def sample_keys() -> NDArray[np.uint64]:
    """The keys of the samples being fetched, for a data set that fetches whole batches.

    Call it inside ``__getitems__`` (or ``__getitem__``). Seed one generator per sample from them:
    a single stream for the batch would depend on how the batch is split over processes.
    """
    if _fetching is None:
        raise DataError(
            "sample_keys() was called outside a fetch; call it inside the data set's "
            "__getitem__ or __getitems__ while an evenly.Loader reads it."
        )
    return keys_of_samples(*_fetching)


def sample_generator() -> torch.Generator:
    """A torch generator of the sample being fetched: the same draws at any process count.

    Costs about 3 microseconds, where reseeding torch's global generator costs over 100.
    """
    import torch

    keys = sample_keys()
    if len(keys) != 1:
        raise OneByOneNeeded
    return torch.Generator().manual_seed(int(keys[0] >> np.uint64(1)))


@contextmanager
def fetching(seed: int, epoch: int, samples: Sequence[int]) -> Iterator[None]:
    """Offer these samples' keys to `sample_keys` and `sample_generator` for a while."""
    global _fetching
    before, _fetching = _fetching, (seed, epoch, samples)
    try:
        yield
    finally:
        _fetching = before


class GlobalStreams:
    """The generators that transforms draw from without asking: torch's, numpy's, Python's."""

    def __init__(self) -> None:
        import torch

        self._torch = torch.default_generator
        self._before = self._state()

    def drawn(self) -> bool:
        """Whether any of them was drawn from since this object was made."""
        now, before = self._state(), self._before
        return bool(
            not now[0].equal(before[0])
            or now[1] != before[1]
            or now[2][2] != before[2][2]
            or not np.array_equal(now[2][1], before[2][1])
        )

    def restore(self) -> None:
        """Put them back to where they were when this object was made."""
        self._torch.set_state(self._before[0])
        random.setstate(self._before[1])
        np.random.set_state(self._before[2])

    def seed(self, value: int) -> None:
        """Start all of them from one key. Directly, without torch.manual_seed's other devices."""
        self._torch.manual_seed(value >> 1)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)

    def _state(self) -> tuple[Any, Any, Any]:
        return self._torch.get_state(), random.getstate(), np.random.get_state()
