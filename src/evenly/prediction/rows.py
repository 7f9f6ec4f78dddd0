"""Lists with one entry per sample on disk: JSON lines, and where each line starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import torch
from numpy.typing import NDArray

from evenly.errors import SettingError
from evenly.prediction.files import array_header, create, opened, runs, write_at

_BLOCK = 2**16


class RowWriter:
    """One rank's entries of a list.

    The place of a line is known only when all lines before it are, so they go to a file of this
    rank first; `place` copies them into the one file that all ranks share. Memory holds one batch.
    """

    def __init__(self, folder: Path, name: str, rank: int, length: int) -> None:
        self.lines = folder / f"{name}.jsonl"
        self.offsets = folder / f"{name}.offsets.npy"
        self._spool = folder / f"{name}.{rank}.spool"
        self._length = length
        self._header = array_header(np.dtype(np.int64), (length + 1,))
        self._start = len(self._header)
        self._files = ExitStack()
        self._out: BinaryIO | None = None
        self._descriptor = -1

    def create(self) -> None:
        """Make the shared file; for one rank, before the others open it."""
        create(self.offsets, self._header, self._start + 8 * (self._length + 1))

    def open(self) -> None:
        self._out = self._files.enter_context(self._spool.open("wb"))
        self._descriptor = self._files.enter_context(opened(self.offsets, os.O_RDWR))

    def add(self, indices: NDArray[np.int64], rows: list[Any]) -> None:
        assert self._out is not None
        lines = [_line(row) for row in rows]
        sizes = np.array([len(line) for line in lines], dtype=np.int64)
        # The size of line i stands where line i + 1 starts, until all are known.
        for first, stop in runs(indices):
            place = self._start + 8 * (int(indices[first]) + 1)
            write_at(self._descriptor, sizes[first:stop], place)
        self._out.write(np.array([len(lines)], dtype=np.int64).tobytes())
        self._out.write(indices.tobytes() + sizes.tobytes())
        self._out.writelines(lines)

    def sync(self) -> None:
        assert self._out is not None
        self._out.flush()
        os.fsync(self._descriptor)

    def add_up(self) -> None:
        """Turn sizes into starts, block by block; for one rank, when all have synced."""
        total = 0
        with opened(self.offsets, os.O_RDWR) as descriptor:
            for begin in range(0, self._length + 1, _BLOCK):
                place = self._start + 8 * begin
                count = min(_BLOCK, self._length + 1 - begin)
                starts = np.frombuffer(os.pread(descriptor, 8 * count, place), dtype=np.int64)
                starts = total + np.cumsum(starts)
                total = int(starts[-1])
                write_at(descriptor, starts, place)
            os.fsync(descriptor)
        with self.lines.open("wb") as file:
            os.truncate(file.fileno(), total)

    def place(self) -> None:
        """Copy this rank's lines to their places; when the starts are known."""
        self._files.close()
        with (
            self._spool.open("rb") as spool,
            opened(self.offsets, os.O_RDONLY) as starts,
            opened(self.lines, os.O_WRONLY) as lines,
        ):
            while head := spool.read(8):
                count = int(np.frombuffer(head, dtype=np.int64)[0])
                indices = np.frombuffer(spool.read(8 * count), dtype=np.int64)
                sizes = np.frombuffer(spool.read(8 * count), dtype=np.int64)
                for first, stop in runs(indices):
                    start = os.pread(starts, 8, self._start + 8 * int(indices[first]))
                    text = spool.read(int(sizes[first:stop].sum()))
                    write_at(lines, text, int.from_bytes(start, "little"))
            os.fsync(lines)
        self._spool.unlink()

    def close(self) -> None:
        self._files.close()


class Rows(Sequence[Any]):
    """The entries of a list, read from disk when asked for."""

    def __init__(self, lines: Path, offsets: Path, kind: Any) -> None:
        self._lines = np.memmap(lines, dtype=np.uint8, mode="r")
        self._offsets = np.load(offsets, mmap_mode="r")
        self._kind = kind

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        index = range(len(self))[place]
        start, stop = self._offsets[index], self._offsets[index + 1]
        return _restored(json.loads(self._lines[start:stop].tobytes()), self._kind)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Rows({len(self)} entries on disk)"


def _line(row: Any) -> bytes:
    # ASCII alone: a line is then one line for every reader, whatever the text holds.
    return (json.dumps(row, default=_values, separators=(",", ":")) + "\n").encode("ascii")


def _values(tensor: torch.Tensor) -> Any:
    if tensor.is_complex():
        raise SettingError(
            f"a list with {tensor.dtype} tensors cannot be written as JSON lines; give "
            "torch.view_as_real() of them."
        )
    return tensor.tolist()


def _restored(row: Any, kind: Any) -> Any:
    if kind == "plain":
        return row
    if "dtype" in kind:
        tensor = torch.tensor(row, dtype=getattr(torch, kind["dtype"]))
        # Nothing is left of the other sizes of an empty tensor but what its like had.
        return tensor if row != [] else tensor.reshape(0, *kind["tail"])
    return {key: _restored(value, kind["dict"][key]) for key, value in row.items()}
