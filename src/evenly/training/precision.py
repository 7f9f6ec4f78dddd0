"""Precision: what runs in half, and the scale that keeps float16 gradients from vanishing."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenly.errors import SettingError

Precision = Literal["fp32", "bf16", "fp16"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Mixed:
    """torch's autocast and, for float16, its gradient scaler.

    The scaler looks at gradients after the ranks have exchanged them, which are the same on all;
    so all come to the same scale and skip the same steps without asking each other. "fp32" leaves
    everything as the model's parameters are, float64 included.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        if precision not in get_args(Precision):
            raise SettingError(
                f"precision={precision!r}; choose from {', '.join(map(repr, get_args(Precision)))}."
            )
        self._type = _TYPES.get(precision)
        self._device = device.type
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._full = contextlib.nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """Around forward passes and losses, in training and in evaluation."""
        if self._type is None:
            return self._full
        return torch.autocast(self._device, self._type)

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> float:
        """Bring gradients to their true size, for clipping and inspection; returns by how much."""
        if self._scaler is None:
            return 1.0
        self._scaler.unscale_(optimizer)
        return 1.0 / self._scaler.get_scale()

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless float16 gradients overflowed; then the scale falls instead."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    @property
    def scaled(self) -> bool:
        """Whether gradients may overflow as a matter of course, which `step` takes care of."""
        return self._scaler is not None

    def skip(self) -> None:
        """Leave out a step whose gradients were unscaled already; the scale falls."""
        if self._scaler is not None:
            self._scaler.update()

    def state_dict(self) -> dict[str, float]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
