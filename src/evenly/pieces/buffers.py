"""The model's buffers: each piece starts from those of the step, and they are then combined."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Numbers that are compared rather than asked whether somebody has written to them.
_SMALL = 2**14


@dataclass
class _Kept:
    """A buffer as the step found it."""

    tensor: Tensor
    copy: Tensor
    version: int

    @property
    def small(self) -> bool:
        return self.copy.numel() <= _SMALL


class Buffers:
    """What pieces do to the buffers of modules (BatchNorm's running statistics).

    Floating ones become the mean of what the pieces make of them, by samples: each piece's change
    times its share of the step is added up along the tree. Others (the count of batches) become
    what the first piece makes of them. One that a piece gives another shape is put back.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = {id(owner): owner for module in modules for owner in module.modules()}
        self._slots = [(owner, name) for owner in owners.values() for name in owner._buffers]
        self._kept: dict[int, _Kept] = {}
        self._touched: set[int] = set()
        self._modes: list[bool] = []
        self._doubted = True  # whether what changes may be others than before

    def open(self, known: Collection[int]) -> None:
        """Start a step. ``known`` are the buffers that steps change; large ones that nobody has
        written to are not copied again.
        """
        modes = [owner.training for owner, _ in self._slots]
        self._doubted, self._modes = modes != self._modes, modes
        for place, (owner, name) in enumerate(self._slots):
            tensor, kept = owner._buffers.get(name), self._kept.get(place)
            if tensor is None:
                self._kept.pop(place, None)
            elif kept is None or kept.tensor is not tensor or kept.copy.shape != tensor.shape:
                self._kept[place] = _Kept(tensor, tensor.detach().clone(), tensor._version)
            elif place in known or kept.small or kept.version != tensor._version:
                kept.copy.copy_(tensor.detach())
                kept.version = tensor._version

    def changed(self, known: Collection[int]) -> Iterator[tuple[int, Tensor]]:
        """The buffers that a piece has changed: their places and values.

        torch does not count what BatchNorm does to its statistics as writing, so small ones are
        compared; on a GPU, which that would wait for, at the first step alone, and where modules
        have changed between training and evaluation since.
        """
        for place, kept in self._kept.items():
            owner, name = self._slots[place]
            tensor = owner._buffers.get(name)
            if tensor is kept.tensor and place not in known and tensor._version == kept.version:
                compared = kept.small and (self._doubted or not tensor.is_cuda)
                if not compared or torch.equal(tensor, kept.copy):
                    continue
            self._touched.add(place)
            same = tensor is not None and tensor.shape == kept.copy.shape
            if tensor is not None and same and tensor.dtype == kept.copy.dtype:
                yield place, tensor.detach()

    def change(self, place: int, value: Tensor, share: float) -> Tensor:
        """A piece's share of the change. What is as before, infinite or not, changes by -0.0,
        which no sum is different for.
        """
        before = self._kept[place].copy
        return torch.where(value == before, -0.0, value - before).to(before.dtype) * share

    def averaged(self, place: int) -> bool:
        copy = self._kept[place].copy
        return copy.is_floating_point() or copy.is_complex()

    def like(self, place: int) -> Tensor:
        return self._kept[place].copy

    @torch.no_grad()
    def restore(self) -> None:
        """Put every buffer back to what the step found, for the next piece."""
        for place, kept in self._kept.items():
            if place in self._touched or kept.tensor._version != kept.version:
                owner, name = self._slots[place]
                owner._buffers[name] = kept.tensor
                kept.tensor.copy_(kept.copy)
                kept.version = kept.tensor._version
        self._touched.clear()

    @torch.no_grad()
    def advance(self, place: int, change: Tensor) -> None:
        kept = self._kept[place]
        kept.tensor.copy_(kept.copy + change)

    @torch.no_grad()
    def replace(self, place: int, value: Tensor) -> None:
        self._kept[place].tensor.copy_(value)
