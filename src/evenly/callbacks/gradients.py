"""Gradients to look at: their norm, and those of values inside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from evenly.callbacks.base import Callback, Ranks
from evenly.collectives import all_gather_object
from evenly.errors import SettingError

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class GradientNorm(Callback):
    """Notes the norm of the whole gradient, before clipping, every ``every`` steps.

    "gradient_norm", and with ``per_parameter`` also "gradient_norm/<name>". Gradients are the same
    on all ranks, so nothing is exchanged. Reading the number waits for a GPU.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self, *, every: int = 1, per_parameter: bool = False) -> None:
        self._every, self._per_parameter = _checked(every), per_parameter
        self._norms: dict[str, float] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        if trainer.step % self._every:
            return
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        self._norms = {"gradient_norm": float(nn.utils.get_total_norm(gradients.values()))}
        if self._per_parameter:
            for name, gradient in gradients.items():
                self._norms[f"gradient_norm/{name}"] = float(gradient.norm())

    def on_step_end(self, trainer: Trainer) -> None:
        for name, value in self._norms.items():
            trainer.note(name, value)
        self._norms = {}


class GradientCapture(Callback):
    """Keeps the gradient of what modules inside the model put out, every ``every`` steps.

    ``capture.gradients[name]`` is the gradient of the step's mean loss with respect to the output
    of the submodule ``name``, for all samples of the step in their order, on every rank. It costs
    an exchange between the ranks at those steps. Outputs must be tensors with samples first;
    inside a compiled model, modules have no outputs to look at.
    """

    ranks: ClassVar[Ranks] = "every"

    def __init__(self, names: Sequence[str], *, every: int = 1) -> None:
        self.names, self._every = list(names), _checked(every)
        self.gradients: dict[str, Tensor] = {}
        self._outputs: dict[str, list[Tensor]] = {}
        self._active = False
        self._handles: list[Any] = []

    def on_run_start(self, trainer: Trainer) -> None:
        modules = dict(trainer.model.named_modules())
        missing = [name for name in self.names if name not in modules]
        if missing:
            raise SettingError(
                f"the model has no submodule {missing[0]!r}; it has "
                f"{', '.join(list(modules)[1:9])}."
            )
        for name in self.names:
            self._handles.append(modules[name].register_forward_hook(self._keep(name)))

    def on_step_start(self, trainer: Trainer) -> None:
        self._active = trainer.step % self._every == 0
        self._outputs = {name: [] for name in self.names}

    def on_gradients(self, trainer: Trainer) -> None:
        if not self._active:
            return
        self._active = False
        own = {
            name: [o.grad * trainer.share for o in outputs if o.grad is not None]
            for name, outputs in self._outputs.items()
        }
        self._outputs = {}
        ranks = all_gather_object({n: torch.cat(g).cpu() for n, g in own.items() if g})
        device = trainer.world.device
        self.gradients = {
            name: torch.cat([found[name] for found in ranks if name in found]).to(device)
            for name in self.names
            if any(name in found for found in ranks)
        }

    def on_run_end(self, trainer: Trainer) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._remove()

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._active or not torch.is_grad_enabled():
                return
            if not isinstance(output, Tensor):
                raise SettingError(
                    f"submodule {name!r} puts out a {type(output).__name__}; only the gradients of "
                    "tensors can be captured. Name a module inside it."
                )
            if output.requires_grad:
                output.retain_grad()
                self._outputs[name].append(output)

        return hook

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _checked(every: int) -> int:
    if not isinstance(every, int) or every < 1:
        raise SettingError(f"every={every!r}: give a number of steps, 1 or more.")
    return every
