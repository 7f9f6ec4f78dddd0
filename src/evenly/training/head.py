"""What a rank says in a step of pieces, as bytes that travel with the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenly.packing import as_bytes
from evenly.part import Part
from evenly.training.carrier import Wishes

_MARKS = 5  # stop, save, epoch, step, whether buffers changed that are not exchanged yet


class Told:
    """What this rank has to say in a step."""

    def __init__(self, part: Part, wishes: Wishes) -> None:
        self.part, self.wishes = part, wishes
        self.sums: dict[int, tuple[Tensor | float, Tensor | float]] = {}
        self.counts: dict[int, Tensor] = {}
        """Of buffers that are not averaged, after the first piece."""
        self.changes: dict[int, dict[int, Tensor]] = {}
        """By piece, of buffers that are not exchanged with the gradients yet."""

    def live(self, pieces: int) -> int:
        return min(self.part.global_weight, pieces)


class Said:
    """What one rank said."""

    def __init__(self, numbers: Any, pieces: int, used: Any, counts: list[Tensor]) -> None:
        stop, save, epoch, step, surprised = numbers[:_MARKS].tolist()
        self.stop, self.save, self.surprised = stop > 0, save > 0, surprised > 0
        self.place = (epoch, step)
        self.totals = numbers[_MARKS : _MARKS + pieces].tolist()
        self.weights = numbers[_MARKS + pieces :].tolist()
        self.used = used
        self.counts = counts


class Head:
    """How what a rank says is written as bytes: of a fixed length, so that nobody must ask."""

    def __init__(self, *, pieces: int, parameters: int, counts: list[Tensor]) -> None:
        self._pieces, self._parameters, self._like = pieces, parameters, counts
        self._numbers = _aligned(8 * (_MARKS + 2 * pieces))
        self._flags = _aligned(parameters)
        self._places = np.cumsum([0, *(_aligned(t.numel() * t.itemsize) for t in counts)]).tolist()
        self.size = self._numbers + self._flags + self._places[-1]

    def written(
        self, told: Told, used: list[bool], counts: list[Tensor], surprised: bool
    ) -> Tensor:
        head = np.zeros(self.size, dtype=np.uint8)
        marks = (*told.wishes, told.part.epoch, told.part.step, surprised)
        numbers = head[: self._numbers].view(np.float64)
        numbers[:_MARKS] = marks
        for place, piece in enumerate(sorted(told.sums)):
            total, weight = told.sums[piece]
            numbers[_MARKS + place] = float(total)
            numbers[_MARKS + self._pieces + place] = float(weight)
        head[self._numbers : self._numbers + self._parameters] = used
        written = torch.from_numpy(head)
        start = self._numbers + self._flags
        for count, place in zip(counts, self._places, strict=False):
            value = as_bytes(count).cpu()
            written[start + place : start + place + len(value)] = value
        return written

    def read(self, head: Tensor) -> Said:
        bytes_ = head.cpu()
        array = bytes_.numpy()
        numbers = array[: 8 * (_MARKS + 2 * self._pieces)].view(np.float64)
        used = array[self._numbers : self._numbers + self._parameters].astype(bool)
        start = self._numbers + self._flags
        counts = [
            bytes_[start + place : start + place + like.numel() * like.itemsize]
            .view(like.dtype)
            .reshape(like.shape)
            .clone()
            for like, place in zip(self._like, self._places, strict=False)
        ]
        return Said(numbers, self._pieces, used, counts)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
