"""How fast a run is, and how long it waits for data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from evenly.callbacks.base import Callback, Ranks
from evenly.objective import Total

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class Throughput(Callback):
    """Logs, as means of each epoch: train/samples_per_second (over all ranks),
    train/step_seconds and train/data_wait_seconds (means over the ranks).

    Time is taken from one step's end to the next; evaluation is left out. On a GPU, steps are
    queued, so only their mean over many says something.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self) -> None:
        self._last = 0.0

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._last = time.perf_counter()

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: object) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        assert trainer.part is not None
        samples = trainer.part.weight * trainer.world.size
        trainer.log("samples_per_second", Total(samples, passed))
        trainer.log("step_seconds", Total(passed, 1))
        trainer.log("data_wait_seconds", Total(trainer.data_wait, 1))
