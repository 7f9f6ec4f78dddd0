"""How much is rounding: differences in units of it, and what they may be.

The unit of a tensor is eps of its type times its root mean square (at least a quarter of the
largest among the tensors it belongs with, so that what is zero by nature is not measured by its own
noise). A difference counts by its root mean square, because single elements may be off by far more:
AdamW divides by a gradient that may be nearly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 256.0
"""Units that one step may add. One sample too many in a float32 step of 1,000 makes 8,000."""

FLOOR = 1 / 4
"""Of the largest scale: below it, another tensor's scale counts."""

JUMP = 64.0
"""Rounding does not grow by more than this from one step to the next."""


def eps_of(*dtypes: torch.dtype | None) -> float:
    """The coarsest of these types; for whole numbers there is none."""
    floats = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)


def cap(eps: float) -> float:
    """Units beyond which nothing is called rounding: a relative difference of sqrt(eps)."""
    return 1 / math.sqrt(eps)


def limit(eps: float, before: float) -> float:
    """What a step may differ by, in units, where the parameters differed by ``before`` already."""
    return min(STEP * (1 + before), cap(eps))


@dataclass(frozen=True)
class Gap:
    """How far apart two tensors are."""

    identical: bool = True
    units: float = 0.0
    """Of rounding; infinite where shapes or kinds differ, or only one of them is finite."""
    largest: float = 0.0
    """The largest difference of any element."""
    tensor: str = ""


def rms(tensor: Tensor) -> float:
    """The root mean square of what is finite in it."""
    values = tensor.double()
    values = values[torch.isfinite(values)]
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def gap(one: Tensor, other: Tensor, eps: float, floor: float = 0.0, name: str = "") -> Gap:
    """From ``one``, the reference, to ``other``; nan equals nan."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return Gap(False, math.inf, math.inf, name)
    a, b = one.double(), other.double()
    same = (one == other) | (torch.isnan(a) & torch.isnan(b))
    if bool(same.all()):
        bits = bool(((torch.signbit(a) == torch.signbit(b)) | torch.isnan(a)).all())
        return Gap(bits, 0.0, 0.0, name)
    apart = torch.where(same, 0.0, b - a)
    largest = float(apart.abs().max())
    if not math.isfinite(largest) or not one.dtype.is_floating_point or eps == 0:
        return Gap(False, math.inf, largest, name)
    scale = max(rms(one), floor * FLOOR)
    if scale == 0:
        return Gap(False, math.inf, largest, name)
    return Gap(False, rms(apart) / (eps * scale), largest, name)


def number_gap(one: float, other: float, eps: float, floor: float = 0.0, name: str = "") -> Gap:
    """The same for single numbers."""
    a, b = (torch.tensor(value, dtype=torch.float64) for value in (one, other))
    return gap(a, b, eps, floor, name)
