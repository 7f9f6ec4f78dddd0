"""Predictions in memory: each rank keeps its own, and all are put in order at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenly.collectives import all_gather_object, gather_object
from evenly.prediction.columns import Bytes, Column, Schema, size_of_rows, tensor_of
from evenly.together import together
from evenly.world import current_world

Keep = Literal["all", "first"]
Indices = NDArray[np.int64]
Chunk = tuple[Indices, list[Any]]

# What all ranks together send at a time: this much, and as much again while it is unpickled, is
# what a rank holds beside the result.
_ROUND = 32 * 2**20


class Memory:
    """Collects predictions and gives them whole, on every rank or on rank 0."""

    def __init__(self, length: int, keep: Keep) -> None:
        self._length = length
        self._keep = keep
        self._chunks: deque[Chunk] = deque()
        self._schema: Schema | None = None

    def prepare(self) -> None:
        """Nothing to prepare."""

    def open(self, schema: Schema) -> None:
        self._schema = schema

    def add(self, indices: Indices, values: list[Any]) -> None:
        self._chunks.append((indices, values))

    def finish(self) -> Any:
        """Exchange and put in order. All ranks meet, once for every 32 MiB of predictions.

        What has been sent is let go of, so that the predictions are held about once.
        """
        world = current_world()
        mine = self._keep == "all" or world.rank == 0
        columns = self._schema.columns if self._schema is not None else ()
        wholes: list[Any] = [None] * len(columns)

        def ready() -> list[int]:
            if mine:  # here, so that a rank without the memory for it is an error on all
                wholes[:] = [_whole(column, self._length) for column in columns]
            return self._rounds(_ROUND // world.size)

        plans = together(ready)
        counts, rounds = plans[world.rank], max(map(len, plans))
        for number in range(rounds):
            take = counts[number] if number < len(counts) else 0
            for indices, values in self._exchanged([self._chunks.popleft() for _ in range(take)]):
                for whole, value, column in zip(wholes, values, columns, strict=True):
                    _place(whole, indices, value, column)
        if self._schema is None or not mine:
            return None
        return self._schema.build([_finished(*pair) for pair in zip(columns, wholes, strict=True)])

    def abandon(self) -> None:
        self._chunks.clear()

    def _rounds(self, limit: int) -> list[int]:
        """How many chunks to send in each round."""
        counts: list[int] = []
        room = 0
        for _, values in self._chunks:
            size = sum(map(size_of_rows, values))
            if not counts or size > room:
                counts.append(0)
                room = limit
            counts[-1] += 1
            room -= size
        return counts

    def _exchanged(self, chunks: list[Chunk]) -> Iterator[Chunk]:
        world = current_world()
        if world.size == 1:
            yield from chunks
            return
        assert self._schema is not None
        columns = self._schema.columns
        sent = [(indices, _each(values, columns, _packed)) for indices, values in chunks]
        chunks.clear()
        exchange = all_gather_object if self._keep == "all" else gather_object
        for received in exchange(sent) or ():
            for indices, values in received:
                yield indices, _each(values, columns, _unpacked)


def _each(values: list[Any], columns: tuple[Column, ...], change: Any) -> list[Any]:
    """Lists of tensors changed for the way, or back: pickling a tensor costs 20 times an array."""
    return [
        [_map_row(row, column.row, change) for row in value]
        if column.kind == "rows" and column.row != "plain"
        else value
        for value, column in zip(values, columns, strict=True)
    ]


def _map_row(row: Any, kind: Any, change: Callable[[Any, str], Any]) -> Any:
    if kind == "plain":
        return row
    if "dtype" in kind:
        return change(row, kind["dtype"])
    return {key: _map_row(value, kind["dict"][key], change) for key, value in row.items()}


def _packed(row: Tensor, _: str) -> tuple[list[int], Bytes]:
    return list(row.shape), row.reshape(-1).view(torch.uint8).numpy()


def _unpacked(row: tuple[list[int], Bytes], dtype: str) -> Tensor:
    shape, data = row
    return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


def _whole(column: Column, length: int) -> Any:
    if column.kind == "tensor":
        # torch's memory, because it is aligned for any type.
        return torch.empty((length, column.row_bytes), dtype=torch.uint8).numpy()
    return [None] * length if column.kind == "rows" else None


def _place(whole: Any, indices: Indices, value: Any, column: Column) -> None:
    if column.kind == "rows":
        for index, row in zip(indices.tolist(), value, strict=True):
            whole[index] = row
    elif column.kind == "tensor":
        first, count = int(indices[0]), len(indices)
        if np.array_equal(indices, np.arange(first, first + count)):
            whole[first : first + count] = value
        else:
            whole[indices] = value


def _finished(column: Column, whole: Any) -> Any:
    return tensor_of(column, whole) if column.kind == "tensor" else whole
