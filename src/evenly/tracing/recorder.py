"""The recorder: one rank's steps, numbers and predictions, as JSON lines and safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from evenly.tracing.forward import Forward, bare, batch_norms, dropouts
from evenly.tracing.journal import Journal, Named
from evenly.variables import read_place


class Recorder:
    """Writes down what one rank does: every optimizer step, and the numbers it is told.

    Rank 0 keeps gradients and parameters whole until its budget is spent, then evenly spaced
    elements of them; the other ranks keep those, and digests of all. No pickle, no collectives.
    """

    @classmethod
    def begin(cls, folder: Path, steps: int) -> Recorder | None:
        """None where another process of this rank writes already: one that the program started."""
        place = read_place(os.environ)
        own = folder / f"rank{place.rank}"
        try:
            own.mkdir(parents=True)
        except FileExistsError:
            return None
        return cls(folder, own, steps, rank=place.rank, size=place.size)

    def __init__(self, folder: Path, own: Path, steps: int, *, rank: int, size: int) -> None:
        self.folder, self.steps, self.rank = folder, steps, rank
        self.by_trainer = False
        """Whether a Trainer tells its own samples, losses and metrics."""
        self._journal = Journal(own, rank=rank, size=size)
        self._names: dict[int, str] = {}
        self._known: set[int] = set()
        self._models: list[nn.Module] = []
        self._forwards: list[Forward] = []
        self._optimizers: list[Optimizer] = []
        self._made: list[int] = []
        self._training: list[Any] = []
        self._loader: Any = None
        self._given: list[Tensor] = []
        self._shared: list[Tensor] = []
        self._read: list[Tensor] = []
        self._losses: list[tuple[float, float]] = []
        self._late_losses: bool | None = None
        self._epoch: int | None = None
        self._stale = False
        self._pending: tuple[int, Named] | None = None
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for forward in self._forwards:
            forward.close()
        self._journal.close()

    @property
    def done(self) -> bool:
        """Whether every optimizer seen has made the steps that were asked for."""
        return bool(self._made) and min(self._made) >= self.steps

    def watch(self, *models: nn.Module | None) -> None:
        """Name the parameters of these models, and look at what goes into them."""
        for model in models:
            if model is None or any(known is bare(model) for known in self._models):
                continue
            model = bare(model)
            number = len(self._models)
            for name, parameter in model.named_parameters():
                label = name.replace("_orig_mod.", "")
                if number and label in self._names.values():
                    label = f"model {number + 1}: {label}"
                self._names.setdefault(id(parameter), label)
            self._models.append(model)
            self._forwards.append(Forward(model, self._renew))

    def samples(self, indices: Any, *, epoch: int | None = None, instead: bool = False) -> None:
        """The samples of the step that is going on; ``instead`` of those told for it before."""
        self._renew()
        found = torch.as_tensor(indices).detach().cpu().reshape(-1).long()
        self._given = [found] if instead else [*self._given, found]
        self._epoch = epoch if epoch is not None else self._epoch

    def read(self, loader: Any, indices: Tensor, epoch: int) -> None:
        """A part that an `evenly.Loader` gave out."""
        self._renew()
        self._loader, self._epoch = loader, epoch
        self._read.append(indices)

    def shared(self, indices: Tensor, mean: Tensor, weight: Any) -> None:
        """A part, or a run of it, that is trained on, with its mean loss and the weight of it."""
        self._renew()
        if not any(known is self._loader for known in self._training):
            self._training.append(self._loader)
        if not any(known is indices for known in self._shared):  # two losses of one part
            self._shared.append(indices)
        if float(weight):
            self._losses.append((_number(mean), float(weight)))

    def enough(self, loader: Any) -> bool:
        """Whether a loader that was trained on need not go on."""
        return self.done and any(known is loader for known in self._training)

    def loss(self, value: Any, weight: float | None = None) -> None:
        """The loss of the step that is going on, or, if first told after a step, of that one."""
        if self._late_losses is None:
            self._late_losses = bool(self._made)
        if self._late_losses:
            self.loss_of(max(self._made), _number(value), weight)
        else:
            self._renew()
            self._losses.append((_number(value), -1.0 if weight is None else float(weight)))

    def loss_of(self, step: int, value: float, weight: float | None = None) -> None:
        """The loss of a step by its number, from 1 on."""
        if step <= self.steps:
            self._journal.write({"kind": "loss", "step": step, "value": value, "weight": weight})

    def metrics(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.metrics({f"{name}/{key}": inner for key, inner in value.items()})
            elif isinstance(value, bool | int | float):
                self._journal.number("metric", name, float(value))
            elif isinstance(value, Tensor):
                self._journal.tensor("metric", name, value)

    def predictions(self, value: Any, name: str = "predictions") -> None:
        """Every tensor in ``value``, which may be a structure of them."""
        if isinstance(value, Tensor):
            self._journal.tensor("prediction", name, value)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self.predictions(inner, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            if value and all(isinstance(inner, Tensor) and inner.dim() for inner in value):
                flat = torch.cat([inner.reshape(-1) for inner in value])
                self._journal.tensor("prediction", name, flat)
                return
            for key, inner in enumerate(value):
                self.predictions(inner, f"{name}.{key}")
        elif hasattr(value, "__array__"):
            self._journal.tensor("prediction", name, torch.as_tensor(value))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number(optimizer)
        if number is None or self._made[number] >= self.steps:
            return
        if self._made[number] == 0:
            self._first(number, optimizer)
        held = [(name, p.grad) for name, p in self._held(optimizer) if p.grad is not None]
        self._pending = (number, {name: _dense(gradient) for name, gradient in held})

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._pending is None:
            return
        (number, gradient), self._pending = self._pending, None
        self._made[number] += 1
        step = self._made[number]
        parameters = {name: p.detach() for name, p in self._held(optimizer)}
        told = next((t for t in (self._given, self._shared, self._read) if t), None)
        samples = None if told is None else torch.cat(told).tolist()
        seen = next((forward for forward in self._forwards if forward.rows), None)
        self._journal.write(
            {
                "kind": "step",
                "optimizer": number,
                "step": step,
                "epoch": self._epoch,
                "samples": samples,
                "losses": self._losses,
                "rows": seen.rows if seen else 0,
                "prints": seen.prints if seen else [],
                "draws": any(forward.draws for forward in self._forwards),
                "half": next((f.half for f in self._forwards if f.half), None),
                "settings": _settings(optimizer),
                **self._journal.keep(
                    f"{number}-{step:06d}",
                    {"gradient": gradient, "parameter": parameters, "buffer": self._buffers()},
                ),
            }
        )
        self._stale = True  # and not cleared yet: several optimizers may share one forward pass

    def _renew(self) -> None:
        """Forget what was told for the last step, now that something comes for the next."""
        if self._stale:
            self._stale = False
            self._given, self._shared, self._read, self._losses = [], [], [], []
            for forward in self._forwards:
                forward.clear()

    def _number(self, optimizer: Optimizer) -> int | None:
        """Which optimizer this is, in the order of their first steps; None for one of others."""
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self._models and not any(id(p) in self._names for p in held):
            return None
        self._optimizers.append(optimizer)
        self._made.append(0)
        return len(self._optimizers) - 1

    def _first(self, number: int, optimizer: Optimizer) -> None:
        # What another optimizer holds too has been changed by its step.
        held = [(name, p) for name, p in self._held(optimizer) if id(p) not in self._known]
        self._known |= {id(p) for _, p in held}
        parameters = {name: p.detach() for name, p in held}
        self._journal.write(
            {
                "kind": "initial",
                "optimizer": number,
                "type": type(optimizer).__name__,
                "batch_norms": [name for model in self._models for name in batch_norms(model)],
                "dropouts": [name for model in self._models for name in dropouts(model)],
                "tf32": torch.backends.cuda.matmul.allow_tf32 if _on_gpu(parameters) else False,
                **self._journal.keep(f"{number}-initial", {"parameter": parameters}),
            }
        )

    def _held(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        count = 0
        for group in optimizer.param_groups:
            given = group.get("param_names", ())
            for place, parameter in enumerate(group["params"]):
                name = given[place] if place < len(given) else f"parameter {count}"
                count += 1
                yield self._names.get(id(parameter), name), parameter

    def _buffers(self) -> Named:
        return {
            name: buffer.detach()
            for model in self._models
            for name, buffer in model.named_buffers()
            if buffer.numel()
        }


def _settings(optimizer: Optimizer) -> list[dict[str, float]]:
    """The numbers among the settings of each group: learning rate, decay."""
    return [
        {
            name: float(value)
            for name, value in group.items()
            if isinstance(value, int | float | Tensor)
            and not isinstance(value, bool)
            and (not isinstance(value, Tensor) or value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return (gradient.to_dense() if gradient.is_sparse else gradient).cpu().clone()


def _on_gpu(tensors: Named) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())
