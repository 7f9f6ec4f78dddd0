"""Total and weight: what a loss or a mean is before anybody divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Total:
    """A sum with its weight; the mean is taken once, over all ranks.

    For losses that do not divide by the number of samples: by tokens, by class weights, by what
    ``ignore_index`` leaves. ``sum`` carries the gradient; ``weight`` is one number.
    """

    sum: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True)
class Sum:
    """A loss that is not divided at all (``reduction="sum"``): over ranks it adds up."""

    value: Tensor


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a ``step=`` function of the Trainer returns for one batch."""

    loss: Tensor | Total | None = None
    """The mean over the batch's samples, or a `Total`; None where only predictions are wanted."""
    predictions: Any = None
    """What metrics are updated with and `Trainer.predict` returns; samples come first."""
    target: Any = None
    """What metrics compare the predictions with."""
    log: Mapping[str, Total | Tensor | float] = field(default_factory=dict)
    """Further numbers, by name; as for `Trainer.log`."""
