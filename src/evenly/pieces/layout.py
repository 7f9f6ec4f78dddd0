"""The layout: many tensors in a few flat ones, which are added and sent as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# What is exchanged at a time: large enough to be quick, small enough to start during backward.
_BUCKET = 25 * 2**20
# Slices are multiples of so many numbers, so that what follows one is aligned for any type.
_STRIDE = 16


class Slot(NamedTuple):
    """Where a tensor lies."""

    bucket: int
    start: int


class Bucket:
    """Tensors of one type and device, side by side."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.length = 0
        self.waiting = 0
        """How many of its tensors are gradients, which come one after the other."""


class Layout:
    """Where each gradient, and each buffer that steps change, lies in the flat tensors.

    Gradients come in reverse order, as backward passes make them. They are made long
    enough for ``size`` equal slices, one for each rank to work on.
    """

    def __init__(self, gradients: Sequence[Tensor], buffers: Sequence[Tensor], size: int) -> None:
        self.like = [*gradients, *buffers]
        self.gradients = len(gradients)
        self.buckets: list[Bucket] = []
        self.slots: list[Slot] = [Slot(0, 0)] * len(self.like)
        for place in reversed(range(len(gradients))):
            bucket = self._add(place, _BUCKET)
            bucket.waiting += 1
        for place in range(len(gradients), len(self.like)):
            self._add(place, None)
        for bucket in self.buckets:
            bucket.length = -(-bucket.length // (_STRIDE * size)) * _STRIDE * size

    def _add(self, place: int, limit: int | None) -> Bucket:
        tensor = self.like[place]
        kind = (tensor.dtype, tensor.device)
        fitting = [b for b in self.buckets if (b.dtype, b.device) == kind]
        full = limit is not None and fitting and fitting[-1].length * tensor.itemsize >= limit
        if not fitting or full:
            self.buckets.append(Bucket(*kind))
            fitting = [self.buckets[-1]]
        bucket = fitting[-1]
        self.slots[place] = Slot(self.buckets.index(bucket), bucket.length)
        bucket.length += tensor.numel()
        return bucket


class Sheet:
    """One value for every place of a layout: a leaf of the tree, or the sum of several."""

    def __init__(self, layout: Layout) -> None:
        self.flats = [torch.zeros(b.length, dtype=b.dtype, device=b.device) for b in layout.buckets]
        self.views = [
            _shaped(self.flats[slot.bucket], slot.start, tensor)
            for slot, tensor in zip(layout.slots, layout.like, strict=True)
        ]


def _shaped(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """A stretch of the flat tensor, in the order of memory that the tensor itself has."""
    stretch = flat[start : start + like.numel()]
    for kind, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        last = like.dim() == dimensions and like.is_contiguous(memory_format=kind)
        if last and not like.is_contiguous():
            return stretch.as_strided(like.shape, like.stride())
    return stretch.view(like.shape)
