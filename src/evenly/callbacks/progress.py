"""Progress: a bar where there is a terminal, lines where there is none. On rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from evenly.callbacks.base import Callback, Ranks

if TYPE_CHECKING:
    from evenly.trainer import Trainer

# Drawing costs about 2 ms, so it is done this rarely, in seconds.
_REFRESH = 0.25
# Above a bar a line costs more, and nobody reads many a second; then only some epochs have one.
_LINE = 1.0


class Progress(Callback):
    """Shows steps, the loss, samples per second and the time left, on standard error.

    Written by the steps themselves and not by a thread, so that nothing is drawn while ranks wait
    for each other.
    """

    ranks: ClassVar[Ranks] = "one"

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._console: Any = None
        self._next = self._next_line = self._epoch_begin = 0.0
        self._line = ""
        self._samples = 0

    def on_run_start(self, trainer: Trainer) -> None:
        # Loading rich takes 50 ms, which a run without progress need not spend.
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True)
        if not self._console.is_terminal:
            return
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=trainer.total_steps, numbers="")
        self._bar.start()

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._epoch_begin, self._samples = time.perf_counter(), 0

    def on_step_end(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        self._samples += trainer.part.global_weight if trainer.part is not None else 0
        if self._bar is None or now < self._next:
            return
        self._next = now + _REFRESH
        self._draw(trainer, now)

    def on_epoch_end(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        shown = {n: value for n, value in values.items() if isinstance(value, int | float)}
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._line = f"epoch {trainer.epoch}  step {trainer.step}  {numbers}"
        if self._bar is None or time.perf_counter() >= self._next_line:
            self._print()

    def on_run_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._draw(trainer, time.perf_counter())
        if trainer.position:
            self._line = f"step {trainer.step}  loss {trainer.loss:.4g}"
        self._print()
        self._stop()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._stop()

    def _print(self) -> None:
        """The line of the last epoch, if it was not printed yet."""
        if self._line:
            self._console.print(self._line, highlight=False, soft_wrap=True)
        self._line = ""
        self._next_line = time.perf_counter() + _LINE

    def _draw(self, trainer: Trainer, now: float) -> None:
        rate = self._samples / max(now - self._epoch_begin, 1e-9)
        self._bar.update(
            self._task,
            completed=trainer.step,
            description=f"epoch {trainer.epoch + (trainer.position > 0)}",
            numbers=f"loss {trainer.loss:.4f}  {rate:,.0f} samples/s",
        )
        self._bar.refresh()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
