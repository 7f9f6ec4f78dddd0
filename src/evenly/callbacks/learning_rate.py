"""The learning rate in the history."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from evenly.callbacks.base import Callback, Ranks

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class LearningRateMonitor(Callback):
    """Notes the learning rate that each step used: "learning_rate", with a number after it where
    there are several parameter groups.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self) -> None:
        self._rates: list[float] = []

    def on_step_start(self, trainer: Trainer) -> None:
        assert trainer.optimizer is not None
        self._rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]

    def on_step_end(self, trainer: Trainer) -> None:
        for number, rate in enumerate(self._rates):
            several = len(self._rates) > 1
            trainer.note(f"learning_rate/{number}" if several else "learning_rate", rate)
