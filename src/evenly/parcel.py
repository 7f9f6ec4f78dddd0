"""A parcel: any value, with tensors of any type and size in it, sent to all ranks at once."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import struct
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evenly.errors import SettingError
from evenly.meeting import Group, meeting, size_of, wire_for
from evenly.packing import as_bytes
from evenly.world import current_world

T = TypeVar("T")

# Every tensor starts at a multiple of this, so that its bytes can be viewed as any type again.
_ALIGNMENT = 16
# In front of a parcel: the bytes of its text and of its tensors, both aligned.
_HEAD = 16
# What the first collective carries. The sums and counts of a dozen metrics fit.
_SMALL = 16_384


def exchange(value: T, what: str, *, group: Group = None) -> list[T]:
    """Each rank's ``value``, in rank order, on every rank. One collective if all parcels are
    small, else two, whatever is in them.

    Tensors travel as bytes beside the rest, which is pickled, and each only once. They arrive
    detached, on the CPU if they left from there, else on the world's device. A value that cannot
    be pickled is an error on all ranks. Every rank holds all parcels, each as large as the largest.
    """
    if size_of(group) == 1:
        return [value]
    wire = wire_for(current_world().device, group)
    parcel = _pack(value)
    with meeting(what):
        received = _gather(parcel.bytes(_SMALL, wire), group)
        heads = received[:, :_HEAD].cpu().view(torch.int64)
        largest = int(heads.sum(1).max()) + _HEAD
        if largest > _SMALL:
            received = _gather(parcel.bytes(largest, wire), group)
    opened = [_open(row, *head) for row, head in zip(received, heads.tolist(), strict=True)]
    for rank, found in enumerate(opened):
        if isinstance(found, _Unsendable):
            raise SettingError(f"{what}: rank {rank} holds a value that {found.reason}")
    return opened


def _gather(sent: Tensor, group: Group) -> Tensor:
    received = sent.new_empty((size_of(group), len(sent)))
    dist.all_gather(list(received.unbind()), sent, group=group)
    return received


class _Unsendable:
    """What a rank sends in place of a value that cannot travel, so that all ranks hear of it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Parcel(pickle.Pickler):
    """The pickled text, and the tensors that it refers to by place."""

    def __init__(self, value: Any) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self._places: dict[int, tuple[torch.dtype, tuple[int, ...], int, bool]] = {}
        self._tensors: list[Tensor] = []
        self.size = 0
        self.dump(value)
        self.text = self._file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._places:
            on_cpu = value.device.type == "cpu"
            self._places[id(value)] = (value.dtype, tuple(value.shape), self.size, on_cpu)
            self._tensors.append(as_bytes(value))
            self.size += _aligned(self._tensors[-1].numel())
        return self._places[id(value)]

    def bytes(self, total: int, wire: torch.device) -> Tensor:
        """Head, text and tensors as ``total`` bytes; the head alone if they do not fit."""
        length = _aligned(len(self.text))
        head = bytearray(struct.pack("=qq", length, self.size))
        if _HEAD + length + self.size > total:
            head += bytes(total - _HEAD)
            return torch.frombuffer(head, dtype=torch.uint8).to(wire)
        buffer = torch.zeros(total, dtype=torch.uint8, device=wire)
        text = torch.frombuffer(head + self.text, dtype=torch.uint8)
        buffer[: len(text)] = text.to(wire)
        start = _HEAD + length
        # One copy for all tensors of a device: each would wait for the GPU.
        for device, run in itertools.groupby(self._tensors, lambda tensor: tensor.device):
            pieces = list(run)
            stop = start + sum(_aligned(len(piece)) for piece in pieces)
            if device == wire:
                _fill(buffer[start:stop], pieces)
            else:
                joined = torch.zeros(stop - start, dtype=torch.uint8, device=device)
                _fill(joined, pieces)
                buffer[start:stop] = joined.to(wire)
            start = stop
        return buffer


class _Opener(pickle.Unpickler):
    def __init__(self, text: bytes, tensors: Tensor) -> None:
        super().__init__(io.BytesIO(text))
        self._tensors = {tensors.device: tensors}
        self._wire = tensors.device

    def persistent_load(self, place: Any) -> Tensor:
        dtype, shape, start, on_cpu = place
        device = torch.device("cpu") if on_cpu else current_world().device
        if device not in self._tensors:  # moved together, because each copy waits for the GPU
            self._tensors[device] = self._tensors[self._wire].to(device)
        size = math.prod(shape) * dtype.itemsize
        return self._tensors[device][start : start + size].view(dtype).reshape(shape)


def _pack(value: Any) -> _Parcel:
    try:
        return _Parcel(value)
    except Exception as error:
        return _Parcel(_Unsendable(f"cannot be pickled ({type(error).__name__}: {error})."))


def _open(row: Tensor, length: int, size: int) -> Any:
    start = _HEAD + length
    text = row[_HEAD:start].cpu().numpy().tobytes()  # what pads it is after the pickle's end
    return _Opener(text, row[start : start + size]).load()


def _fill(buffer: Tensor, pieces: list[Tensor]) -> None:
    start = 0
    for piece in pieces:
        buffer[start : start + len(piece)] = piece
        start += _aligned(len(piece))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
