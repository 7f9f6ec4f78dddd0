"""What a logger is: numbers of a run, over all ranks, given to something else by one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from evenly.callbacks.base import Callback, Ranks
from evenly.callbacks.portrait import settings_of
from evenly.errors import SettingError
from evenly.training.history import Newcomers

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class Logger(Callback):
    """Override `begin`, `log` and `close`; the rest is done here, on rank 0.

    `log` gets every number that comes into the history: the loss of each step, the means of each
    epoch, evaluations, what was noted. Numbers are looked for every ``every`` steps and at
    evaluations and epochs; none is left out. A resumed run begins at its checkpoint.
    """

    ranks: ClassVar[Ranks] = "one"

    def __init__(self, *, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise SettingError(f"every={every!r}: give a number of steps, 1 or more.")
        self._every = every
        self._newcomers = Newcomers()
        self._known = self._running = False

    def begin(self, trainer: Trainer, settings: Mapping[str, Any]) -> None:
        """A `fit` begins, at ``trainer.step``; the settings are plain values by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step. Steps of one name come in their order."""
        raise NotImplementedError

    def close(self) -> None:
        """The `fit` has ended, well or not; another may follow."""

    def on_run_start(self, trainer: Trainer) -> None:
        if not self._known:
            self._newcomers.skip(trainer.history)
            self._known = True
        self._running = True
        self.begin(trainer, settings_of(trainer))

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step % self._every == 0:
            self._pass_on(trainer)

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: Mapping[str, Any]) -> None:
        if self._known:
            self._pass_on(trainer)

    def on_epoch_end(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        self._pass_on(trainer)

    def on_run_end(self, trainer: Trainer) -> None:
        self._pass_on(trainer)
        self._running = False
        self.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if self._running:
            self.on_run_end(trainer)

    def _pass_on(self, trainer: Trainer) -> None:
        by_step: dict[int, dict[str, float]] = {}
        for name, (steps, values) in self._newcomers.take(trainer.history).items():
            for step, value in zip(steps, values, strict=True):
                by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            self.log(step, by_step[step])
