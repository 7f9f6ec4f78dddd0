"""Replicas: the same model on every process, kept equal by exchanging gradients."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenly.collectives import broadcast
from evenly.errors import SettingError
from evenly.world import current_world


class Replica(DistributedDataParallel):
    """torch's DistributedDataParallel, which leaves the process group when the world closes.

    Otherwise the model would keep the group alive and take it down when Python collects the model,
    holding the interpreter lock while gloo's threads may need it: now and then that never ends.
    """

    def leave(self) -> None:
        """Let go of the process group. Forward passes go on, without exchange."""
        for name in ("process_group", "reducer", "logger"):
            setattr(self, name, None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, without the wrapper's prefix: it loads in plain torch."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not hasattr(self.module, name):
                raise
            # Passed on silently, a method that trains would leave out the gradient exchange.
            raise AttributeError(
                f"{name!r} belongs to the {type(self.module).__name__} that was replicated: use "
                f"that one (or .module) for it. What is trained on must go through the replica."
            ) from None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.reducer is None:
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)


def replicate(model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
    """The model on the world's device, kept equal on all processes.

    Alone it is the module itself. With several processes it is torch's DistributedDataParallel
    around it, whose construction copies rank 0's weights to all and whose backward pass averages
    gradients; `Part.share` turns that average into the gradient of the mean over the whole step.
    ``find_unused_parameters`` is for models that leave parameters out of some steps.
    """
    world = current_world()
    if not isinstance(model, nn.Module):
        raise SettingError(f"replicate() takes a torch module; it was given {model!r}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingError(
            f"{type(model).__name__} has no parameter that is trained, so there is nothing to keep "
            "equal. Use the module itself, or set requires_grad on what should be trained."
        )
    model = model.to(world.device)
    if world.size == 1:
        return model
    replica = Replica(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=world.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )
    world.replicas.append(weakref.ref(replica))
    return replica


def match(*models: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, in place, and move them to the device.

    For modules that are trained without `replicate`; a meeting of all ranks.
    """
    world = current_world()
    for model in models:
        model.to(world.device)
        with torch.no_grad():
            state = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
            for name, value in broadcast(state).items():
                state[name].copy_(value)
