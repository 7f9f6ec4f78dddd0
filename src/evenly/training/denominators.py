"""What torch's own losses divide by.

Cross entropy with class weights or ``ignore_index`` divides by the weights that are left, and not
by the samples. Weighing each rank's mean by its samples would then be wrong, so these losses are
recognised (as functions, `functools.partial` of them, or modules) and asked for their sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenly.errors import LossError
from evenly.objective import Sum, Total

# What each function takes besides predictions, target and the reduction. Anything else, such as
# the old size_average, leaves a loss unrecognised; then the first batch is checked instead.
_OF_CLASSES: dict[Any, set[str]] = {
    F.cross_entropy: {"weight", "ignore_index", "label_smoothing"},
    F.nll_loss: {"weight", "ignore_index"},
}
_OF_ELEMENTS: dict[Any, set[str]] = {
    F.mse_loss: set(),
    F.l1_loss: set(),
    F.smooth_l1_loss: {"beta"},
    F.huber_loss: {"delta"},
    F.binary_cross_entropy: {"weight"},
    F.binary_cross_entropy_with_logits: {"weight", "pos_weight"},
    F.kl_div: {"log_target"},
    F.poisson_nll_loss: {"log_input", "full", "eps"},
    F.soft_margin_loss: set(),
}
_OPTIONS = {**_OF_CLASSES, **_OF_ELEMENTS}
_MODULES: dict[type[nn.Module], Any] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
}


@dataclass(frozen=True)
class Recognised:
    """A loss of torch's: ``function(predictions, target, **options())``."""

    function: Callable[..., Tensor]
    options: Callable[[], dict[str, Any]]
    """Read at every call: a module's tensors move to the device after it was made."""
    reduction: str

    def __call__(self, predictions: Any, target: Any) -> Total | Sum:
        """The loss of these samples before torch divides, and what it would divide by."""
        options = self.options()
        weight = self.weight(predictions, target)
        whole = self.function(predictions, target, reduction="sum", **options)
        return Sum(whole) if self.reduction == "sum" else Total(whole, weight)

    def weight(self, predictions: Any, target: Any) -> Tensor | float:
        """What ``reduction="mean"`` divides the sum by."""
        if self.function in _OF_CLASSES:
            return _weight_of_classes(predictions, target, **self.options())
        if predictions.shape == target.shape:
            return float(predictions.numel())
        whole = torch.broadcast_shapes(predictions.shape, target.shape).numel()
        if whole > max(predictions.numel(), target.numel()):
            raise LossError(
                f"predictions of shape {tuple(predictions.shape)} and a target of shape "
                f"{tuple(target.shape)} make {whole} pairs: each sample is compared with all "
                "others. Give both the same shape, as by target.unsqueeze(1)."
            )
        return float(whole)


def recognise(loss: Any) -> Recognised | None:
    """The loss, if it is one of torch's that is known here; else None."""
    if isinstance(loss, nn.Module):
        function = _MODULES.get(type(loss))
        names = _OPTIONS.get(function, set())
        reduction = getattr(loss, "reduction", "mean")

        def options() -> dict[str, Any]:
            return {name: getattr(loss, name) for name in names}

        hooked = bool(loss._forward_hooks or loss._forward_pre_hooks)
        return None if hooked else _known(function, names, options, reduction)
    if isinstance(loss, functools.partial):
        if loss.args:
            return None
        given = dict(loss.keywords)
        reduction = given.pop("reduction", "mean")
        return _known(loss.func, set(given), lambda: given, reduction)
    return _known(loss, set(), dict, "mean")


def _known(
    function: Any, names: set[str], options: Callable[[], dict[str, Any]], reduction: str
) -> Recognised | None:
    try:
        takes = _OPTIONS.get(function)
    except TypeError:  # a callable that cannot be hashed
        return None
    if takes is None or not names <= takes or reduction not in ("mean", "sum"):
        return None
    return Recognised(function, options, reduction)


def _weight_of_classes(
    predictions: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | float:
    if target.is_floating_point():  # probabilities: torch divides by their number, whatever weights
        classes = predictions.shape[1] if predictions.dim() > 1 else predictions.shape[0]
        return predictions.numel() / classes
    kept = target != ignore_index
    if weight is None:
        return torch.count_nonzero(kept)
    # Zeros instead of a selection: a selection's size would have to be read from a GPU.
    return (weight[torch.where(kept, target, 0)] * kept).sum()
