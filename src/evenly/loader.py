"""The loader: a plan turned into batches on the device."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from evenly import tracing
from evenly.collectives import agree
from evenly.copying import on_device
from evenly.errors import DataError, EvenlyError, SettingError
from evenly.fetching import Batch, Collate, Cut, Fetcher, Wish
from evenly.lifeline import die_with_parent
from evenly.part import Part
from evenly.plan import Plan, Tail, pieces_of, split
from evenly.watchdog.activity import activity
from evenly.world import World, current_world

# How often, in seconds, a wait for workers looks whether they are alive.
_LOOK = 5.0


class Loader:
    """Every sample of an epoch exactly once, on any number of processes.

    ``for part in loader.epoch(e)`` gives this rank's part of each step. The order depends on
    ``seed`` and the epoch alone; ``batch_size`` is what one step sees over all processes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "keep",
        workers: int | Literal["auto"] = "auto",
        collate_fn: Collate | None = None,
        prefetch_factor: int = 2,
        timeout: float = 600.0,
    ) -> None:
        """``tail`` is "keep" or "drop" for a short last step. ``workers`` are processes per rank
        that read ahead ("auto": none for data in memory). ``timeout`` limits the wait for a batch.
        """
        _check_dataset(dataset)
        if workers != "auto" and not (isinstance(workers, int) and workers >= 0):
            raise SettingError(f"workers={workers!r}; give 0 or more, or 'auto'.")
        self.dataset = dataset
        self.plan = Plan(
            length=len(dataset), batch_size=batch_size, shuffle=shuffle, seed=seed, tail=tail
        )
        if self.plan.steps == 0:
            raise DataError(
                f"tail='drop' leaves nothing: {self.plan.length} samples do not fill one step of "
                f"{batch_size}. Use tail='keep', or a smaller batch_size."
            )
        self._fetcher = Fetcher(dataset, collate_fn, self.plan.seed)
        self._workers = workers
        self._prefetch = prefetch_factor
        self._timeout = timeout
        self._wishes = _Wishes()
        self._pool: DataLoader[Batch] | None = None
        self._run = 0
        self._compared = False

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Part]:
        raise SettingError("a Loader is read epoch by epoch: `for part in loader.epoch(e):`.")

    def epoch(
        self, epoch: int, *, start: int = 0, compare: bool = True, pieces: int | None = None
    ) -> Iterator[Part]:
        """This rank's part of each step from ``start`` on; nothing before it is read.

        A meeting of all ranks: they compare what they are about to read, and at the first call the
        settings, the data set's length and what subsets of it choose. ``compare=False`` leaves out
        the first where the ranks cannot differ; after the first call nobody meets then. With
        ``pieces`` each step is cut into that many, whatever the process count: see `Part.pieces`.
        """
        world = current_world()
        if not self._compared:
            agree(self.plan.length, "the length of the data set")
            agree(self.plan, "the loader's settings")
            chosen = [zlib.crc32(np.asarray(one).tobytes()) for one in _choices(self.dataset)]
            agree(chosen, "the samples that a Subset of the data set chooses (their checksum)")
            self._compared = True
        if compare:
            agree((epoch, start), "the (epoch, start) to read")
        walk = self.plan.walk(epoch, rank=world.rank, size=world.size, start=start, pieces=pieces)
        self._run += 1
        cuts = _Cuts(world, pieces)
        wishes = (Wish(epoch, step, own, cuts.of(self.plan.count(step))) for step, own in walk)
        return self._parts(wishes, world, self._run)

    def close(self) -> None:
        """End the workers, which otherwise stay for the next epoch; one may still follow."""
        iterator = getattr(self._pool, "_iterator", None)
        self._pool = None
        if iterator is not None:
            # torch ends them when the iterator is collected, which a traceback can delay.
            iterator._shutdown_workers()

    def _parts(self, wishes: Iterator[Wish], world: World, run: int) -> Iterator[Part]:
        trace = tracing.current()
        for batch, data in on_device(self._batches(wishes, world, run), world.device):
            wish = batch.wish
            if trace is not None:
                if trace.enough(self):
                    return
                trace.read(self, torch.from_numpy(wish.indices), wish.epoch)
            part = Part(
                data=data,
                indices=torch.from_numpy(wish.indices),
                epoch=wish.epoch,
                step=wish.step,
                weight=len(wish.indices),
                global_weight=self.plan.count(wish.step),
                world=world,
            )
            yield part if wish.cuts is None else replace(part, pieces=_pieces(part, wish.cuts))

    def _batches(self, wishes: Iterator[Wish], world: World, run: int) -> Iterator[Batch]:
        pin = world.device.type == "cuda"
        workers = self._worker_count(world)
        source: Iterator[Batch]
        if workers == 0:
            source = (self._fetcher[wish] for wish in wishes)
        else:
            self._wishes.wishes = wishes
            source = self._from_workers(workers, pin)
        while True:
            if run != self._run:  # before taking a batch that belongs to the newer epoch
                raise DataError(
                    "another epoch of this loader was started before this one ended; use a second "
                    "Loader to read two epochs at a time."
                )
            before = activity.enter("data", activity.phase)
            batch = next(source, None)
            activity.back(before)
            if batch is None:
                return
            if batch.error is not None:
                self.close()
                raise batch.error
            yield batch

    def _from_workers(self, workers: int, pin: bool) -> Iterator[Batch]:
        if self._pool is None:
            self._pool = DataLoader(
                self._fetcher,
                sampler=self._wishes,
                batch_size=None,
                collate_fn=_as_is,
                num_workers=workers,
                persistent_workers=True,
                prefetch_factor=self._prefetch,
                pin_memory=pin,
                timeout=min(_LOOK, self._timeout),
                worker_init_fn=_start_worker,
                # Else torch's global generator moves at every epoch, by workers and not without.
                generator=torch.Generator(),
            )
        iterator = iter(self._pool)
        while True:
            batch = self._next(iterator)
            if batch is None:
                return
            yield batch

    def _next(self, iterator: Iterator[Batch]) -> Batch | None:
        """The next batch of the workers. torch looks whether they live only when its own limit has
        passed, so that one is short, and ours counts.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(iterator, None)
            except EvenlyError:
                raise
            except RuntimeError as error:
                if "timed out" in str(error) and time.monotonic() < deadline:
                    continue
                self.close()
                raise DataError(
                    f"a data-loading worker of rank {current_world().rank} ended or gave nothing "
                    f"for {self._timeout:g} s: {error}. Out of memory is the usual cause; try "
                    "fewer workers, or workers=0 to see the data set's own error."
                ) from error

    def _worker_count(self, world: World) -> int:
        if self._workers != "auto":
            return int(self._workers)
        if _in_memory(self.dataset):
            return 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return max(1, min(8, cores // world.local_size))


class _Cuts:
    """Where a rank's run of a step is cut into pieces; worked out once for each length."""

    def __init__(self, world: World, pieces: int | None) -> None:
        self._world, self._pieces = world, pieces
        self._known: dict[int, tuple[Cut, ...]] = {}

    def of(self, count: int) -> tuple[Cut, ...] | None:
        if self._pieces is None:
            return None
        if count not in self._known:
            own = pieces_of(self._pieces, self._world.rank, self._world.size)
            bounds = [(piece, split(count, piece, self._pieces)) for piece in own]
            first = bounds[0][1][0]
            self._known[count] = tuple(
                Cut(piece, start - first, stop - first)
                for piece, (start, stop) in bounds
                if stop > start
            )
        return self._known[count]


