"""What users give the Trainer, made and checked: the model, the optimizer, metrics, data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evenly import metrics as measured
from evenly.errors import SettingError
from evenly.loader import Loader
from evenly.metrics.inventory import find_holders
from evenly.replica import check_trainable
from evenly.seeding import streams_kept
from evenly.world import World

_OPTIMIZER = "lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"


def made_model(model: Any, seed: int) -> nn.Module:
    """The model, or what a function makes under the seed."""
    made = model
    if not isinstance(model, nn.Module) and callable(model):
        with streams_kept():
            torch.manual_seed(seed)
            made = model()
    if not isinstance(made, nn.Module):
        raise SettingError(
            f"model= gave a {type(made).__name__}; give a torch module, or a function that makes "
            "one."
        )
    return made


def made_optimizer(given: Any, model: nn.Module, loss: nn.Module | None) -> Optimizer | None:
    """The optimizer, over parameters of the model, or of a loss that has some."""
    if given is None:
        return None
    check_trainable(model)
    if isinstance(given, type) or not (callable(given) or isinstance(given, Optimizer)):
        raise SettingError(
            f"optimizer={given!r}: give a function of the model that makes one: {_OPTIMIZER}."
        )
    made = given if isinstance(given, Optimizer) else given(model)
    if isinstance(made, torch.optim.LBFGS):
        raise SettingError(
            "LBFGS computes the loss several times in one step, which the Trainer's steps do not. "
            "Use the parts in a loop of your own."
        )
    if not isinstance(made, Optimizer):
        raise SettingError(
            f"optimizer= gave a {type(made).__name__}; give a function of the model that returns "
            f"an optimizer: {_OPTIMIZER}."
        )
    known = {id(p) for module in (model, loss) if module is not None for p in module.parameters()}
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    foreign = [tuple(p.shape) for p in held if id(p) not in known]
    if foreign:
        raise SettingError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (shapes "
            f"{foreign[:4]}), so the model would not be trained. Make it from the model that it is "
            "given: optimizer=lambda model: ...(model.parameters())."
        )
    return made


def accepted_metrics(
    metrics: Mapping[str, Any] | None, world: World, *, pieces: int | None = None
) -> Any:
    """Copies of the metrics, on the device; refuses what cannot be merged over ranks or pieces."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise SettingError(
            f"metrics= is a {type(metrics).__name__}; give names to metrics: "
            'metrics={"accuracy": MulticlassAccuracy(10)}.'
        )
    if "loss" in metrics:
        raise SettingError("a metric named 'loss' would hide the loss; give it another name.")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise SettingError(f"the metric {name!r} is a class; give {metric.__name__}(...).")
    find_holders(metrics, several=world.size > 1 or pieces is not None)
    return measured.copies(metrics, device=world.device)


def by_name(data: Any, name: str) -> dict[str, Any]:
    """Data sets by name, whether one or several were given."""
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) else {name: data}


def loader_of(data: Any, *, whole: bool = False, **options: Any) -> Loader:
    """A loader of a data set, or the one that was given; ``whole`` where every sample counts."""
    if isinstance(data, Loader):
        if whole and data.plan.tail == "drop" and data.plan.length % data.plan.batch_size:
            raise SettingError(
                "a Loader with tail='drop' leaves samples out, and every sample counts in an "
                "evaluation or a prediction. Use tail='keep'."
            )
        return data
    if isinstance(data, DataLoader):
        raise SettingError(
            "a torch DataLoader has fixed already which process reads what. Give its data set "
            "(loader.dataset), and collate_fn= or workers= to the Trainer, or an evenly.Loader."
        )
    return Loader(data, **options)


def total_steps(
    *,
    epochs: int | None,
    steps: int | None,
    length: int,
    done: int,
    finished: int,
) -> int:
    """Where to end: ``done`` steps lie before the epoch that is going on, which is number
    ``finished`` of epochs of ``length`` steps.
    """
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise SettingError(f"{name}={value!r}; give a whole number.")
    if epochs is None and steps is None:
        raise SettingError("say how long to train: fit(..., epochs=10) or fit(..., steps=1000).")
    limits = [] if steps is None else [steps]
    if epochs is not None:
        limits.append(done + (epochs - finished) * length)
    return min(limits)
