"""What of a run is saved, and how a run goes on from it, on any number of processes."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenly.blame import summary_of
from evenly.checkpoint.plain import put_together
from evenly.checkpoint.reading import Checkpoint, load_into
from evenly.checkpoint.retention import About
from evenly.collectives import all_gather_object
from evenly.errors import EvenlyError, EvenlyWarning, SettingError, StorageError
from evenly.permutation import VERSION as PERMUTATION
from evenly.plan import Plan
from evenly.surroundings import what_changed
from evenly.together import together
from evenly.training.history import History

if TYPE_CHECKING:
    from evenly.trainer import Trainer

_COMPILED = "_orig_mod."


def about(trainer: Trainer) -> About:
    """Where the run stands, and what was measured at this very step."""
    last = {n: (series.steps[-1], series.values[-1]) for n, series in trainer.history.items()}
    values = {name: value for name, (step, value) in last.items() if step == trainer.step}
    return About(trainer.step, trainer.epoch, trainer.position, values)


def measured_now(trainer: Trainer, stage: str) -> dict[str, float]:
    """What the history has of a stage for this very step."""
    values = about(trainer).values
    return {name: value for name, value in values.items() if name.startswith(f"{stage}/")}


def state_of(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Everything that the rest of the run depends on, the same on every rank; a meeting of all.

    What ranks hold apart (logged totals, metrics of the running epoch) is added up, so that it
    does not matter how many there are when the run goes on.
    """
    assert trainer.optimizer is not None
    if trainer.recorder is not None:
        trainer.recorder.gathered(all_gather_object(trainer.recorder.counted()))
        trainer.recorder.saving()
    return {
        "run": {
            "epoch": trainer.epoch,
            "position": trainer.position,
            "step": trainer.step,
            "epoch_loss": trainer.epoch_loss,
            "owes_evaluation": trainer.owes_evaluation,
            "stages_done": trainer.stages_done,
            "plan": _plan(plan),
            "seed": trainer.seed,
            "processes": trainer.world.size,
            "pieces": trainer.way.settings,
            "surroundings": trainer.surroundings(),
        },
        "model": _tensors(trainer.model),
        "loss": {} if trainer.loss_module is None else _tensors(trainer.loss_module),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler_state(),
        "scaler": trainer.mixed.state_dict(),
        "callbacks": [[type(one).__name__, _state(one)] for one in trainer.callbacks],
        "averages": trainer.averages.merged(),
        "metrics": trainer.train_measures.merged_state(),
        "history": {
            name: [
                torch.tensor(series.steps, dtype=torch.int64),
                torch.tensor(series.values, dtype=torch.float64),
            ]
            for name, series in trainer.history.items()
        },
    }


def go_on_if_asked(trainer: Trainer, resume: str | None, plan: Plan) -> None:
    """``resume="auto"``: from the newest checkpoint that is whole, if there is one; a meeting of
    all ranks. Without it a folder that holds another run's is refused.
    """
    if resume not in (None, "auto"):
        raise SettingError(f"resume={resume!r}; give 'auto', or leave it out.")
    if trainer.checkpoints is None:
        if resume is not None:
            raise SettingError("resume='auto' needs a place to look: give the Trainer a folder=.")
        return
    if trainer.step:  # this run is further than what it has saved
        return
    saved = trainer.checkpoints.newest()
    if saved is None:
        return
    if resume is None:
        raise SettingError(
            f"{trainer.checkpoints.folder} holds checkpoints of an earlier run. Go on with it by "
            "fit(..., resume='auto'), or give the Trainer another folder."
        )
    together(lambda: go_on(trainer, plan, saved))
    trainer.epoch_length = plan.steps
    if trainer.world.rank == 0 and trainer.step < trainer.total_steps:
        sys.stderr.write(
            f"evenly: going on after step {trainer.step}, from {saved.path}; what was done since "
            "then is done again.\n"
        )


def go_on(trainer: Trainer, plan: Plan, saved: Checkpoint) -> None:
    """Put the trainer where the checkpoint was made. It is refused where the numbers would not be
    those of the run that was saved.
    """
    try:
        _go_on(trainer, plan, saved)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, EvenlyError):
            raise
        raise StorageError(
            f"{saved.path} does not fit this run: {summary_of(error)}. Give the Trainer the model, "
            "optimizer, scheduler and callbacks that it was made with, or another folder."
        ) from error


