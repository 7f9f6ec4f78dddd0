"""Where each tensor of the predictions lies on disk: the same on every rank, without asking."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from evenly.errors import SettingError
from evenly.prediction.columns import Bytes, Column, bytes_of, tensor_of
from evenly.prediction.files import array_header

Format = Literal["npy", "safetensors", "parquet"]

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Region:
    """One tensor's rows in a file, one after the other."""

    column: Column
    file: str
    offset: int
    stored: torch.dtype
    """The type on disk, where that of the predictions has none."""

    @property
    def row_bytes(self) -> int:
        return prod(self.column.shape) * self.stored.itemsize

    def encoded(self, rows: Bytes) -> Bytes:
        """The bytes of rows as they are on disk."""
        if self.stored == self.column.dtype:
            return rows
        return bytes_of(tensor_of(self.column, rows).to(self.stored))


@dataclass(frozen=True)
class Layout:
    """The files of tensors: how each begins, how large it is, and what is where."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    regions: dict[int, Region]
    """By the place of the column."""


def lay_out(columns: Sequence[Column], names: Sequence[str], length: int, format: Format) -> Layout:
    """A .npy file for each tensor, or one safetensors file for all.

    bfloat16 and the float8 types do not exist in .npy files; they become float32 there, which
    holds each of their values exactly.
    """
    places = [place for place, column in enumerate(columns) if column.kind == "tensor"]
    if format == "safetensors":
        return _one_file(columns, names, length, places)
    layout = Layout({}, {}, {})
    for place in places:
        column, file = columns[place], f"{names[place]}.npy"
        stored, dtype = _numpy_type(column)
        header = array_header(dtype, (length, *column.shape))
        region = Region(column, file, len(header), stored)
        layout.headers[file] = header
        layout.sizes[file] = len(header) + length * region.row_bytes
        layout.regions[place] = region
    return layout


def _one_file(
    columns: Sequence[Column], names: Sequence[str], length: int, places: list[int]
) -> Layout:
    if not places:
        return Layout({}, {}, {})
    # Wide types first, so that each tensor starts at a multiple of its type's size.
    order = sorted(places, key=lambda place: -columns[place].dtype.itemsize)
    entries: dict[str, Any] = {}
    start = 0
    for place in order:
        column = columns[place]
        if column.dtype not in _SAFETENSORS:
            raise SettingError(
                f"safetensors files have no type for {column.dtype} ({column.text}); use "
                "format='npy', or return another type."
            )
        stop = start + length * column.row_bytes
        entries[names[place]] = {
            "dtype": _SAFETENSORS[column.dtype],
            "shape": [length, *column.shape],
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header, file = len(text).to_bytes(8, "little") + text, "predictions.safetensors"
    regions = {}
    for place in order:
        begin = len(header) + entries[names[place]]["data_offsets"][0]
        regions[place] = Region(columns[place], file, begin, columns[place].dtype)
    return Layout({file: header}, {file: len(header) + start}, regions)


def file_names(columns: Sequence[Column]) -> list[str]:
    """A name for each column that any file system takes, and that no other has."""
    found: list[str] = []
    for column in columns:
        name = re.sub(r"[^\w.-]", "_", column.name, flags=re.ASCII).lstrip(".")[:80]
        base = name = name or "predictions"
        number = 1
        while name.lower() in (other.lower() for other in found):
            number += 1
            name = f"{base}-{number}"
        found.append(name)
    return found


def _numpy_type(column: Column) -> tuple[torch.dtype, np.dtype[Any]]:
    """The type on disk, as torch and as numpy know it."""
    wider = torch.complex64 if column.dtype.is_complex else torch.float32
    candidates = [column.dtype]
    if column.dtype.is_complex or column.dtype.is_floating_point:
        candidates.append(wider)
    for stored in candidates:
        try:
            return stored, torch.empty(0, dtype=stored).numpy().dtype
        except TypeError:
            continue
    raise SettingError(
        f".npy files have no type for {column.dtype} ({column.text}); return another type."
    )
