"""Equal models: what ranks start from is compared, and made rank 0's where it differs."""

import warnings
from typing import Literal, get_args

import torch
from torch import nn

from evenly import tracing
from evenly.collectives import all_gather_object, broadcast
from evenly.errors import DisagreementError, EvenlyWarning, SettingError
from evenly.layers import SyncBatchNorm
from evenly.wording import some
from evenly.world import current_world

OnDifference = Literal["repair", "refuse"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def match(*models: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, in place, and move them to the device.

    For modules that are trained without `replicate`; a meeting of all ranks.
    """
    world = current_world()
    trace = tracing.current()
    if trace is not None:
        trace.watch(*models)
    for model in models:
        place(model, world.device)
        with torch.no_grad():
            state = _state(model)
            for name, value in broadcast(state).items():
                state[name].copy_(value)


def checksum(model: nn.Module) -> float:
    """A number that differs, almost surely, where any weight does by a bit."""
    bits = [_bits(p).cpu() for p in model.parameters() if p.requires_grad]
    return float(torch.stack(bits).sum() & (2**52 - 1)) if bits else 0.0  # exact in float64


def tell_apart(model: nn.Module, epoch: int) -> None:
    """Say that the ranks' weights have come apart, which DDP never notices; a meeting of all.

    Updates are the same on all ranks to the bit, so what differs came from something that one
    rank did in another way.
    """
    ranks = all_gather_object([_mark(name, p) for name, p in model.named_parameters()])
    columns = zip(*ranks, strict=True)
    apart = [first[0] for first, *others in columns if any(o[3] != first[3] for o in others)]
    if current_world().rank == 0 and apart:
        warnings.warn(
            f"after epoch {epoch} the ranks hold different weights ({some(apart)}). A callback, "
            "the optimizer or its settings do something that differs between ranks; from here on "
            "the numbers are those of neither. Let all ranks do the same.",
            EvenlyWarning,
            stacklevel=2,
        )


def match_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, in place; a meeting of all ranks if there are any.

    Those of `SyncBatchNorm` are equal already.
    """
    buffers = [
        buffer
        for layer in model.modules()
        if not isinstance(layer, SyncBatchNorm)
        for buffer in layer.buffers(recurse=False)
    ]
    if buffers and current_world().size > 1:
        with torch.no_grad():
            for buffer, value in zip(buffers, broadcast(buffers, check=False), strict=True):
                buffer.copy_(value)


def repair(model: nn.Module, on_difference: OnDifference = "repair") -> None:
    """Compare parameters and buffers over the ranks; take rank 0's where they differ, or refuse.

    A meeting of all ranks. Values are compared by a checksum.
    """
    if on_difference not in get_args(OnDifference):
        raise SettingError(
            f"on_difference={on_difference!r}; give 'repair' to take rank 0's values, or 'refuse'."
        )
    state = _state(model)
    ranks = all_gather_object([_mark(name, tensor) for name, tensor in state.items()])
    shapes = [[mark[:3] for mark in marks] for marks in ranks]
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            here, there = set(other) - set(shapes[0]), set(shapes[0]) - set(other)
            raise DisagreementError(
                f"rank {rank} has another model than rank 0: {some(sorted(here | there))}. Build "
                "the same model on every rank; a difference in size often comes from data that "
                "only part of the ranks saw."
            )
    differing = [
        first[0]
        for first, *others in zip(*ranks, strict=True)
        if any(other[3] != first[3] for other in others)
    ]
    if not differing:
        return
    what = f"{len(differing)} of {len(state)} tensors differ between ranks ({some(differing)})"
    advice = "Call torch.manual_seed() with the same number on every rank before making the model"
    if on_difference == "refuse":
        raise DisagreementError(f"{what}. {advice}, or let rank 0's be taken (on_difference).")
    if current_world().rank == 0:
        warnings.warn(
            f"{what}; rank 0's were taken. {advice}, so that every run starts alike.",
            EvenlyWarning,
            stacklevel=3,
        )
    match(model)


def place(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device, unless it lies on several already (model parallelism)."""
    if not spans_devices(model):
        model.to(device)


def spans_devices(model: nn.Module) -> bool:
    return len({parameter.device for parameter in model.parameters()}) > 1


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def _mark(name: str, tensor: torch.Tensor) -> tuple[str, str, str, int]:
    """Name, type, shape and a sum over the bits: one number per tensor leaves the device."""
    return name, str(tensor.dtype), str(tuple(tensor.shape)), int(_bits(tensor))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous().reshape(-1)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_WHOLE[plain.element_size()]).sum(dtype=torch.int64)
