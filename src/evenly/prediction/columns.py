"""What predictions are made of: tensors with a row per sample, lists with an entry per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenly.errors import SettingError
from evenly.tree import leaves, map_leaves, names, replace_leaves

# A list always has one entry for each sample. If its length decided, a list of two tensors would
# mean one thing for a part of two samples and another for a part of three.
ATOMS = (list,)
_PLAIN = (str, int, float, type(None))
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Column:
    """One leaf of the predictions, over all samples."""

    name: str
    kind: Literal["tensor", "rows", "nothing"]
    dtype: torch.dtype = torch.uint8
    """Of a tensor."""
    shape: tuple[int, ...] = ()
    """Of one row of a tensor."""
    row: Any = None
    """What an entry of a list is: "plain", {"dtype", "tail"} or {"dict": {key: ...}}."""

    @property
    def text(self) -> str:
        if self.kind == "tensor":
            sizes = "".join(f", {size}" for size in self.shape)
            return f"{_short(self.dtype)}[samples{sizes}]"
        return f"list of {_row_text(self.row)}" if self.kind == "rows" else "None"

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Schema:
    """The structure of the predictions: equal texts mean equal structures, types and sizes."""

    template: Any
    """The structure with the columns' places as leaves."""
    columns: tuple[Column, ...]
    text: str

    def build(self, values: Sequence[Any]) -> Any:
        """The structure with these values, one for each column."""
        return map_leaves(lambda place: values[place], self.template, ATOMS)


def read(predictions: Any, count: int) -> tuple[Schema, list[Any]]:
    """What a function predicted for ``count`` samples: its schema, and each column's values.

    Values are copies on the CPU: the bytes of each row of a tensor, and lists as they are.
    """
    columns, values = [], []
    for name, leaf in zip(names(predictions, ATOMS), leaves(predictions, ATOMS), strict=True):
        column, value = _column(name, leaf, count)
        columns.append(column)
        values.append(value)
    if all(column.kind == "nothing" for column in columns):
        raise SettingError(
            f"the predictions for {count} samples hold nothing ({predictions!r}). "
            "Return a tensor, a list with one entry per sample, or a tuple or dict of them."
        )
    template = replace_leaves(predictions, iter(range(len(columns))), ATOMS)
    return Schema(template, tuple(columns), _text(template, columns)), values


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of each row of a contiguous tensor on the CPU; they share its memory."""
    row_bytes = prod(tensor.shape[1:]) * tensor.element_size()
    return tensor.reshape(-1).view(torch.uint8).numpy().reshape(len(tensor), row_bytes)


def tensor_of(column: Column, data: Bytes) -> Tensor:
    """The tensor whose rows' bytes these are; it shares their memory."""
    flat = torch.from_numpy(data.reshape(-1)).view(column.dtype)
    return flat.reshape(len(data), *column.shape)


