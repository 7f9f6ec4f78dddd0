"""Predictions in data-set order, each sample once, to memory or to disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import torch

from evenly.collectives import agree
from evenly.errors import DataError, DisagreementError, SettingError
from evenly.part import Part
from evenly.prediction import parquet
from evenly.prediction.columns import Schema, read
from evenly.prediction.folder import Folder
from evenly.prediction.layout import Format
from evenly.prediction.manifest import read_predictions
from evenly.prediction.memory import Indices, Keep, Memory
from evenly.prediction.tally import Tally, every_sample_once
from evenly.together import together
from evenly.turn import on_rank
from evenly.world import World, current_world

__all__ = ["predict", "read_predictions"]

Function = Callable[[Part], Any]

# How often, in seconds, a rank looks whether another has given up.
_LOOK = 0.5


def predict(
    parts: Iterable[Part],
    function: Function,
    *,
    length: int,
    keep: Keep = "all",
    out: str | os.PathLike[str] | None = None,
    format: Format = "npy",
) -> Any:
    """What ``function(part)`` predicts for all ``length`` samples, in data-set order, each once.

    A prediction is a tensor with the samples first, a list with one entry per sample (strings,
    numbers, tensors of different sizes, dicts of these), or a tuple or dict of these. All are
    gathered on the CPU, on every rank or, with ``keep="first"``, on rank 0 (None elsewhere).
    With ``out`` every batch is written to that folder instead, which must not exist and which all
    machines must share; its path is returned, for `read_predictions`.

    All ranks meet at the start, after the first part and at the end; an error on one is raised on
    all. ``function`` is not called for empty parts, so it must not talk to other ranks.
    """
    world = current_world()
    folder = None if out is None else Path(out).absolute()
    together(lambda: _check(length, keep, folder, format))
    agree((length, keep, folder, format), "what predict() was asked for")
    token = on_rank(0)(lambda: uuid4().hex[:12])()
    sink = Memory(length, keep) if folder is None else Folder(folder, format, length, token)
    walk = _Walk(parts, function, length, world, token)
    try:
        sink.prepare()
        schema = _agreed(together(walk.first), walk.schema)
        sink.open(schema)
        tallies = together(lambda: walk.rest(sink, schema))
        every_sample_once(tallies, length)
        return sink.finish()
    except BaseException:
        sink.abandon()
        raise


class _Walk:
    """This rank's way through its parts, with a look now and then at how the others fare."""

    def __init__(
        self, parts: Iterable[Part], function: Function, length: int, world: World, token: str
    ) -> None:
        self._parts = iter(parts)
        self._function = function
        self._world = world
        self._stop = f"prediction/{token}/stop"
        self._looked = time.monotonic()
        self.schema: Schema | None = None
        self._pending: tuple[Indices, list[Any]] | None = None
        self._tally = Tally(length, world.rank, world.size)

    def first(self) -> Schema | None:
        """Predict the first part, for the structure of all; None without samples in it."""
        part = next(self._parts, None)
        if part is None or part.weight == 0:
            return None
        self.schema, values = self._predicted(part)
        self._pending = (part.indices.cpu().numpy(), values)
        return self.schema

    def rest(self, sink: Memory | Folder, schema: Schema) -> Tally:
        """Predict the other parts. When a rank fails, the others stop early and meet it."""
        try:
            if self._pending is not None:
                self._keep(sink, *self._pending)
                self._pending = None
            for part in self._parts:
                if self._others_stopped():
                    break
                if part.weight:
                    found, values = self._predicted(part)
                    _compare(found, schema, part)
                    self._keep(sink, part.indices.cpu().numpy(), values)
        except Exception:
            with contextlib.suppress(RuntimeError):  # without a store there is no meeting either
                if self._world.store is not None:
                    self._world.store.set(self._stop, "")
            raise
        return self._tally

    def _predicted(self, part: Part) -> tuple[Schema, list[Any]]:
        with torch.no_grad():
            return read(self._function(part), part.weight)

    def _keep(self, sink: Memory | Folder, indices: Indices, values: list[Any]) -> None:
        self._tally.add(indices)
        sink.add(indices, values)

    def _others_stopped(self) -> bool:
        world = self._world
        if world.board is None or world.store is None:
            return False
        world.board.check()
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return False
        self._looked = now
        return bool(world.store.check([self._stop]))


def _check(length: int, keep: Keep, out: Path | None, format: Format) -> None:
    if length < 1:
        raise SettingError(f"length={length}: there is nothing to predict; give the data's length.")
    if keep not in get_args(Keep):
        raise SettingError(f"keep={keep!r}; give 'all' (every rank) or 'first' (rank 0).")
    if format not in get_args(Format):
        raise SettingError(f"format={format!r}; choose from {', '.join(get_args(Format))}.")
    if out is None and format != "npy":
        raise SettingError(f"format={format!r} is for predictions on disk; give out= as well.")
    if out is not None and keep != "all":
        raise SettingError(f"keep={keep!r} is for predictions in memory; leave it or out= away.")
    if format == "parquet":
        parquet.check_installed()


def _agreed(schemas: list[Schema | None], own: Schema | None) -> Schema:
    """The structure that all ranks with samples found.

    A rank's own where it has one: classes that a script defines come as copies from other ranks.
    """
    found = [(rank, schema) for rank, schema in enumerate(schemas) if schema is not None]
    if not found:
        raise DataError(
            "the first part has no samples on any rank, so the structure of the predictions is not "
            "known. Give the parts of Loader(dataset, batch_size=...).epoch(0)."
        )
    if any(schema.text != found[0][1].text for _, schema in found):
        listing = ", ".join(f"rank {rank}: {schema.text}" for rank, schema in found)
        raise DisagreementError(f"the predictions differ between ranks ({listing}). {_REMEDY}")
    return own or found[0][1]


def _compare(found: Schema, schema: Schema, part: Part) -> None:
    if found.text != schema.text:
        raise SettingError(
            f"the predictions of step {part.step} are {found.text}, those of the first step "
            f"{schema.text}. {_REMEDY}"
        )


_REMEDY = (
    "Structure, types and row sizes must stay the same. For rows of different sizes return a list "
    "with one tensor per sample."
)
