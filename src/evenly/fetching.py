"""Samples into batches: what runs in a data-loading worker, or in the training process without.

Random augmentation is keyed by (seed, epoch, sample), so it does not depend on the number of
processes or workers. That costs little unless something draws: a batch is first read plainly, and
only if a global generator has moved is it read again, sample by sample, that generator seeded by
each sample's key. From then on this process reads so.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset, default_collate

from evenly.blame import summary_of
from evenly.errors import CollateError, DataError, SampleError
from evenly.seeding import (
    GLOBAL_STREAMS,
    GlobalStream,
    OneByOneNeeded,
    fetching,
    key,
    keys_of_samples,
)

Collate = Callable[[list[Any]], Any]


class Cut(NamedTuple):
    """The samples of one piece of a step, within a rank's run of them."""

    piece: int
    start: int
    stop: int


class Wish(NamedTuple):
    """What the loader wants next."""

    epoch: int
    step: int
    indices: NDArray[np.int64]
    cuts: tuple[Cut, ...] | None = None
    """Where to cut the samples into pieces, each of which is collated alone; None: one batch."""


class Batch(NamedTuple):
    """What it gets: the data, or the error to raise in the training process."""

    wish: Wish
    data: Any = None
    error: DataError | None = None


class Fetcher(torch.utils.data.Dataset[Batch]):
    """A data set of batches: indexed by a wish, so that torch's workers can serve it."""

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._own_collate = collate is not None
        self._seed = seed
        self._one_by_one = False
        self._drawn: set[GlobalStream] = set()
        self._empty: Any = None
        # Indexing the tensors gives what default_collate would, without a Python loop.
        self._tensors: tuple[torch.Tensor, ...] | None = None
        if type(dataset) is TensorDataset and collate is None:
            self._tensors = dataset.tensors

    def __getitem__(self, wish: Wish) -> Batch:
        try:
            return Batch(wish, self._fetch(wish))
        except DataError as error:
            return Batch(wish, error=error)

    def _fetch(self, wish: Wish) -> Any:
        if wish.cuts is not None:
            return [self._fetch_piece(wish, cut) for cut in wish.cuts]
        return self._fetch_whole(wish)

    def _fetch_piece(self, wish: Wish, cut: Cut) -> Any:
        """One piece, collated alone: what it is padded to must not depend on who else is here.
        A collate function that draws gets streams of this piece.
        """
        one = Wish(wish.epoch, wish.step, wish.indices[cut.start : cut.stop])
        if not self._own_collate:
            return self._fetch_whole(one)
        samples = one.indices.tolist()
        read = self._read(one)
        before = [(stream, stream.state()) for stream in GLOBAL_STREAMS]
        bits = key("collate", self._seed, wish.epoch, wish.step, cut.piece)
        try:
            for stream, _ in before:
                stream.seed(bits)
            return self._collated(read, samples)
        finally:
            for stream, state in before:
                stream.restore(state)

    def _fetch_whole(self, wish: Wish) -> Any:
        if self._tensors is not None:
            chosen = torch.from_numpy(wish.indices)
            return [tensor.index_select(0, chosen) for tensor in self._tensors]
        if not wish.indices.size:
            if self._empty is None:
                one = Wish(wish.epoch, wish.step, np.zeros(1, dtype=np.int64))
                self._empty = none_of(self._collated(self._read(one), [0]))
            return self._empty
        samples = wish.indices.tolist()
        return self._collated(self._read(wish), samples)

    def _read(self, wish: Wish) -> list[Any]:
        samples = wish.indices.tolist()
        while True:
            before = {stream: stream.state() for stream in GLOBAL_STREAMS}
            try:
                if self._one_by_one:
                    batch = self._read_one_by_one(wish.epoch, samples)
                else:
                    batch = self._read_plainly(wish.epoch, samples)
            except OneByOneNeeded:
                self._one_by_one = True
                continue
            finally:
                # The training process draws from them too, so they are put back.
                moved = {s for s in before if s in self._drawn or not s.same(before[s])}
                for stream in moved:
                    stream.restore(before[stream])
            if moved <= self._drawn:
                return batch
            self._drawn |= moved
            self._one_by_one = True

    def _read_plainly(self, epoch: int, samples: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is None:
            return self._read_one_by_one(epoch, samples)
        try:
            with fetching(self._seed, epoch, samples):
                batch = list(many(samples))
        except OneByOneNeeded:
            raise
        except Exception as error:
            self._read_one_by_one(epoch, samples)  # finds and names the one that raises
            raise _sample_error(error, samples) from error
        if len(batch) != len(samples):
            raise self._miscounted(batch, samples)
        return batch

    def _miscounted(self, batch: list[Any], samples: list[int]) -> SampleError:
        return SampleError(
            f"{type(self._dataset).__name__}.__getitems__ returned {len(batch)} samples for "
            f"{len(samples)} indices. It must return one for each, in that order.",
            samples,
        )

    def _read_one_by_one(self, epoch: int, samples: list[int]) -> list[Any]:
        """Each sample alone, the streams that are drawn from seeded by its key."""
        many = getattr(self._dataset, "__getitems__", None)
        keys = keys_of_samples(self._seed, epoch, samples).tolist() if self._drawn else samples
        batch: list[Any] = []
        with fetching(self._seed, epoch, samples) as fetch:
            for index, key in zip(samples, keys, strict=True):
                fetch.samples = (index,)
                for stream in self._drawn:
                    stream.seed(key)
                try:
                    if many is None:
                        batch.append(self._dataset[index])
                    else:
                        batch += many([index])
                except OneByOneNeeded:
                    raise
                except Exception as error:
                    raise _sample_error(error, [index]) from error
                except (SystemExit, KeyboardInterrupt) as error:
                    if torch.utils.data.get_worker_info() is None:
                        raise
                    raise _sample_error(error, [index]) from error  # a worker that left is silent
        if len(batch) != len(samples):
            raise self._miscounted(batch, samples)
        return batch

    def _collated(self, batch: list[Any], samples: list[int]) -> Any:
        try:
            return self._collate(batch)
        except Exception as error:
            named = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
            problem = CollateError(
                f"the samples {named} could not be put into one batch: {summary_of(error)}. "
                "Samples of one batch must have the same shapes and types; otherwise pass a "
                "collate_fn that pads them.",
                samples,
            )
            problem.add_note(_trace(error))
            raise problem from error


def _sample_error(error: BaseException, samples: Sequence[int]) -> SampleError:
    names = ", ".join(map(str, samples))
    problem = SampleError(
        f"sample{'s' if len(samples) > 1 else ''} {names} could not be read: {summary_of(error)}",
        samples,
    )
    problem.add_note(_trace(error))
    return problem


def _trace(error: BaseException) -> str:
    """The traceback as text: it must reach the training process from a worker."""
    return "".join(traceback.format_exception(error)).rstrip()


_HOLDERS = (torch.Tensor, np.ndarray, Mapping, list, tuple)


def none_of(data: Any) -> Any:
    """A batch with its samples taken out: same structure, first sizes 0."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return data[:0] if data.ndim else data
    if isinstance(data, Mapping):
        return {name: none_of(value) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(none_of(value) for value in data))
    if isinstance(data, list | tuple):
        # A list with one plain value for the one stand-in sample, not a list of fields.
        if all(not isinstance(value, _HOLDERS) for value in data):
            return type(data)()
        return type(data)(none_of(value) for value in data)
    return data