def size_of_rows(value: Any) -> int:
    """About how many bytes a column's values take on their way to another rank."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Tensor):
        return value.nbytes + 64
    if isinstance(value, str):
        return len(value) + 16
    if isinstance(value, dict):
        return sum(map(size_of_rows, value.values())) + 32 * len(value)
    return sum(map(size_of_rows, value)) + 16 if isinstance(value, list | tuple) else 16


def _column(name: str, leaf: Any, count: int) -> tuple[Column, Any]:
    what = f"the prediction {name!r}" if name else "the prediction"
    if leaf is None:
        return Column(name, "nothing"), None
    if isinstance(leaf, list):
        return _rows(name, what, leaf, count)
    if isinstance(leaf, np.ndarray):
        leaf = _from_numpy(leaf, what)
    if not isinstance(leaf, Tensor):
        raise SettingError(
            f"{what} is a {type(leaf).__name__}, which says nothing about each of {count} samples. "
            "Return a tensor with the samples first, a list with one entry per sample (strings, "
            "numbers, tensors of different sizes), or a tuple or dict of these."
        )
    if leaf.dim() == 0 or leaf.shape[0] != count:
        raise SettingError(
            f"{what} has shape {tuple(leaf.shape)} for a part of {count} samples, so its rows "
            f"belong to no sample. Its first size must be {count}: no squeeze(), no mean, and one "
            "row per sample."
        )
    plain = _own(leaf, what)
    column = Column(name, "tensor", plain.dtype, tuple(plain.shape[1:]))
    return column, bytes_of(plain)


def _own(tensor: Tensor, what: str) -> Tensor:
    """A contiguous copy on the CPU: the function may use the tensor's memory again."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SettingError(
            f"{what} is a {tensor.layout} {tensor.dtype} tensor without plain rows; return "
            "to_dense() or dequantize() of it."
        )
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def _rows(name: str, what: str, rows: list[Any], count: int) -> tuple[Column, list[Any]]:
    if len(rows) != count:
        raise SettingError(
            f"{what} is a list of {len(rows)} for a part of {count} samples. A list has one entry "
            "per sample; put several values for each sample in a tuple or a dict."
        )
    owned = [_entry(row, what) for row in rows]
    kinds = [kind for _, kind in owned]
    texts = [_row_text(kind) for kind in kinds]
    for place, text in enumerate(texts):
        if text != texts[0]:
            raise SettingError(
                f"{what} is a list whose entry 0 is {texts[0]} and entry {place} is {text}; "
                "entries must be of one kind."
            )
    return Column(name, "rows", row=kinds[0]), [row for row, _ in owned]


def _entry(row: Any, what: str) -> tuple[Any, Any]:
    """A sample's entry in a list, as copied, and what it is."""
    if isinstance(row, np.generic):
        row = row.item()
    if isinstance(row, np.ndarray):
        row = _from_numpy(row, what)
    if isinstance(row, Tensor):
        return _own(row, what), {"dtype": _short(row.dtype), "tail": list(row.shape[1:])}
    if isinstance(row, Mapping) and all(isinstance(key, str) for key in row):
        entries = {key: _entry(value, what) for key, value in row.items()}
        mapped = {key: value for key, (value, _) in entries.items()}
        if all(kind == "plain" for _, kind in entries.values()):
            return mapped, "plain"
        return mapped, {"dict": {key: kind for key, (_, kind) in entries.items()}}
    if isinstance(row, list | tuple):
        inside = [_entry(value, what) for value in row]
        if all(kind == "plain" for _, kind in inside):
            return [value for value, _ in inside], "plain"
        raise SettingError(
            f"{what} is a list with an entry that is a {type(row).__name__} with tensors in it; "
            "give a dict of names and tensors for each sample instead."
        )
    if not isinstance(row, _PLAIN):
        raise SettingError(
            f"{what} is a list with a {type(row).__name__} in it; its entries can be tensors, "
            "arrays, strings, numbers, None, and dicts of these."
        )
    return row, "plain"


def _from_numpy(array: NDArray[Any], what: str) -> Tensor:
    try:
        return torch.tensor(array)
    except (TypeError, ValueError):
        raise SettingError(
            f"{what} is an array of type {array.dtype}, which torch has no tensor for; give "
            "numbers in the machine's own byte order, or tolist() of it."
        ) from None


def _text(tree: Any, columns: Sequence[Column]) -> str:
    if isinstance(tree, Mapping):
        inside = ", ".join(f"{key!r}: {_text(value, columns)}" for key, value in tree.items())
        return f"{{{inside}}}"
    if isinstance(tree, tuple):
        kind = "" if type(tree) is tuple else type(tree).__name__
        return f"{kind}({', '.join(_text(value, columns) for value in tree)})"
    return columns[int(tree)].text


def _row_text(row: Any) -> str:
    if row == "plain":
        return "strings, numbers"
    if "dtype" in row:
        return f"{row['dtype']} tensors"
    inside = ", ".join(f"{key!r}: {_row_text(kind)}" for key, kind in row["dict"].items())
    return f"{{{inside}}}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
