"""How much is rounding: differences in units of it, and what they may be.

The unit of a tensor is eps of its type times its root mean square, at least a quarter of the
largest among the tensors it belongs with, so that what is zero by nature is not measured by its own
noise. Differences count by their root mean square too: single elements may be off by far more.

Rounding moves loss, predictions and statistics smoothly, but not gradients: where it tips an
activation over the edge of a ReLU, that one counts or does not. So gradients may differ by what one
activation among thousands does, and by more where it is seen that the step is the same: its loss,
and the gradient of a layer above the edge. Parameters may differ by that share of the way that they
have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 256.0
"""Units that one step may add; healthy ones are seen to add 1 to 60."""

FLOOR = 1 / 4
"""Of the largest scale: below it, another tensor's scale counts."""

JUMP = 64.0
"""Rounding does not grow by more than this from one step to the next."""

EDGE = 1e-3
"""What tipped activations may change in a float32 gradient; in float64 none is tipped."""

TIPPED = 0.25
"""What a tipped activation may change where the loss and another tensor's gradient do not."""

MOST = 1e-2
"""The largest relative difference in float32 that is called rounding, however it has grown. One
sample too many in a step of 64 changes the gradient by more."""


def eps_of(*dtypes: torch.dtype | None) -> float:
    """The coarsest of these types; for whole numbers there is none."""
    floats = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)


def bounds(eps: float) -> tuple[float, float]:
    """What a gradient may differ by, relatively: at any time, and where rounding has grown."""
    if eps > 1e-4:
        return 0.25, 0.25  # bf16 keeps two digits, and sums of it fewer
    return (EDGE, MOST) if eps > 1e-10 else (0.0, math.sqrt(eps))


def limit(eps: float, before: float) -> float:
    """Units that loss, statistics and predictions may differ by, where the parameters differed by
    ``before`` already.
    """
    return min(STEP * (1 + before), bounds(eps)[1] / eps)


def gradient_limit(eps: float, before: float) -> float:
    """The same of gradients, in which activations may have tipped."""
    return max(limit(eps, before), bounds(eps)[0] / eps)


@dataclass(frozen=True)
class Gap:
    """How far apart two tensors are."""

    identical: bool = True
    units: float = 0.0
    """Of rounding; infinite where shapes or kinds differ, or only one of them is finite."""
    largest: float = 0.0
    """The largest difference of any element."""
    tensor: str = ""
    allowed: float | None = None
    """What this tensor may differ by, where it has a limit of its own."""


def rms(tensor: Tensor) -> float:
    """The root mean square of what is finite in it."""
    values = tensor.double()
    values = values[torch.isfinite(values)]
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def gap(
    one: Tensor,
    other: Tensor,
    eps: float,
    floor: float = 0.0,
    name: str = "",
    *,
    own: Callable[[float], float] | None = None,
) -> Gap:
    """From ``one``, the reference, to ``other``; nan equals nan. ``own`` gives a limit of its own
    to this tensor, of the unit.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return Gap(False, math.inf, math.inf, name)
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
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
    unit = eps * scale
    allowed = None if own is None else own(unit)
    return Gap(False, rms(apart) / unit, largest, name, allowed)


def number_gap(one: float, other: float, eps: float, floor: float = 0.0, name: str = "") -> Gap:
    """The same for single numbers."""
    a, b = (torch.tensor(value, dtype=torch.float64) for value in (one, other))
    return gap(a, b, eps, floor, name)
