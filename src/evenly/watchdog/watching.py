"""Whether and how this process is watched, for as long as its world is open."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from evenly.store import connect
from evenly.variables import Place
from evenly.watchdog.activity import activity
from evenly.watchdog.beats import Beats
from evenly.watchdog.limits import Limits, from_environment
from evenly.watchdog.peers import Peers, StoreGuard

WATCHER_VARIABLE = "EVENLY_WATCHER"
"""The attempt whose launcher watches; processes of another one watch each other."""


class Watching:
    """The threads of this rank. They end with `stop`."""

    def __init__(self, beats: Beats, peers: Peers | None, guard: StoreGuard | None) -> None:
        self._beats, self._peers, self._guard = beats, peers, guard

    def stop(self, *, leaves: bool) -> None:
        """``leaves``: in good order, and not because of a failure."""
        if self._guard is not None:
            self._guard.stop()
        self._beats.stop(leaves=leaves)
        if self._peers is not None:
            self._peers.stop()


def watching(
    place: Place,
    *,
    world: int,
    timeout: float,
    store: dist.Store | None,
    facts: Callable[[], tuple[int, int | None]],
) -> Watching | None:
    """Begin to give signs of life; None for a process that is alone, with nobody to look."""
    launcher = os.environ.get(WATCHER_VARIABLE) == place.attempt
    if place.launcher == "none" or (place.size == 1 and not launcher):
        return None
    defaults = from_environment(os.environ, waits=timeout)

    def limits() -> Limits:
        return activity.limits(defaults)

    peers = None
    if not launcher:
        peers = Peers(rank=place.rank, size=place.size, attempt=place.attempt, limits=limits)
    beats = Beats(
        lambda: connect(place, timedelta(seconds=timeout)),
        rank=place.rank,
        attempt=place.attempt,
        world=world,
        limits=defaults,
        store=store,
        facts=facts,
        beside=peers.beside if peers is not None else None,
    )
    alone = launcher or place.agent_store or place.rank == 0
    return Watching(beats, peers, None if alone else StoreGuard(beats, place.rank, limits))
