"""A rank's sign of life: what it does, published in the store about once a second by a thread.

No collective is added, and nothing is done in the training thread. A rank whose thread no longer
runs (Python's lock held by compiled code, SIGSTOP, a machine that is gone) is silent, which is a
sign as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenly.errors import EvenlyError
from evenly.watchdog.activity import activity
from evenly.watchdog.limits import Limits

VERSION = 1

# A world that closes sooner needs no sign of life, and is not to pay for one.
_BEGIN = 0.2


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One sign of life."""

    rank: int
    count: int
    """Of the process's beats."""
    host: str
    pid: int
    world: int
    """Which of the worlds that the process opened, one after the other."""
    phase: str
    doing: str
    waits: int | None
    epoch: int
    position: int
    step: int
    made: int
    moves: int
    collectives: int
    """How many collectives it has entered: one that has entered fewer keeps the others waiting."""
    idle: float
    """Seconds since it last moved."""
    allowed: float
    report: float
    timeout: float
    folder: str
    own: float | None
    """Seconds a step takes by itself, without waiting for others; the median of some."""
    data: float | None
    """Those of them that it waits for data."""
    samples: int
    step_seconds: float | None
    memory: int | None
    gpu_memory: int | None

    def packed(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})

    @staticmethod
    def unpacked(text: bytes) -> Beat:
        found = json.loads(text)
        found.pop("version")
        return Beat(**found)


def key_of(attempt: str, rank: int) -> str:
    return f"evenly/{attempt}/beat/{rank}"


class Beats:
    """The thread. ``facts`` gives (collectives, bytes of GPU memory), ``beside`` is called after
    each beat with the store, where ranks watch each other. With a ``store`` the first beat is given
    at once, in the thread that makes this: who has one has come to open the world.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        *,
        rank: int,
        attempt: str,
        world: int,
        limits: Limits,
        store: dist.Store | None,
        facts: Callable[[], tuple[int, int | None]],
        beside: Callable[[dist.Store], None] | None = None,
    ) -> None:
        self._connect, self._facts, self._beside = connect, facts, beside
        self._rank, self._world, self._limits = rank, world, limits
        self._key = key_of(attempt, rank)
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._count = 0
        self._mark = (0, 0)
        self._moved = time.monotonic()
        self._pace = (activity.made, time.monotonic())
        self._step_seconds: float | None = None
        self._end = threading.Event()
        self._leaves = False
        self.asking_since: float | None = None
        """When the exchange with the store that is going on began."""
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._key, self._beat().packed())
        self._thread = threading.Thread(target=self._run, name="evenly-beats", daemon=True)
        self._thread.start()

    def stop(self, *, leaves: bool = True) -> None:
        """End the thread. It ``leaves`` in good order, or because of a failure."""
        self._leaves = leaves
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    @property
    def interval(self) -> float:
        report = activity.limits(self._limits).report
        return min(1.0, report / 4) if report else 1.0

    def _run(self) -> None:
        # Else the store is gone, or never came: so are those who look.
        with contextlib.suppress(RuntimeError, EvenlyError):
            if self._end.wait(_BEGIN):
                return
            self.asking_since = time.monotonic()
            store = self._connect()
            while True:
                self.asking_since = time.monotonic()
                store.set(self._key, self._beat().packed())
                if self._beside is not None:
                    self._beside(store)
                self.asking_since = None
                if self._end.wait(self.interval):
                    break
            if self._leaves:
                store.set(self._key, self._beat("left").packed())

    def _beat(self, phase: str = "") -> Beat:
        now = time.monotonic()
        collectives, gpu_memory = self._facts()
        if self._mark != (activity.moves, collectives):
            self._mark, self._moved = (activity.moves, collectives), now
        self._count += 1
        self._measure(now)
        samples = list(activity.samples)
        limits = activity.limits(self._limits)
        activity.sample = True
        return Beat(
            rank=self._rank,
            count=self._count,
            host=self._host,
            pid=self._pid,
            world=self._world,
            phase=phase or activity.phase,
            doing=activity.doing,
            waits=activity.waits,
            epoch=activity.epoch,
            position=activity.position,
            step=activity.step,
            made=activity.made,
            moves=activity.moves,
            collectives=collectives,
            idle=now - self._moved,
            allowed=activity.allowed,
            report=limits.report,
            timeout=limits.timeout,
            folder=activity.folder,
            own=statistics.median(own for own, _ in samples) if samples else None,
            data=statistics.median(data for _, data in samples) if samples else None,
            samples=len(samples),
            step_seconds=self._step_seconds,
            memory=_memory(),
            gpu_memory=gpu_memory,
        )

    def _measure(self, now: float) -> None:
        """Seconds a step, over the last second at least."""
        made, since = self._pace
        if now - since >= 1.0:
            steps = activity.made - made
            self._step_seconds = (now - since) / steps if steps else None
            self._pace = (activity.made, now)


def _memory() -> int | None:
    """Bytes of the process in memory (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def read(store: dist.Store, attempt: str, size: int, known: set[int]) -> dict[int, Beat]:
    """The last beat of each rank that has given one; ``known`` are those, and is added to."""
    for rank in range(size):
        if rank not in known and store.check([key_of(attempt, rank)]):
            known.add(rank)
    ranks = sorted(known)
    if not ranks:
        return {}
    texts: list[Any] = store.multi_get([key_of(attempt, rank) for rank in ranks])
    return {rank: Beat.unpacked(text) for rank, text in zip(ranks, texts, strict=True)}
