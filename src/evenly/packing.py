"""Many tensors as one run of bytes, so that a structure travels in one collective."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Every tensor starts at a multiple of this, so that its bytes can be viewed as any type again.
_ALIGNMENT = 16


def packed_size(tensors: Sequence[Tensor]) -> int:
    """How many bytes `pack` makes of these tensors."""
    return _head(tensors) + sum(_aligned(t.numel() * t.element_size()) for t in tensors)


def pack(tensors: Sequence[Tensor], total: int) -> Tensor:
    """The first dimensions, then all values, as ``total`` bytes on the tensors' device."""
    device = tensors[0].device
    buffer = torch.empty(total, dtype=torch.uint8, device=device)
    lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
    buffer[: 8 * len(tensors)] = lengths.view(torch.uint8).to(device)
    start = _head(tensors)
    for tensor in tensors:
        values = as_bytes(tensor)
        buffer[start : start + values.numel()] = values
        start += _aligned(values.numel())
    return buffer


def as_bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor as a run of bytes, copied only where they do not lie in one."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.stride(0) != 1:  # a single value cut from a row counts as contiguous all the same
        plain = torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain)
    return plain.view(torch.uint8)


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that another rank packed; ``like`` gives types and all but the first sizes."""
    lengths = buffer[: 8 * len(like)].cpu().view(torch.int64).tolist()
    start, tensors = _head(like), []
    for length, pattern in zip(lengths, like, strict=True):
        shape = (length, *pattern.shape[1:])
        size = math.prod(shape) * pattern.element_size()
        tensors.append(buffer[start : start + size].view(pattern.dtype).reshape(shape))
        start += _aligned(size)
    return tensors


def _head(tensors: Sequence[Tensor]) -> int:
    return _aligned(8 * len(tensors))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
