"""Which rank writes which rows of which tensor: all in turn, cut into stretches of equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

_WHOLE = 1 << 20  # bytes; smaller tensors are not cut


class Rows(NamedTuple):
    """Some rows of a tensor. One without dimensions counts as one row."""

    name: str
    start: int
    stop: int


def spread(tensors: Mapping[str, Tensor], size: int) -> list[list[Rows]]:
    """The rows that each of ``size`` ranks writes. Every rank finds the same."""
    shares: list[list[Rows]] = [[] for _ in range(size)]
    total = max(1, sum(tensor.nbytes for tensor in tensors.values()))
    begin = 0
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.dim() else 1
        end = begin + tensor.nbytes
        first, last = (min(size - 1, at * size // total) for at in (begin, max(begin, end - 1)))
        if tensor.nbytes < _WHOLE or first == last:
            shares[(first + last) // 2].append(Rows(name, 0, rows))
        else:
            start = 0
            for rank in range(first, last + 1):
                edge = total * (rank + 1) / size
                stop = rows if rank == last else round((edge - begin) * rows / tensor.nbytes)
                if start < stop:
                    shares[rank].append(Rows(name, start, stop))
                    start = stop
        begin = end
    return shares


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """These rows, sharing memory with the tensor."""
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor
