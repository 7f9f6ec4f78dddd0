"""How long a run takes, and an end to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from evenly.callbacks.base import Callback, Ranks

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class Timer(Callback):
    """Measures the run, and ends it after ``limit`` seconds (or a timedelta), if there is one.

    One rank's clock decides; the others hear of it with the next step. ``elapsed`` is what has
    passed since the run began, ``evaluation`` how much of it was evaluation.
    """

    ranks: ClassVar[Ranks] = "one"

    def __init__(self, limit: float | timedelta | None = None) -> None:
        self.limit = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self.evaluation = 0.0
        self._begin = self._evaluation_begin = 0.0
        self._end: float | None = None

    @property
    def elapsed(self) -> float:
        return (self._end or time.perf_counter()) - self._begin if self._begin else 0.0

    def on_run_start(self, trainer: Trainer) -> None:
        self._begin, self._end, self.evaluation = time.perf_counter(), None, 0.0

    def on_step_end(self, trainer: Trainer) -> None:
        if self.limit is not None and time.perf_counter() - self._begin > self.limit:
            trainer.stop()

    def on_evaluation_start(self, trainer: Trainer, stage: str) -> None:
        self._evaluation_begin = time.perf_counter()

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: Mapping[str, Any]) -> None:
        self.evaluation += time.perf_counter() - self._evaluation_begin

    def on_run_end(self, trainer: Trainer) -> None:
        self._end = time.perf_counter()
