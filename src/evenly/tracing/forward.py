"""What goes into a model: how many rows, which ones, in what precision; and whether it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from evenly.tracing.prints import row_prints


def bare(model: nn.Module) -> nn.Module:
    """The model inside DDP, which names its parameters as one process does."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def batch_norms(model: nn.Module) -> list[str]:
    """The layers that take statistics over this rank's samples alone."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and module.training
        and not any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__)
    ]


def dropouts(model: nn.Module) -> list[str]:
    """The layers that are known to draw random numbers."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training
        and (
            isinstance(module, _DropoutNd | nn.RReLU)
            or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0)
        )
    ]


class Forward:
    """Watches the training passes of one model since the last optimizer step."""

    def __init__(self, model: nn.Module, begin: Callable[[], None]) -> None:
        """``begin`` is called before each pass."""
        self._begin = begin
        self.rows = 0
        self.prints: list[int] = []
        self.draws = False
        self.half: str | None = None
        """What autocast computes in."""
        self._depth = 0
        self._state: list[Tensor] = []
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def clear(self) -> None:
        self.rows, self.prints = 0, []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not model.training or not torch.is_grad_enabled():
            return
        self._begin()
        batch = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if batch is not None and batch.dim():
            self.rows += len(batch)
            self.prints += row_prints(batch)
        kind = batch.device.type if batch is not None else "cpu"
        if torch.is_autocast_enabled(kind):
            self.half = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        self._state = _random_state()

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._state:
            now = _random_state()
            if not all(torch.equal(a, b) for a, b in zip(self._state, now, strict=True)):
                self.draws = True
            self._state = []


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
