"""The Trainer: one program for one process and for many, with the same numbers."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from evenly import tracing
from evenly.callbacks.base import Hooks
from evenly.callbacks.portrait import options_of
from evenly.callbacks.progress import Progress
from evenly.callbacks.recorder import Recorder
from evenly.checkpoint import CheckpointFolder, Retention
from evenly.checkpoint.retention import retention
from evenly.checkpoint.saving import OnSaveError, Saver
from evenly.collectives import agree_on, any_rank
from evenly.errors import EvenlyWarning, SettingError
from evenly.fetching import Collate
from evenly.fitting import Fit
from evenly.guarding import finishing, guarded
from evenly.layers import SyncBatchNorm
from evenly.loader import Loader
from evenly.matching import OnDifference, match_buffers, place, repair
from evenly.objective import Output, Total
from evenly.part import Part
from evenly.pieces.holding import tell_of_differences
from evenly.plan import Plan, Tail
from evenly.prediction.layout import Format
from evenly.prediction.memory import Keep
from evenly.resuming import go_on_if_asked
from evenly.seeding import streams_kept
from evenly.stages import Stages
from evenly.stopping import StopRequests
from evenly.surroundings import surroundings
from evenly.training.every import Every, every
from evenly.training.given import (
    accepted_metrics,
    by_name,
    loader_of,
    made_model,
    made_optimizer,
    total_steps,
)
from evenly.training.history import History
from evenly.training.notices import notices
from evenly.training.piecewise import check_alone
from evenly.training.precision import Mixed, Precision
from evenly.training.recipe import Forward, Loss, Recipe, Step
from evenly.training.schedule import Factory, Schedule
from evenly.training.update import Update, UpdateSettings
from evenly.training.verdict import Nonfinite, Verdict
from evenly.training.way import chosen
from evenly.watchdog.activity import activity
from evenly.watchdog.limits import checked
from evenly.world import World, join_world

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Trainer:
    """Trains a model on however many processes the program was started with.

    It joins the open world, or opens one that stays until the process ends, puts the model on the
    device and makes the ranks' models equal. All methods that take data are meetings of all ranks.
    Every number that it shows, returns or stores is the one over all ranks.
    """

    world: World
    model: nn.Module
    """The user's module, on the device. Not wrapped: its methods and state_dict are its own."""
    optimizer: Optimizer | None
    epoch: int
    """Epochs finished, which is the number of the one that is going on."""
    position: int
    """Steps made in the epoch that is going on."""
    step: int
    """Optimizer steps made since the run began."""
    loss: float
    """Of the last step; on a GPU of the one before, which need not be waited for."""
    history: History
    evaluated: nn.Module
    """What evaluation and prediction use: the model, or an average of it (`callbacks.EMA`)."""
    data_wait: float
    """Seconds that the last step waited for its batch."""
    part: Part | None
    """This rank's part of the step that is going on."""
    total_steps: int
    """What `fit` is to reach."""
    epoch_length: int
    """Steps of an epoch."""
    recorder: Recorder | None
    """Writes the run record, where there is a folder."""
    options: dict[str, Any]
    """The settings that the record shows."""

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss | nn.Module | None = None,
        optimizer: Callable[[nn.Module], Optimizer] | Optimizer | None = None,
        metrics: Mapping[str, Any] | None = None,
        train_metrics: Mapping[str, Any] | None = None,
        forward: Forward | None = None,
        target: Callable[[Any], Any] | None = None,
        step: Step | None = None,
        batch_size: int,
        microbatch: int | None = None,
        pieces: int | None = None,
        threads: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "keep",
        collate_fn: Collate | None = None,
        workers: int | Literal["auto"] = "auto",
        scheduler: Factory | None = None,
        scheduler_every: Literal["step", "epoch"] | None = None,
        scheduler_monitor: str = "validation/loss",
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        nonfinite: Nonfinite = "stop",
        callbacks: Sequence[Any] = (),
        progress: bool | Literal["quiet"] = True,
        folder: str | os.PathLike[str] | None = None,
        save_every: int | str = "epoch",
        keep: int | Retention | None = 3,
        async_save: bool = True,
        on_save_error: OnSaveError = "raise",
        find_unused_parameters: bool = False,
        collective_forward: bool | None = None,
        check_loss: bool = True,
        on_difference: OnDifference = "repair",
        device: str | None = None,
        backend: str | None = None,
        timeout: float = 600.0,
        hang_report: float | None = None,
        hang_timeout: float | None = None,
    ) -> None:
        """
        Model and loss:
          model: a module, or a function that makes one, which is called under the seed.
          loss: of (predictions, target): the mean over the samples, or an `evenly.Total`.
          forward, target: predictions of (model, batch) and target of (batch), where a batch is
            not a pair of (input, target).
          step: of (model, batch): an `evenly.Output`, instead of the three above.
          optimizer: a function of the model, or an optimizer over its parameters.
          metrics, train_metrics: torchmetrics objects by name, for evaluation and for training.
        Data:
          batch_size: what one optimizer step sees over all processes together.
          microbatch: the most samples that a process holds at once; gradients are accumulated.
          pieces: cut every step into this many, whatever the process count, so that 1 to ``pieces``
            processes give the same bits; not given, the same numbers to rounding.
          threads: of each process, with ``pieces``; the bits depend on them.
          seed: of the order of samples, of augmentation and of random layers.
          shuffle, tail, collate_fn, workers: as for `evenly.Loader`.
        Optimization:
          scheduler: a function of (optimizer), or of (optimizer, steps) with the total of steps;
            scheduler_every: "step" (the second's default) or "epoch"; scheduler_monitor: what
            ReduceLROnPlateau looks at.
          precision: "fp32" (as the parameters are), "bf16" or "fp16" (autocast).
          clip_norm: the largest norm of the whole gradient.
          nonfinite: what to do about a loss, or a clipped gradient, that is nan or inf: "stop",
            "skip" or "continue". On a GPU "stop" comes a step late, after the update.
        Checkpoints:
          folder: where they go, on a file system that all ranks see; none without it.
          save_every: a number of steps, "epoch", "3 epochs", or a time ("10m", "2h"); and at the
            end of `fit`.
          keep: how many of the newest stay, None for all; or an `evenly.Retention` (the best by a
            metric, every so many).
          async_save: copy, and write while training goes on; the next save waits for the last.
          on_save_error: "raise" on all ranks at the next step, or "warn" and go on.
        Ranks:
          find_unused_parameters: parameters may have no part in some steps.
          collective_forward: ranks meet in the forward pass or the loss (not given: found out).
          check_loss: try the loss on halves of the first batch where a step is split.
          on_difference: "repair" models that differ between ranks by rank 0's, or "refuse".
          device, backend, timeout: as for `evenly.open_world`, where none is open.
          hang_report: seconds after which a rank that does not move is reported (not given:
            EVENLY_HANG_REPORT, else 60); hang_timeout: after which the run is ended if others wait
            for it (not given: EVENLY_HANG_TIMEOUT, else the timeout). 0 is never.
        """
        self.options = options_of(locals())
        activity.given = (
            checked("hang_report", hang_report),
            checked("hang_timeout", hang_timeout),
        )
        self.world = join_world(device=device, backend=backend, timeout=timeout)
        trace, folder = tracing.current(), tracing.redirected(folder)
        if trace is not None:
            trace.by_trainer = True
        self.seed = seed
        self.batch_size = batch_size
        self._loading: dict[str, Any] = {"collate_fn": collate_fn, "workers": workers, "seed": seed}
        self._training: dict[str, Any] = {"shuffle": shuffle, "tail": tail}
        self._settings = UpdateSettings(
            microbatch=microbatch,
            clip_norm=clip_norm,
            find_unused_parameters=find_unused_parameters,
            collective_forward=collective_forward,
            check_loss=check_loss,
            pieces=pieces,
            threads=threads,
        )
        self.way = chosen(self.world, seed, pieces, threads)
        self.mixed = Mixed(precision, self.world.device)
        self._verdict = Verdict(self.world, nonfinite)
        self.recipe = Recipe(
            forward=forward, target=target, loss=loss, step=step, device=self.world.device
        )
        self._stages = Stages(self, accepted_metrics(metrics, self.world, pieces=pieces))
        self.train_measures = self.way.measures(
            accepted_metrics(train_metrics, self.world, pieces=pieces)
        )
        if not isinstance(callbacks, Sequence):
            raise SettingError(f"callbacks={callbacks!r}: give a list of callbacks.")
        if progress not in (True, False, "quiet"):
            raise SettingError(f"progress={progress!r}: give True, 'quiet' or False.")
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise SettingError(f"folder={str(folder)!r} is a file; give the name of a folder.")
        shown = [Progress(quiet=progress == "quiet")] if progress else []
        self.recorder = None if folder is None else Recorder(Path(folder), self.world)
        last = [] if self.recorder is None else [self.recorder]
        self.callbacks = [*callbacks, *shown, *last]
        self.hooks = Hooks(self.callbacks, self.world)
        self.model = self.evaluated = made_model(model, seed)
        if pieces is not None:
            check_alone(self.model, pieces, self.world.size)
        place(self.model, self.world.device)
        if self.world.size > 1:
            for module in self._trained():
                repair(module, on_difference)
        self.optimizer = made_optimizer(optimizer, self.model, self.recipe.module)
        self._scheduling: dict[str, Any] = {"every": scheduler_every, "monitor": scheduler_monitor}
        self._scheduler = scheduler
        self._schedule: Schedule | None = None
        self.epoch = self.position = self.step = self.epoch_length = 0
        self.loss = float("nan")
        self.data_wait = 0.0
        self.part: Part | None = None
        self.step_began = self.met = 0.0
        self.total_steps = 0
        self.history = History()
        self.averages = self.way.averages()
        self.epoch_loss = (0.0, 0.0)
        self.stages: list[str] = []
        self._update: Update | None = None
        self._told = self._closed = False
        self.owes_evaluation = False  # of this step, which was interrupted
        self.stages_done: list[str] = []  # of that evaluation
        self.stop_wanted = self.stopped = self.save_wanted = False
        self._save_every = every("save_every", save_every, timed=True)
        self._plan: Plan | None = None
        self.checkpoints: CheckpointFolder | None = None
        self.saver: Saver | None = None
        if folder is not None:
            self.checkpoints = CheckpointFolder(Path(folder) / "checkpoints", retention(keep))
            self.saver = Saver(
                self.checkpoints, self.world, background=async_save, on_error=on_save_error
            )
            if self.recorder is not None:
                self.saver.on_sealed = self.recorder.saved
        activity.folder = "" if folder is None else str(Path(folder).absolute())

    def fit(
        self,
        train: Any,
        validate: Any = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        validate_every: int | str = "epoch",
        resume: Literal["auto"] | None = None,
    ) -> History:
        """Train until ``epochs`` or ``steps`` have been made since the run began.

        ::

            on_run_start
            while there are epochs or steps to make, and nobody stopped:
                on_epoch_start
                for each step of the epoch:                  # in the order of (seed, epoch)
                    on_step_start
                    seed the random streams                  # by (seed, epoch, step, rank)
                    for each micro-batch of this rank's part:
                        predictions = forward(model, batch)
                        loss(predictions, target(batch)).backward()
                                                             # the last one exchanges gradients
                    on_gradients                             # those of the mean over the step
                    clip, optimizer.step()
                    scheduler.step()                         # scheduler_every="step"
                    on_step_end
                    if validate_every steps have passed: evaluate
                if validate_every epochs have passed: evaluate
                scheduler.step()                             # scheduler_every="epoch"
                on_epoch_end
            on_run_end

            evaluate:
                on_evaluation_start
                every sample of each validation set once
                on_evaluation_end

            on_exception                                     # instead of on_run_end

        ``train`` is a data set or an `evenly.Loader`, ``validate`` the same or several by name;
        ``validate_every`` is a number of steps, "epoch" or "3 epochs". A second `fit` goes on
        where the first ended. ``resume="auto"`` goes on from the newest whole checkpoint in the
        Trainer's folder, on any number of processes, or starts where there is none; without it a
        folder with checkpoints of another run is refused. With a folder, SIGTERM or SIGUSR1 lets
        all ranks save at the same step and exit with code 75. A meeting of all ranks; an error on
        one of them ends it on all.
        """
        if self.optimizer is None:
            raise SettingError("there is no optimizer to train with; give the Trainer one.")
        loader = self._loader(train, **self._training)
        self._check_position(len(loader))
        self.total_steps = total_steps(
            epochs=epochs,
            steps=steps,
            length=len(loader),
            done=self.step - self.position,
            finished=self.epoch,
        )
        sets = by_name(validate, "validation")
        stages = {name: self._loader(data, whole=True) for name, data in sets.items()}
        self.stages = list(stages)
        if "train" in stages:
            raise SettingError("a validation set named 'train' would hide training; rename it.")
        often = every("validate_every", validate_every)
        stands = (self.epoch, self.position, self.step)
        agree_on(
            {
                "fit(epochs=)": epochs,
                "fit(steps=)": steps,
                "fit(validate=), by name": self.stages,
                "fit(validate_every=)": validate_every,
                "how steps are made": self._settings,
                "how often to save": self._save_every,
                "whether there is a folder": self.checkpoints is not None,
                "where the run stands (epoch, position, step)": stands,
            }
        )
        if self._schedule is None:
            self._schedule = Schedule(
                self._scheduler,
                self.optimizer,
                steps=self.total_steps,
                stages=stages,
                **self._scheduling,
            )
        if self.way.pieces is not None:
            tell_of_differences(self.surroundings())
        go_on_if_asked(self, resume, loader.plan)
        trace = tracing.current()
        if trace is not None:
            trace.watch(self.model, self.recipe.module)
            self.total_steps = min(self.total_steps, trace.steps)
        streams, make = self.way.streams()
        self._update = update = make(
            self.model,
            self.recipe,
            self.optimizer,
            self._settings,
            world=self.world,
            mixed=self.mixed,
            verdict=self._verdict,
            watch=self._watch,
            before_update=lambda part: streams.seed_alike(part.epoch, part.step),
            on_gradients=self._on_gradients if self.hooks.has("on_gradients") else None,
        )
        # Without checkpoints there is nothing to save before the end, so a signal ends the run.
        requests = StopRequests(self.world) if self.checkpoints is not None else None
        run = Fit(
            self,
            update,
            self._schedule,
            train=loader,
            validate=stages,
            validate_every=often,
            save_every=self._save_every if self.checkpoints is not None else Every(),
            requests=requests,
            streams=streams,
        )
        self.stop_wanted = self.stopped = False
        self._plan = loader.plan
        with (
            activity.within("start-up"),
            finishing(self.saver),
            self._guarded([loader, *stages.values()]),
            streams_kept(),
            requests or NOTHING,
            self.way.held(),
        ):
            try:
                for module in self._trained():
                    if not module.training:  # else parts of it are in eval mode on purpose
                        module.train()
                self._tell(loader.plan.batch_size)
                run.run()
            finally:
                self.part = None
                update.close()
            match_buffers(self.model)
        # Also where it came too late to end the run early: it must not be lost.
        if requests is not None and any_rank(bool(requests.asked)):
            requests.leave(self.step)
        return self.history

    def validate(self, data: Any) -> dict[str, Any]:
        """Loss and metrics over a data set, each sample once; a meeting of all ranks.

        Several data sets by name give their values by name.
        """
        return self._evaluated(data, "validation")

    def test(self, data: Any) -> dict[str, Any]:
        """As `validate`, under another name in what is shown."""
        return self._evaluated(data, "test")

    def predict(
        self,
        data: Any,
        *,
        keep: Keep = "all",
        out: str | os.PathLike[str] | None = None,
        format: Format = "npy",
    ) -> Any:
        """The predictions in data-set order; a meeting of all ranks.

        In memory on every rank, or (``keep="first"``) on rank 0; or streamed to the folder ``out``
        as ``format`` "npy", "safetensors" or "parquet", for `evenly.read_predictions`. Ranks must
        not meet in the forward pass where one of them has no samples.
        """
        loader = self._loader(data, whole=True)
        with self._guarded([loader]):
            return self._stages.predict(loader, keep=keep, out=out, format=format)

    def log(self, name: str, value: Total | Tensor | float) -> None:
        """Count a number in the mean of this epoch, or evaluation, over all ranks.

        A `Total` counts by its weight. In a training step a plain number is taken to be the mean
        over this rank's samples and counts by them; elsewhere it counts once. Nothing is exchanged
        until the end.
        """
        self.averages.log(name, value, 1.0 if self.part is None else self.part.weight)

    def note(self, name: str, value: float) -> None:
        """Put a number into the history at this step. It must be the same on all ranks."""
        self.history.add(name, self.step, float(value))
        if tracing.active is not None:
            tracing.active.metrics({name: float(value)})

    def stop(self) -> None:
        """End `fit` on all ranks, from any of them.

        After an evaluation or an epoch that is at once; within an epoch it is after the next step,
        in which the wish travels (on a GPU one more).
        """
        self.stop_wanted = True

    def close(self) -> None:
        """Leave the world, if the Trainer opened it. Otherwise that happens when Python ends."""
        if self.world.ambient and not self._closed:
            self._closed = True
            self.world.close()

    def save(self) -> None:
        """Ask for a checkpoint, from any rank: it is made after the next step, in which the wish
        travels (on a GPU one more). At the end of `fit` there is one anyway.
        """
        if self.saver is None:
            raise SettingError("there is no place for a checkpoint: give the Trainer a folder=.")
        self.save_wanted = True

    @property
    def plan(self) -> Plan | None:
        """Of the training data, from the first `fit` on."""
        return self._plan

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module."""
        return self.recipe.module

    def scheduler_state(self) -> Any:
        return None if self._schedule is None else self._schedule.state_dict()

    def load_scheduler_state(self, state: Any) -> None:
        if self._schedule is not None and state is not None:
            self._schedule.load_state_dict(state)

    @property
    def share(self) -> Tensor | float:
        """For ``on_gradients``: times this, the gradient of a value inside the model is that of
        the step's mean loss. Parameters' gradients are so already.
        """
        return 1.0 if self._update is None else self._update.share

    def evaluate_stage(
        self, loader: Loader, stage: str, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Evaluate on one data set, with hooks; a meeting of all ranks."""
        return self._stages.evaluate(loader, stage, interrupted)

    def remember(self, values: Mapping[str, Any]) -> None:
        """Put the numbers among these into the history."""
        if tracing.active is not None:
            tracing.active.metrics(values)
        for name, value in values.items():
            if isinstance(value, int | float):
                self.history.add(name, self.step, value)

    def _evaluated(self, data: Any, stage: str) -> dict[str, Any]:
        sets = by_name(data, stage)
        loaders = {name: self._loader(one, whole=True) for name, one in sets.items()}
        with self._guarded(list(loaders.values())):
            found = {name: self.evaluate_stage(loader, name) for name, loader in loaders.items()}
        return found if isinstance(data, Mapping) else found[stage]

    def _watch(self, part: Part, output: Output) -> None:
        """What one micro-batch gave."""
        for name, value in output.log.items():
            self.averages.log(name, value, part.weight, part.piece)
        self.train_measures.update(part, output)

    def surroundings(self) -> dict[str, Any]:
        """What bits depend on besides the program; with the threads that pieces run with."""
        return {**surroundings(self.world.device), **(self.way.settings or {})}

    def meets(self) -> bool:
        """Whether ranks meet in the user's code in evaluation. SyncBatchNorm meets in training."""
        if self._settings.collective_forward is not None:
            return self._settings.collective_forward
        layers = [layer for layer in self.model.modules() if isinstance(layer, SyncBatchNorm)]
        if layers:
            return any(layer.running_mean is None for layer in layers)
        return self._update is not None and self._update.meets

    def _on_gradients(self) -> None:
        self.hooks.call("on_gradients", self)

    def _trained(self) -> nn.ModuleList:
        """The model, and the loss if it is a module."""
        modules = [self.model, self.recipe.module]
        return nn.ModuleList([module for module in modules if module is not None])

    def _check_position(self, length: int) -> None:
        """A run that stands within an epoch can only go on with an epoch of the same length."""
        if self.position and self.epoch_length != length:
            raise SettingError(
                f"the run stands at step {self.position} of an epoch of {self.epoch_length} "
                f"steps, and this data set gives {length}. Go on with the data set that it began "
                "with, or make a new Trainer."
            )
        self.epoch_length = length

    def _tell(self, batch_size: int) -> None:
        if self.world.rank or self._told or self.way.pieces is not None:
            return
        self._told = True
        cut = self._settings.microbatch is not None and (
            self._settings.microbatch * self.world.size < batch_size
        )
        for text in notices(self.model, size=self.world.size, cut=cut):
            warnings.warn(text, EvenlyWarning, stacklevel=4)

    def _guarded(self, loaders: Sequence[Loader]) -> contextlib.AbstractContextManager[None]:
        def tell(error: BaseException) -> None:
            self.hooks.call_all("on_exception", self, error)

        return guarded(self.world, loaders, on_error=tell)

    def _loader(self, data: Any, **options: Any) -> Loader:
        return loader_of(data, batch_size=self.batch_size, **self._loading, **options)
