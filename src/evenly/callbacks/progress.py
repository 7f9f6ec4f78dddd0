"""Progress: bars where there is a terminal, lines where there is none. On rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from evenly.callbacks import summary
from evenly.callbacks.base import Callback, Ranks

if TYPE_CHECKING:
    from evenly.trainer import Trainer

# Drawing costs about 2 ms, so it is done this rarely, in seconds.
_REFRESH = 0.25
# Above a bar a line costs more, and nobody reads many a second; then only some epochs have one.
_LINE = 1.0


class Progress(Callback):
    """Shows the epoch and the run: steps, loss, metrics, samples per second, the share of time
    that is spent waiting for data, the time left; and a summary at the end. On standard error.

    ``quiet`` shows the summary alone. Bars are drawn by the steps themselves and not by a thread,
    so that nothing is drawn while ranks wait for each other.
    """

    ranks: ClassVar[Ranks] = "one"

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._running = False
        self._bars: Any = None
        self._console: Any = None
        self._epoch = self._run = 0  # the bars' tasks
        self._next = self._next_line = 0.0
        self._begin = self._epoch_begin = self._evaluation_begin = 0.0
        self._first_step = self._samples = self._all_samples = 0
        self._waited = self._all_waited = self._spent = 0.0
        self._measured = self._line = self._speed = ""

    def on_run_start(self, trainer: Trainer) -> None:
        self._open()
        self._running = True
        self._begin = time.perf_counter()
        self._first_step, self._all_samples = trainer.step, 0
        self._all_waited = self._spent = 0.0
        left = trainer.step < trainer.total_steps
        if left and self._console.is_terminal and not self._quiet:
            self._start_bars(trainer)

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._epoch_begin, self._samples, self._waited = time.perf_counter(), 0, 0.0

    def on_step_end(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        self._samples += trainer.part.global_weight if trainer.part is not None else 0
        self._waited += trainer.data_wait
        if self._bars is None or now < self._next:
            return
        self._next = now + _REFRESH
        self._draw(trainer, now)

    def on_evaluation_start(self, trainer: Trainer, stage: str) -> None:
        self._evaluation_begin = time.perf_counter()
        if self._bars is not None:
            self._bars.update(self._epoch, description=f"evaluating {stage}")
            self._bars.refresh()

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: Mapping[str, Any]) -> None:
        passed = time.perf_counter() - self._evaluation_begin
        self._epoch_begin += passed  # which is not training's
        if self._running:
            self._measured = _numbers({f"{stage}/{n}": value for n, value in values.items()})
        else:
            self._open()
            self._say(summary.evaluation_line(stage, passed, trainer.world.size))
            self._console.print(summary.evaluation_table(values))

    def on_epoch_end(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        passed = time.perf_counter() - self._epoch_begin
        self._spent += passed
        self._all_samples += self._samples
        self._all_waited += self._waited
        speed = f"{self._samples / max(passed, 1e-9):,.0f} samples/s"
        self._line = f"epoch {trainer.epoch}  step {trainer.step}  {_numbers(values)}  {speed}"
        self._samples, self._waited = 0, 0.0
        if self._bars is None or time.perf_counter() >= self._next_line:
            self._print()

    def on_run_end(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        if self._bars is not None:
            self._draw(trainer, now)
        if trainer.position:  # the run ended within an epoch
            self._line = f"step {trainer.step}  loss {trainer.loss:.4g}"
            self._spent += now - self._epoch_begin
            self._all_samples += self._samples
            self._all_waited += self._waited
        self._print()
        self._stop()
        made = trainer.step - self._first_step
        if not made:
            self._say(f"nothing is left to do: the run has made its {trainer.step} steps")
            return
        self._say(
            summary.run_line(
                made,
                now - self._begin,
                trainer.world.size,
                speed=self._all_samples / max(self._spent, 1e-9),
                waiting=self._all_waited / max(self._spent, 1e-9),
            )
        )
        self._console.print(summary.run_table(trainer.history))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._stop()

    def _open(self) -> None:
        # Loading rich takes 50 ms, which a run without progress need not spend.
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    def _start_bars(self, trainer: Trainer) -> None:
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._epoch = self._bars.add_task("", total=trainer.epoch_length, numbers="")
        self._run = self._bars.add_task("run", total=trainer.total_steps, numbers="")
        self._bars.start()

    def _draw(self, trainer: Trainer, now: float) -> None:
        passed = max(now - self._epoch_begin, 1e-9)
        within = trainer.position > 0
        epochs = -(-trainer.total_steps // max(trainer.epoch_length, 1))
        if self._samples:
            speed, waiting = self._samples / passed, self._waited / passed
            self._speed = f"{speed:,.0f} samples/s  data {waiting:.0%}"
        self._bars.update(
            self._epoch,
            completed=trainer.position if within else trainer.epoch_length,
            description=f"epoch {trainer.epoch + within}/{epochs}",
            numbers=f"loss {trainer.loss:.4f}  {self._speed}",
        )
        self._bars.update(self._run, completed=trainer.step, numbers=self._measured)
        self._bars.refresh()

    def _print(self) -> None:
        """The line of the last epoch, if it was not printed yet."""
        if self._line and not self._quiet:
            self._say(self._line)
        self._line = ""
        self._next_line = time.perf_counter() + _LINE

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def _stop(self) -> None:
        self._running = False
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _numbers(values: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
