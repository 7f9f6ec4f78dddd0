"""The training loop itself. `Trainer.fit` describes it; here it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenly import tracing
from evenly.checkpoint.best import best
from evenly.collectives import any_rank, largest
from evenly.evaluation import Interrupted, flat
from evenly.loader import Loader
from evenly.matching import checksum, tell_apart
from evenly.part import Part
from evenly.record.counts import from_slots, in_slots
from evenly.resuming import about, measured_now, state_of
from evenly.seeding import StepStreams
from evenly.stopping import StopRequests
from evenly.training.carrier import Wishes
from evenly.training.every import Every
from evenly.training.schedule import Schedule
from evenly.training.stopwatch import Stopwatch
from evenly.training.update import Outcome, Update
from evenly.watchdog.activity import activity

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class Fit:
    """One run of the loop: from where the trainer is to its total of steps."""

    def __init__(
        self,
        trainer: Trainer,
        update: Update,
        schedule: Schedule,
        *,
        train: Loader,
        validate: Mapping[str, Loader],
        validate_every: Every,
        save_every: Every,
        requests: StopRequests | None,
        streams: StepStreams,
    ) -> None:
        self._trainer, self._update, self._schedule = trainer, update, schedule
        self._hooks, self._world = trainer.hooks, trainer.world
        self._train, self._validate, self._validate_every = train, validate, validate_every
        self._save_every = save_every
        self._requests = requests
        self._saver = trainer.saver
        self._best = None if self._saver is None else best(self._saver.folder)
        self._saved = self._place() if trainer.step else None
        self._save_due = self._save_called = False
        self._clock = time.monotonic()
        # On a GPU a step's news are read after the next one was launched, so nobody waits.
        self._late = int(self._world.device.type == "cuda")
        self._pending: deque[tuple[int, Outcome]] = deque()
        self._streams = streams
        self._trace = tracing.current()
        self._first = True  # of the epoch
        self._validated: dict[str, Any] = {}
        self._stopwatch = Stopwatch(self._world)
        self._step_hooks = [self._hooks.has(name) for name in ("on_step_start", "on_step_end")]

    def run(self) -> None:
        trainer = self._trainer
        activity.begin()
        if self._best is not None:
            self._best.look(trainer.stages)
        self._hooks.call("on_run_start", trainer)
        self._evaluate_between_steps()  # what an interrupted run still owes
        while not self._done():
            self._epoch()
        if self._saver is not None:
            self._save()
            with activity.within("saving"):
                self._saver.settle()
        self._hooks.call("on_run_end", trainer)

    def _done(self) -> bool:
        trainer = self._trainer
        within = trainer.position < len(self._train)  # else the epoch has yet to be ended
        return trainer.stopped or (trainer.step >= trainer.total_steps and within)

    def _epoch(self) -> None:
        trainer = self._trainer
        self._first = True
        self._validated = {}
        self._streams.seed_alike(trainer.epoch)
        self._hooks.call("on_epoch_start", trainer)
        self._update.refresh()  # that may have frozen or thawed parameters
        # The ranks' positions are equal by the way they came about, and steps carry a tag.
        parts = self._train.epoch(
            trainer.epoch, start=trainer.position, compare=False, pieces=trainer.way.pieces
        )
        activity.enter("step")
        while not self._done():
            activity.at(trainer.epoch, trainer.position, trainer.step)
            trainer.step_began = time.perf_counter()
            part = next(parts, None)
            trainer.data_wait = time.perf_counter() - trainer.step_began
            if part is None:
                break
            self._step(part)
            if self._stopwatch.runs:
                self._stopwatch.stop(trainer.step_began, trainer.data_wait)
            trainer.owes_evaluation = self._validate_every.after_step(trainer.step)
            self._evaluate_between_steps()
            if self._save_every.after_step(trainer.step):
                self._save_due = True
            if self._save_called and self._saver is not None:
                self._settle()
                # Called for by the clock, or because the last one failed: that one is not tried
                # again before it is due.
                self._save_due |= self._saver.settle()
                self._save_called, self._clock = False, time.monotonic()
            # After an epoch's last step it comes when that epoch has been evaluated.
            if self._save_due and trainer.position < len(self._train):
                self._settle()
                self._save()
        self._settle()
        if trainer.position == len(self._train) and not self._asked_to_stop():
            self._end_of_epoch()

    def _step(self, part: Part) -> None:
        trainer = self._trainer
        trainer.part = part
        if self._trace is not None:
            self._trace.samples(part.indices, epoch=part.epoch, instead=True)
        if self._step_hooks[0]:
            self._hooks.call("on_step_start", trainer)
            self._update.refresh()
        if self._first:
            self._streams.watch(part.epoch, part.step)
        else:
            self._streams.seed(part.epoch, part.step)
        outcome = self._update.step(part, self._wishes(), self._stopwatch)
        trainer.met = self._update.met
        if self._first:
            self._streams.look()
            self._first = False
        self._schedule.after_step()
        trainer.step += 1
        trainer.position += 1
        activity.made += 1
        self._pending.append((trainer.step, outcome))
        self._settle(self._late)
        if self._step_hooks[1]:
            self._hooks.call("on_step_end", trainer)

    def _wishes(self) -> Wishes:
        seconds = self._save_every.seconds
        due = seconds > 0 and self._world.rank == 0 and time.monotonic() - self._clock >= seconds
        if self._saver is not None and (self._saver.failed or self._trainer.save_wanted):
            due = True  # there the ranks meet, and hear of it
            self._trainer.save_wanted = False
        return Wishes(self._wants_stop(), due)

    def _wants_stop(self) -> bool:
        return self._trainer.stop_wanted or bool(self._requests and self._requests.asked)

    def _save(self) -> None:
        """A checkpoint, unless there is one of this very place."""
        trainer = self._trainer
        if self._saver is not None and self._place() != self._saved:
            activity.at(trainer.epoch, trainer.position, trainer.step)
            with activity.within("saving"):
                self._saver.save(about(trainer), state_of(trainer, self._train.plan))
        self._saved, self._save_due, self._clock = self._place(), False, time.monotonic()

    def _place(self) -> tuple[int, int, int, bool]:
        """Where the run stands. A step may be saved again when its evaluation was owed."""
        trainer = self._trainer
        return trainer.step, trainer.epoch, trainer.position, trainer.owes_evaluation

    def _save_if_best(self) -> None:
        if self._best is not None and self._best.found(about(self._trainer)):
            self._save_due = True

    def _settle(self, late: int = 0) -> None:
        """Take note of the steps whose news are due; every rank does so at the same step."""
        trainer = self._trainer
        while len(self._pending) > late:
            number, outcome = self._pending.popleft()
            news = outcome.news or self._update.judged(outcome)
            trainer.loss = news.total / news.weight
            trainer.history.add("loss", number, trainer.loss)
            if self._trace is not None:
                self._trace.loss_of(number, trainer.loss)
            if outcome.updated:
                total, weight = trainer.epoch_loss
                trainer.epoch_loss = (total + news.total, weight + news.weight)
            if news.stop:
                trainer.stopped = True
            if news.save:
                self._save_called = True

    def _evaluate_between_steps(self) -> None:
        if self._trainer.owes_evaluation:
            self._settle()
            self._trainer.owes_evaluation = not self._evaluate()
            self._save_if_best()

    def _evaluate(self) -> bool:
        """Whether it came to its end; otherwise a request to stop came first."""
        trainer = self._trainer
        requests = self._requests
        interrupted = None if requests is None else lambda: bool(requests.asked)
        for name, loader in self._validate.items():
            if name in trainer.stages_done:  # before the run was interrupted; it is in the history
                self._validated.update(measured_now(trainer, name))
                continue
            try:
                values = trainer.evaluate_stage(loader, name, interrupted)
            except Interrupted:
                trainer.stopped = True
                return False
            named = {f"{name}/{label}": value for label, value in values.items()}
            self._validated.update(named)
            self._schedule.after_evaluation(name, named)
            trainer.stages_done.append(name)
        trainer.stages_done = []
        if self._validate:
            self._agree_to_stop()
        return True

    def _asked_to_stop(self) -> bool:
        """Whether the run stops because somebody outside asked, who may not wait for long."""
        if self._requests is None or not self._trainer.stopped:
            return False
        return any_rank(bool(self._requests.asked))

    def _agree_to_stop(self) -> None:
        """Between steps nothing travels with gradients, so the ranks ask each other."""
        if any_rank(self._wants_stop()):
            self._trainer.stopped = True

    def _end_of_epoch_news(self) -> list[float]:
        """Whether any rank has logged something, whether all have the same weights, and what each
        has counted for the record, at once.
        """
        trainer, size = self._trainer, self._world.size
        own = checksum(trainer.model) if size > 1 else 0.0
        news = [float(bool(trainer.averages)), own, -own]
        if trainer.recorder is not None:
            news += in_slots(trainer.recorder.counted(), self._world.rank, size)
        found = largest(news)
        if trainer.recorder is not None:
            trainer.recorder.epoch_ended(trainer.epoch - 1, from_slots(found[3:], size))
        return found[:3]

    def _end_of_epoch(self) -> None:
        """What was measured in it is added up when it has been evaluated: an evaluation that is
        interrupted leaves the run after the epoch's last step, and is made when the run goes on.
        """
        trainer = self._trainer
        trainer.part = None
        trainer.epoch += 1
        trainer.position = 0
        if self._validate_every.after_epoch(trainer.epoch) and not self._evaluate():
            trainer.epoch -= 1
            trainer.position = len(self._train)
            return
        values = self._training_values()
        trainer.remember(values)
        self._save_if_best()
        self._schedule.after_epoch(values)
        self._streams.seed_alike(trainer.epoch)
        self._hooks.call("on_epoch_end", trainer, {**values, **self._validated})
        if self._save_every.after_epoch(trainer.epoch) or self._save_due:
            self._save()
        self._agree_to_stop()

    def _training_values(self) -> dict[str, Any]:
        """The means of the epoch that has ended, over all ranks; a meeting of all."""
        trainer = self._trainer
        total, weight = trainer.epoch_loss
        values: dict[str, Any] = {"loss": total / weight} if weight else {}
        logged, high, low = self._end_of_epoch_news()
        values.update(trainer.averages.gathered(logged > 0))
        if high != -low:
            tell_apart(trainer.model, trainer.epoch - 1)
        values.update(flat(trainer.train_measures.compute()))
        trainer.epoch_loss = (0.0, 0.0)
        trainer.averages.clear()
        return {f"train/{name}": value for name, value in values.items()}