def _go_on(trainer: Trainer, plan: Plan, saved: Checkpoint) -> None:
    assert trainer.optimizer is not None
    run = saved.part("run")
    _check_plan(run["plan"], _plan(plan), saved)
    _check_pieces(run.get("pieces"), trainer.way.settings, saved)
    _check_surroundings(trainer, run["surroundings"], saved)
    load_into(_tensors(trainer.model), saved.state["model"], saved.tensor)
    if trainer.loss_module is not None:
        load_into(_tensors(trainer.loss_module), saved.state["loss"], saved.tensor)
    # Moved one by one, so that no rank holds all of it besides. Counters of steps are scalars, and
    # stay where optimizers want them.
    device = trainer.world.device
    trainer.optimizer.load_state_dict(
        put_together(saved.state["optimizer"], lambda name: _moved(saved.tensor(name), device))
    )
    trainer.load_scheduler_state(saved.part("scheduler"))
    trainer.mixed.load_state_dict(saved.part("scaler"))
    _load_callbacks(trainer, saved)
    trainer.epoch, trainer.position, trainer.step = run["epoch"], run["position"], run["step"]
    trainer.epoch_loss = tuple(run["epoch_loss"])
    trainer.owes_evaluation = run["owes_evaluation"]
    trainer.stages_done = list(run["stages_done"])
    trainer.history = History()
    for name, (steps, values) in saved.part("history").items():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            trainer.history.add(name, step, value)
    # What is not kept by piece is rank 0's: it is added up over the ranks when it is read.
    trainer.averages.load(saved.part("averages"), mine=trainer.world.rank == 0)
    trainer.train_measures.load(saved.part("metrics"), mine=trainer.world.rank == 0)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device) if tensor.dim() else tensor


def _plan(plan: Plan) -> dict[str, Any]:
    return {**dataclasses.asdict(plan), "permutation": PERMUTATION}


def _check_plan(saved: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    for name, value in here.items():
        if saved.get(name) != value:
            raise SettingError(
                f"the run in {checkpoint.path.parent} has {name}={saved.get(name)!r} and this one "
                f"{name}={value!r}, so that its samples would not be those that are left. Set it "
                "as it was, or start in another folder."
            )


def _check_pieces(
    before: Mapping[str, Any] | None, here: Mapping[str, Any] | None, saved: Checkpoint
) -> None:
    for name in {**(before or {}), **(here or {})}:
        old, new = (before or {}).get(name), (here or {}).get(name)
        if old != new:
            raise SettingError(
                f"the run in {saved.path.parent} has {name}={old} and this one {name}={new}, which "
                "gives other bits. Set it as it was, or start in another folder."
            )


def _check_surroundings(trainer: Trainer, before: Mapping[str, Any], saved: Checkpoint) -> None:
    here = trainer.surroundings()
    changed = what_changed(before, here, bits=trainer.way.pieces is not None)
    if changed and trainer.world.rank == 0:
        warnings.warn(
            f"the run in {saved.path.parent} was saved with {changed}. It goes on, and its numbers "
            "may not be those of the run undisturbed.",
            EvenlyWarning,
            stacklevel=2,
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors by name, whether it is compiled or not."""
    found = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise SettingError(
                f"the model's state has {name!r} of type {type(value).__name__}; a checkpoint "
                "holds tensors. Make it a buffer."
            )
        found[name.replace(_COMPILED, "")] = value
    return found


def _state(callback: Any) -> Any:
    return callback.state_dict() if hasattr(callback, "state_dict") else {}


def _load_callbacks(trainer: Trainer, saved: Checkpoint) -> None:
    """By class, in their order: a run may go on with others."""
    waiting = [(name, state) for name, state in saved.state["callbacks"]]
    for callback in trainer.callbacks:
        for entry in waiting:
            if entry[0] == type(callback).__name__:
                waiting.remove(entry)
                if entry[1]:
                    callback.load_state_dict(put_together(entry[1], saved.tensor))
                break
