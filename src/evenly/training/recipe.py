"""The recipe: how a batch becomes predictions, a target and a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenly.errors import LossError, SettingError
from evenly.objective import Output, Sum, Total
from evenly.training.denominators import Recognised, recognise
from evenly.tree import map_leaves

Loss = Callable[[Any, Any], Tensor | Total]
Forward = Callable[[nn.Module, Any], Any]
Step = Callable[[nn.Module, Any], Output]


class Weighed(NamedTuple):
    """A loss, ready for the exchange between ranks."""

    loss: Tensor
    factor: float
    """Of its gradient: the ranks' mean is then the gradient of the step's mean, or needs
    ``rescale``: one multiplication by samples over weight, once the step's weight is known."""
    total: Tensor | float
    weight: Tensor | float
    rescale: bool


class Recipe:
    """What the user gave as ``forward``, ``target`` and ``loss``, or as ``step``.

    Tensors of the loss (class weights) are moved to the device. One of torch's own losses is
    given its true denominator; any other returns its mean over samples or a `Total`.
    """

    def __init__(
        self,
        *,
        forward: Forward | None,
        target: Callable[[Any], Any] | None,
        loss: Loss | nn.Module | None,
        step: Step | None,
        device: torch.device,
    ) -> None:
        if step is not None and any(given is not None for given in (forward, target, loss)):
            raise SettingError(
                "step= computes everything itself; leave out loss=, forward= and target=."
            )
        functions = {"loss": loss, "forward": forward, "target": target, "step": step}
        for name, given in functions.items():
            if given is not None and not callable(given):
                raise SettingError(f"{name}={given!r} cannot be called; give a function.")
            if isinstance(given, type):
                raise SettingError(f"{name}={given.__name__} is a class; give {given.__name__}().")
        self._forward = forward or _first
        self._target = target or _second
        self._step = step
        self._loss = _on_device(loss, device)
        self._recognised: Recognised | None = recognise(self._loss)

    @property
    def module(self) -> nn.Module | None:
        """The loss, where it is a module: it may have parameters to train."""
        return self._loss if isinstance(self._loss, nn.Module) else None

    @property
    def stepwise(self) -> bool:
        """Whether the user's ``step=`` computes the loss."""
        return self._step is not None

    @property
    def known(self) -> bool:
        """Whether what the loss divides by is known beyond doubt."""
        return self._recognised is not None

    def predict(self, model: nn.Module, data: Any) -> Any:
        """The predictions alone."""
        if self._step is None:
            return self._forward(model, data)
        predictions = self._outcome(model, data).predictions
        if predictions is None:
            raise SettingError("step= returned no predictions; give Output(predictions=...).")
        return predictions

    def run(self, model: nn.Module, data: Any, *, split: bool) -> Output:
        """One forward pass and the loss. Unless the step is ``split`` over ranks or micro-batches,
        the loss is computed just as the user wrote it.
        """
        if self._step is not None:
            return self._outcome(model, data)
        predictions = self._forward(model, data)
        target = self._target(data)
        return Output(
            loss=self.loss_of(predictions, target, split=split),  # type: ignore[arg-type]
            predictions=predictions,
            target=target,
        )

    def loss_of(self, predictions: Any, target: Any, *, split: bool) -> Tensor | Total | Sum | None:
        if self._loss is None:
            return None
        if self._recognised is not None and split:
            return self._recognised(predictions, target)
        value: Tensor | Total = self._loss(predictions, target)
        return value

    def weigh(self, output: Output, *, count: int, whole: int, size: int, split: bool) -> Weighed:
        """The loss of ``count`` of a step's ``whole`` samples, for ``size`` ranks."""
        loss: Any = output.loss
        if isinstance(loss, Total):
            return self._weigh_total(loss, size / whole)
        if isinstance(loss, Sum):
            # Weights of all ranks add up to 1: what is shown is the sum over the step.
            return Weighed(loss.value, float(size), _number(loss.value), count / whole, False)
        _check_number(loss)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        weight: Tensor | float = count
        if self._recognised is not None and not split:
            if self._recognised.reduction == "sum":
                return Weighed(loss, 1.0, _number(loss), 1.0, False)
            weight = _number(self._recognised.weight(output.predictions, output.target))
        if count == 0:
            # The mean of nothing is nan; its gradient must be zero and not nan.
            loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        return Weighed(loss, count * size / whole, _number(loss) * weight, weight, False)

    def _weigh_total(self, total: Total, factor: float) -> Weighed:
        value, weight = total.sum, total.weight
        _check_number(value)
        assert isinstance(value, Tensor)
        if isinstance(weight, Tensor) and weight.numel() != 1:
            raise LossError(
                f"the weight of a Total has shape {tuple(weight.shape)}; it must be one number, "
                "such as lengths.sum()."
            )
        value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        return Weighed(value, factor, _number(value), _number(weight), True)

    def _outcome(self, model: nn.Module, data: Any) -> Output:
        assert self._step is not None
        output = self._step(model, data)
        if not isinstance(output, Output):
            raise SettingError(
                f"step= returned a {type(output).__name__}; it must return "
                "evenly.Output(loss=..., predictions=..., target=...)."
            )
        return output


def _number(value: Tensor | float) -> Tensor | float:
    """Python's number, which is quicker to work with, unless a GPU would have to be waited for."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().reshape(()) if value.is_cuda else value.item()


def _check_number(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the loss is of type {type(loss).__name__}; return a tensor of one number (no "
            ".item()) that is the mean over the samples, or evenly.Total(sum, weight)."
        )
    if loss.numel() != 1:
        raise LossError(
            f"the loss is a tensor of shape {tuple(loss.shape)} and not one number. Use "
            "reduction='mean', take .mean(), or return evenly.Total(losses.sum(), weight)."
        )


def _first(model: nn.Module, data: Any) -> Any:
    return model(_field(data, 0, "forward=lambda model, batch: ..."))


def _second(data: Any) -> Any:
    return _field(data, 1, "target=lambda batch: ...")


def _field(data: Any, number: int, remedy: str) -> Any:
    if not isinstance(data, list | tuple) or len(data) <= number:
        kind = type(data).__name__
        raise SettingError(
            f"a batch is a {kind}{_size(data)} and not a pair of (input, target). "
            f"Say how to use it: Trainer({remedy})."
        )
    return data[number]


def _size(data: Any) -> str:
    if isinstance(data, list | tuple):
        return f" of {len(data)}"
    if isinstance(data, dict):
        return f" with {', '.join(map(repr, list(data)[:6]))}"
    return ""


def _on_device(loss: Any, device: torch.device) -> Any:
    """The loss with its own tensors (class weights) where the predictions will be."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(loss, nn.Module):
        return loss.to(device)
    if isinstance(loss, functools.partial):
        keywords = map_leaves(move, dict(loss.keywords))
        return functools.partial(loss.func, *map(move, loss.args), **keywords)
    return loss
