"""How steps are made: whole, or in pieces whose bits do not depend on the process count."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from evenly.pieces.holding import held
from evenly.plan import pieces_of
from evenly.seeding import PieceStreams, StepStreams
from evenly.training.averages import Averages, PieceAverages
from evenly.training.measures import PieceMeasures, TrainMeasures
from evenly.training.piecewise import PieceUpdate
from evenly.training.update import Update
from evenly.world import World


class Way:
    """Each rank's part of a step at once, or by micro-batches."""

    pieces: int | None = None
    settings: dict[str, int] | None = None
    """What the bits depend on, and a user sets."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed

    def averages(self) -> Averages:
        return Averages()

    def measures(self, metrics: Any) -> TrainMeasures:
        return TrainMeasures(metrics)

    def streams(self) -> tuple[StepStreams, Callable[..., Update]]:
        """The random streams of steps, and what makes them."""
        return StepStreams(self._seed, self._world.rank), Update

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Within this, threads and algorithms are as they must be."""
        return contextlib.nullcontext()


class InPieces(Way):
    """Every step cut into the same pieces; a rank has some of them."""

    pieces: int

    def __init__(self, world: World, seed: int, pieces: int, threads: int) -> None:
        super().__init__(world, seed)
        self.pieces, self._threads = pieces, threads
        self._own = pieces_of(pieces, world.rank, world.size)
        self.settings = {"pieces": pieces, "threads": threads}

    def averages(self) -> Averages:
        return PieceAverages(self.pieces, self._own)

    def measures(self, metrics: Any) -> TrainMeasures:
        return PieceMeasures(metrics, self.pieces, self._own)

    def streams(self) -> tuple[StepStreams, Callable[..., Update]]:
        streams = PieceStreams(self._seed)
        return streams, functools.partial(PieceUpdate, pieces=self.pieces, streams=streams)

    def held(self) -> contextlib.AbstractContextManager[None]:
        return held(self._threads, self._world.device)


def chosen(world: World, seed: int, pieces: int | None, threads: int) -> Way:
    return Way(world, seed) if pieces is None else InPieces(world, seed, pieces, threads)
