"""The record of a run: written by rank 0, counted by all. A Trainer with a folder adds it.

The ranks' counts travel in meetings that there are anyway, at the end of an epoch and at a
checkpoint, so that no collective is added.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from evenly.blame import summary_of
from evenly.callbacks.base import Callback, Ranks
from evenly.callbacks.portrait import launch_of, plain, settings_of
from evenly.permutation import VERSION as PERMUTATION
from evenly.record.counts import Counts, together
from evenly.record.coverage import added, written
from evenly.record.reading import FILE
from evenly.record.writer import Writer
from evenly.training.history import Newcomers
from evenly.world import World

if TYPE_CHECKING:
    from evenly.trainer import Trainer

# Speeds are means over at least this many seconds, so that quick steps do not fill the record.
_WINDOW = 0.5


class Recorder(Callback):
    """Writes ``record.jsonl`` into the Trainer's folder: see docs/reference/record.md.

    On the training thread a step costs a few microseconds; numbers are taken from the history by
    the thread that writes.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self, folder: Path, world: World) -> None:
        self._world = world
        self.folder = folder
        self._path = folder / FILE
        self._counts = Counts()
        self._digest = self._samples = 0
        self._whole = True
        self._running = False
        self._trainer: Trainer | None = None
        self._newcomers = Newcomers()
        self._own: list[tuple[str, int, float]] = []
        self._writer = Writer(self._path, self._values) if world.rank == 0 else None
        self._opened = False
        self._window = _Window()
        self._rates: list[float] = []
        self._rates_told: list[float] = []

    def on_run_start(self, trainer: Trainer) -> None:
        self._running = True
        if trainer.position and not self._samples:
            self._whole = False  # an epoch whose beginning nobody counted
        if self._writer is None:
            self._trainer = trainer
            return
        # What a checkpoint brought is in the record, unless that is new here.
        if not self._opened and self._path.exists():
            self._newcomers.skip(trainer.history)
        self._rates, self._rates_told = _rates(trainer), []
        self._window = _Window()
        writer = self._open(trainer)
        self._trainer = trainer  # its numbers are taken from here on, after the line of the launch
        writer.add("settings", **settings_of(trainer))
        assert trainer.plan is not None
        plan = trainer.plan
        writer.add(
            "start",
            step=trainer.step,
            epoch=trainer.epoch,
            position=trainer.position,
            total_steps=trainer.total_steps,
            processes=trainer.world.size,
            stages=trainer.stages,
            plan={
                **{n: getattr(plan, n) for n in ("length", "batch_size", "shuffle", "seed")},
                "tail": plan.tail,
                "steps": plan.steps,
                "permutation": PERMUTATION,
            },
        )
        writer.start()

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._rates = _rates(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        now, part = time.perf_counter(), trainer.part
        assert part is not None
        seconds = now - trainer.step_began
        self._counts.add(
            part.step,
            part.indices.numpy(),
            seconds=seconds,
            alone=trainer.met - trainer.step_began,
            data_wait=trainer.data_wait,
        )
        if self._writer is None:
            return
        if self._rates != self._rates_told:
            self._tell_rates(trainer.step)
        self._rates = _rates(trainer)
        window = self._window
        window.steps += 1
        window.samples += part.global_weight
        window.seconds += seconds
        window.data_wait += trainer.data_wait
        if window.seconds >= _WINDOW:
            self._close_window(trainer.step)

    def on_evaluation_end(self, trainer: Trainer, stage: str, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        writer = self._open(trainer)
        self._trainer = trainer
        writer.add(
            "evaluation",
            stage=stage,
            step=trainer.step,
            epoch=trainer.epoch,
            values={name: plain(value) for name, value in values.items()},
        )

    def on_run_end(self, trainer: Trainer) -> None:
        early = trainer.stopped and trainer.step < trainer.total_steps
        self._end(trainer, state="stopped" if early else "finished")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if self._running:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._end(trainer, state=state, error=summary_of(error))

    def counted(self) -> list[float]:
        """What this rank counted since the last meeting, for `gathered` or `epoch_ended`."""
        return self._counts.taken()

    def gathered(self, ranks: list[list[float]]) -> None:
        """What all ranks counted; all of them are told the same."""
        found = together(ranks)
        self._digest = added(self._digest, found.digest)
        self._samples += found.samples
        if self._writer is None or self._trainer is None or not found.steps:
            return
        self._writer.add(
            "ranks",
            step=self._trainer.step,
            steps=found.steps,
            step_seconds=[*map(_short, found.seconds)],
            alone_seconds=[*map(_short, found.alone)],
            alone_longest=[*map(_short, found.longest)],
            data_wait_seconds=[*map(_short, found.data_wait)],
        )

    def epoch_ended(self, epoch: int, ranks: list[list[float]]) -> None:
        """As `gathered`, at the end of an epoch."""
        self.gathered(ranks)
        if self._writer is not None and self._trainer is not None:
            self._close_window(self._trainer.step)
            self._writer.add(
                "coverage",
                step=self._trainer.step,
                epoch=epoch,
                samples=self._samples,
                digest=written(self._digest),
                whole=self._whole,
            )
        self._digest = self._samples = 0
        self._whole = True

    def saving(self) -> None:
        """What came before a checkpoint is on disk before it: a kill between leaves no gap."""
        if self._writer is not None:
            self._writer.flush()

    def saved(self, step: int) -> None:
        """A checkpoint is whole; said by the thread that wrote it, which this must not fail."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.add("checkpoint", step=step)

    def state_dict(self) -> dict[str, Any]:
        """What the running epoch has used so far, on all ranks; call `gathered` before."""
        return {
            "digest": written(self._digest),
            "samples": self._samples,
            "whole": self._whole,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._digest, self._samples = int(state["digest"], 16), state["samples"]
        self._whole = state["whole"]

    def _open(self, trainer: Trainer) -> Writer:
        assert self._writer is not None
        if not self._opened:
            self._writer.open(**launch_of(trainer.world))
            self._opened = True
        return self._writer

    def _end(self, trainer: Trainer, **fields: Any) -> None:
        self._running = False
        if self._writer is not None:
            self._close_window(trainer.step)
            self._writer.add("end", step=trainer.step, epoch=trainer.epoch, **fields)
            self._writer.stop()

    def _tell_rates(self, step: int) -> None:
        several = len(self._rates) > 1
        for number, rate in enumerate(self._rates):
            name = f"learning_rate/{number}" if several else "learning_rate"
            self._own.append((name, step, rate))
        self._rates_told = self._rates

    def _close_window(self, step: int) -> None:
        window, self._window = self._window, _Window()
        if window.steps:
            self._own += [
                ("samples_per_second", step, _short(window.samples / max(window.seconds, 1e-9))),
                ("step_seconds", step, _short(window.seconds / window.steps)),
                ("data_wait_seconds", step, _short(window.data_wait / window.steps)),
            ]

    def _values(self) -> list[dict[str, Any]]:
        """The numbers that came since the last time, as a line; on the thread that writes."""
        found: dict[str, Any] = {}
        if self._trainer is not None:
            found.update(self._newcomers.take(self._trainer.history))
        count = len(self._own)
        for name, step, value in self._own[:count]:
            steps, values = found.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
        del self._own[:count]
        return [{"kind": "values", "time": round(time.time(), 3), "values": found}] if found else []


class _Window:
    """Steps over which speeds are taken."""

    def __init__(self) -> None:
        self.steps = self.samples = 0
        self.seconds = self.data_wait = 0.0


def _rates(trainer: Trainer) -> list[float]:
    """The learning rates; a GPU that holds one is not waited for."""
    assert trainer.optimizer is not None
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    if any(isinstance(rate, Tensor) and rate.is_cuda for rate in rates):
        return []
    return [float(rate) for rate in rates]


def _short(number: float) -> float:
    """Clocks are not worth more digits."""
    return float(f"{number:.5g}")
