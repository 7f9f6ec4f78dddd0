"""Digests and samples of tensors: small enough to keep of every step and every rank."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor

SAMPLE = 4096
"""How many elements, evenly spaced, are kept of a tensor that is not kept whole."""

_MOST_ROWS, _MOST_BYTES = 16_384, 64 << 20


def digest(tensor: Tensor) -> str:
    """The same for the same type, shape and bits."""
    found = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    found.update(_bytes(tensor))
    return found.hexdigest()


def sampled(tensor: Tensor) -> Tensor:
    """At most `SAMPLE` elements, evenly spaced over the whole tensor."""
    flat = tensor.reshape(-1)
    if flat.numel() <= SAMPLE:
        return flat
    return flat[torch.linspace(0, flat.numel() - 1, SAMPLE, dtype=torch.float64).long()]


def row_prints(batch: Tensor) -> list[int]:
    """A checksum of each row, without the zeros that pad it; none of a batch that is too large."""
    if not batch.dim() or len(batch) > _MOST_ROWS or batch.nbytes > _MOST_BYTES:
        return []
    rows = batch.detach().cpu().contiguous()
    return [zlib.crc32(_bytes(row).rstrip(b"\0")) for row in rows]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