def _pieces(part: Part, cuts: tuple[Cut, ...]) -> tuple[Part, ...]:
    return tuple(
        replace(
            part,
            data=data,
            indices=part.indices[cut.start : cut.stop],
            weight=cut.stop - cut.start,
            piece=cut.piece,
        )
        for data, cut in zip(part.data, cuts, strict=True)
    )


class _Wishes:
    """The sampler that torch's workers are fed from: the wishes of the epoch at hand."""

    def __init__(self) -> None:
        self.wishes: Iterator[Wish] = iter(())

    def __iter__(self) -> Iterator[Wish]:
        return self.wishes


def _check_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise SettingError(
            f"a {name} cannot be read by index, so its samples cannot be given out exactly once. "
            "Give a data set with __getitem__ and __len__."
        )
    if not hasattr(dataset, "__len__"):
        raise SettingError(f"a {name} has no length; give a data set with __len__.")
    if len(dataset) == 0:
        raise DataError(f"the data set ({name}) is empty; check its path, split or filter.")


def _choices(dataset: Any) -> Iterator[Any]:
    """What subsets choose: `random_split` without a common seed chooses differently per rank."""
    while isinstance(dataset, Subset):
        yield dataset.indices
        dataset = dataset.dataset


def _in_memory(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _in_memory(dataset.dataset)
    return isinstance(dataset, TensorDataset | list | tuple)


def _start_worker(_: int) -> None:
    # A worker that outlives its rank would keep that rank's connections open, and the other
    # ranks would wait on them.
    die_with_parent()


def _as_is(batch: Any) -> Any:
    return batch
