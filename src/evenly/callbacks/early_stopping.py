"""Stop when a number has not become better for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evenly.callbacks.base import Callback, Ranks
from evenly.errors import SettingError

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class EarlyStopping(Callback):
    """Stops after ``patience`` evaluations (or epochs, for "train/...") without a better value.

    Better means lower (``mode="min"``) or higher ("max") by more than ``min_delta``; nan never is.
    The numbers are the same on all ranks, so all stop together. Weights stay those of the end,
    unless ``restore_best`` keeps a copy of the best ones and puts them back when `fit` ends.
    ``best`` and ``best_step`` say which they are.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(
        self,
        monitor: str = "validation/loss",
        *,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise SettingError(f"EarlyStopping(mode={mode!r}): give 'min' or 'max'.")
        if patience < 1:
            raise SettingError(f"EarlyStopping(patience={patience}): give 1 or more.")
        self.monitor, self.mode, self.patience = monitor, mode, patience
        self.min_delta = abs(min_delta)
        self._restore_best = restore_best
        self._weights: dict[str, Any] = {}
        self.best = math.inf if mode == "min" else -math.inf
        self.best_step = 0
        self.waited = 0

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: Mapping[str, Any]) -> None:
        if self.monitor.startswith(f"{stage}/"):
            self._look(trainer, {f"{stage}/{name}": value for name, value in values.items()})

    def on_run_start(self, trainer: Trainer) -> None:
        stage = self.monitor.partition("/")[0]
        if stage not in ("train", *trainer.stages):
            raise SettingError(
                f"EarlyStopping looks at {self.monitor!r}, and there is no evaluation of that "
                f"name (there is {', '.join(trainer.stages) or 'none'}). Give fit() a validate= "
                "set, or name another: monitor='validation/loss', 'train/loss'."
            )

    def on_epoch_end(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        if self.monitor.startswith("train/"):
            self._look(trainer, values)

    def _look(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        if self.monitor not in values:
            raise self._missing(values)
        value = float(values[self.monitor])
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.best_step, self.waited = value, trainer.step, 0
            if self._restore_best:
                state = trainer.model.state_dict()
                self._weights = {name: tensor.detach().clone() for name, tensor in state.items()}
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop()

    def on_run_end(self, trainer: Trainer) -> None:
        if self._weights:
            trainer.model.load_state_dict(self._weights)

    def _missing(self, values: Mapping[str, Any]) -> SettingError:
        return SettingError(
            f"EarlyStopping looks at {self.monitor!r}, and there is "
            f"{', '.join(map(repr, values)) or 'nothing'}. Name one of these in monitor=."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "weights": self._weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited, self._weights = state["waited"], state["weights"]
