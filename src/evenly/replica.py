"""Replicas: the same model on every process, kept equal by exchanging gradients."""

import weakref
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenly import tracing
from evenly.errors import SettingError
from evenly.layers import SyncBatchNorm
from evenly.matching import OnDifference, place, repair, spans_devices
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


def replicate(
    model: nn.Module,
    *,
    find_unused_parameters: bool = False,
    on_difference: OnDifference = "repair",
) -> nn.Module:
    """The model on the world's device, kept equal on all processes.

    Alone it is the module itself. With several processes it is torch's DistributedDataParallel
    around it, whose backward pass averages gradients; `Part.share` turns that average into the
    gradient of the mean over the whole step. A meeting of all ranks: they compare parameters and
    buffers first, and take rank 0's where they differ, or refuse. A model that lies on several
    devices already stays there. ``find_unused_parameters`` is for models that leave parameters
    out of some steps.
    """
    world = current_world()
    if not isinstance(model, nn.Module):
        raise SettingError(f"replicate() takes a torch module; it was given {model!r}.")
    check_trainable(model)
    place(model, world.device)
    trace = tracing.current()
    if trace is not None:
        trace.watch(model)
    if world.size == 1:
        return model
    repair(model, on_difference)
    # device_ids let torch move inputs too, which a model over several devices does itself.
    one = world.device.type == "cuda" and not spans_devices(model)
    return wrap(model, find_unused_parameters, device_ids=[world.device.index] if one else None)


def wrap(
    module: nn.Module, find_unused_parameters: bool, device_ids: list[int | None] | None = None
) -> Replica:
    """A replica that the world knows of. Ranks must hold equal parameters already.

    Statistics of `SyncBatchNorm` are left out of DDP's exchange of buffers: they are equal anyway.
    """
    world = current_world()
    equal = [
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules()
        if isinstance(layer, SyncBatchNorm)
        for buffer, _ in layer.named_buffers(recurse=False)
    ]
    Replica._set_params_and_buffers_to_ignore_for_model(module, equal)
    replica = Replica(
        module,
        device_ids=device_ids,
        process_group=world.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )
    world.replicas = [known for known in world.replicas if known() is not None]
    world.replicas.append(weakref.ref(replica))
    return replica


def check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingError(
            f"{type(model).__name__} has no parameter that is trained, so there is nothing to keep "
            "equal. Use the module itself, or set requires_grad on what should be trained."
        )
