"""Averaged weights: what evaluation and prediction use may be smoother than what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evenly.callbacks.base import Callback, Ranks
from evenly.errors import SettingError

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class EMA(Callback):
    """Keeps an exponential moving average of the weights, and evaluates and predicts with it.

    Updated after each step, from ``start`` steps on; floating buffers are averaged too. The
    weights are the same on all ranks, and so is their average. ``model`` is the averaged module.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self, decay: float = 0.999, *, start: int = 0) -> None:
        if not 0 <= decay < 1:
            raise SettingError(f"EMA(decay={decay}): give a number from 0 up to 1, such as 0.999.")
        self.decay, self.start = decay, start
        self._averaged: AveragedModel | None = None
        self._waiting: dict[str, Any] = {}

    @property
    def model(self) -> Any:
        return None if self._averaged is None else self._averaged.module

    def on_run_start(self, trainer: Trainer) -> None:
        if self._averaged is None:
            self._averaged = AveragedModel(
                trainer.model,
                multi_avg_fn=get_ema_multi_avg_fn(self.decay),
                use_buffers=True,
            )
            self._averaged.eval()
            if self._waiting:
                self._averaged.load_state_dict(self._waiting)
                if int(self._averaged.n_averaged):
                    trainer.evaluated = self._averaged.module

    def on_step_end(self, trainer: Trainer) -> None:
        if self._averaged is not None and trainer.step > self.start:
            self._averaged.update_parameters(trainer.model)
            trainer.evaluated = self._averaged.module  # before, there is no average

    def state_dict(self) -> dict[str, Any]:
        return {} if self._averaged is None else self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._averaged is None:
            self._waiting = state
        else:
            self._averaged.load_state_dict(state)
