"""Total and weight: what a loss or a mean is before anybody divides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Total:
    """A sum with its weight; the mean is taken once, over all ranks.

    For losses that do not divide by the number of samples: by tokens, by class weights, by what
    ``ignore_index`` leaves. ``sum`` carries the gradient; ``weight`` is one number.
    """

    sum: Tensor
    weight: Tensor | float
