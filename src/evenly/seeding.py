"""Random streams that depend on what is drawn for, never on which process draws.

A stream is keyed by words and numbers, such as (seed, epoch, sample). Equal keys give equal
numbers on any rank and in any worker; unequal keys give unrelated ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenly.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass
class Fetch:
    """A fetch that is going on: whose keys `sample_keys` gives."""

    seed: int
    epoch: int
    samples: Sequence[int]


_fetching: Fetch | None = None
_WORD = 2**64 - 1


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
    return keys_of_samples(_fetching.seed, _fetching.epoch, _fetching.samples)


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
def fetching(seed: int, epoch: int, samples: Sequence[int]) -> Iterator[Fetch]:
    """Offer these samples' keys to `sample_keys` and `sample_generator` for a while."""
    global _fetching
    before, _fetching = _fetching, Fetch(seed, epoch, samples)
    try:
        yield _fetching
    finally:
        _fetching = before


class GlobalStream(Protocol):
    """A generator that transforms draw from without being told to."""

    def state(self) -> Any: ...

    def same(self, state: Any) -> bool:
        """Whether nothing was drawn since ``state``."""

    def restore(self, state: Any) -> None: ...

    def seed(self, key: int) -> None: ...


class TorchStream:
    """torch's. Seeded directly: torch.manual_seed costs 100 times as much, for other devices."""

    def state(self) -> Any:
        import torch

        return torch.default_generator.get_state()

    def same(self, state: Any) -> bool:
        return bool(self.state().equal(state))

    def restore(self, state: Any) -> None:
        import torch

        torch.default_generator.set_state(state)

    def seed(self, key: int) -> None:
        import torch

        torch.default_generator.manual_seed(key >> 1)


class PythonStream:
    """The module ``random``'s."""

    def state(self) -> Any:
        return random.getstate()

    def same(self, state: Any) -> bool:
        return bool(random.getstate() == state)

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, key: int) -> None:
        random.seed(key)


class NumpyStream:
    """The one behind numpy.random's functions."""

    def state(self) -> Any:
        return np.random.get_state()

    def same(self, state: Any) -> bool:
        # Position, whether half a pair of normal numbers is kept back, and the words.
        now: Any = np.random.get_state()
        return bool(now[2:4] == state[2:4] and np.array_equal(now[1], state[1]))

    def restore(self, state: Any) -> None:
        np.random.set_state(state)

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)


GLOBAL_STREAMS: tuple[GlobalStream, ...] = (TorchStream(), PythonStream(), NumpyStream())


def seed_streams(seed: int, *place: int | str) -> None:
    """Seed every global generator, the current GPU's too, for what happens at this place."""
    bits = key("stream", seed, *place)
    for stream in GLOBAL_STREAMS:
        stream.seed(bits)
    _seed_gpu(bits)


def _seed_gpu(bits: int) -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(bits >> 1)


class StepStreams:
    """Seeds the global generators for each step of a run: torch's always, and those of Python and
    numpy once the first step of an epoch is seen to draw from them. Few models do, and seeding
    these two takes longer than all the rest.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._base, self._shared = key("steps", seed, rank), key("steps", seed)
        self._torch, *self._others = GLOBAL_STREAMS
        self._drawn: list[GlobalStream] = []
        self._states: dict[GlobalStream, Any] = {}

    def seed(self, epoch: int, step: int) -> None:
        bits = self._mixed(self._base, epoch, step)
        self._torch.seed(bits)
        _seed_gpu(bits)
        for stream in self._drawn:
            stream.seed(bits)

    def _mixed(self, mixed: int, *numbers: int) -> int:
        """The finaliser of splitmix64 over the numbers: a tenth of the time of `key`."""
        for number in numbers:
            mixed = (mixed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
            mixed ^= mixed >> 31
        return mixed

    def seed_alike(self, epoch: int, step: int = -1) -> None:
        """Seed torch's generators the same on every rank: for what all must do alike, such as
        callbacks that change weights and optimizers that draw.
        """
        bits = self._mixed(self._shared, epoch, step)
        self._torch.seed(bits)
        _seed_gpu(bits)

    def watch(self, epoch: int, step: int) -> None:
        """Seed all of them, to see afterwards which were drawn from."""
        self.seed(epoch, step)
        for stream in self._others:
            stream.seed(self._mixed(self._base, epoch, step))
        self._states = {stream: stream.state() for stream in self._others}

    def look(self) -> None:
        """From now on seed those that have moved since `watch`."""
        moved = [stream for stream, state in self._states.items() if not stream.same(state)]
        self._drawn += [stream for stream in moved if stream not in self._drawn]
        self._states = {}


class PieceStreams(StepStreams):
    """Seeds all global generators for each piece of each step, by (seed, epoch, step, piece).

    Also those of Python and numpy at every piece: which of them are drawn from may differ between
    pieces, and must not depend on which pieces a rank has seen.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, -1)
        self._base = key("pieces", seed)
        self._place = (0, 0)

    def seed(self, epoch: int, step: int) -> None:
        self._place = (epoch, step)

    watch = seed

    def look(self) -> None:
        """Nothing to look for."""

    def enter(self, piece: int) -> None:
        """Seed for one piece of the step that `seed` named."""
        self._seed_all(self._mixed(self._base, *self._place, piece))

    def seed_alike(self, epoch: int, step: int = -1) -> None:
        self._seed_all(self._mixed(self._shared, epoch, step))

    def _seed_all(self, bits: int) -> None:
        for stream in GLOBAL_STREAMS:
            stream.seed(bits)
        _seed_gpu(bits)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Put the global generators back afterwards, as if nothing had been drawn meanwhile."""
    import torch

    before = [(stream, stream.state()) for stream in GLOBAL_STREAMS]
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        for stream, state in before:
            stream.restore(state)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
