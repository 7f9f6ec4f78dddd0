"""Where ranks meet: who takes part, on which device tensors travel, and what a failure means."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from evenly.devices import wire_types
from evenly.errors import SettingError, WorldError
from evenly.watchdog.activity import EVERYBODY, activity
from evenly.world import current_world

Group = dist.ProcessGroup | None


@contextlib.contextmanager
def meeting(what: str) -> Iterator[None]:
    """Where ranks meet: raise another rank's failure before waiting, and explain it after."""
    world = current_world()
    if world.in_turn:
        raise WorldError(
            f"{what} inside on_rank() or a callback with ranks = 'one' would wait for ranks that "
            "wait for it to end. Do it before or after, or on all ranks (ranks = 'every')."
        )
    if world.absent:
        raise WorldError(f"{what} would wait for ever: {world.absent}")
    if world.board is not None:
        world.board.check()
    before = activity.enter(activity.phase, what, EVERYBODY)
    try:
        yield
    except RuntimeError as error:
        explained = world.explain(error, what)
        if explained is error:
            raise
        raise explained from None
    finally:
        activity.back(before)


@contextlib.contextmanager
def some_absent() -> Iterator[None]:
    """Around code that other ranks skip because they have no samples: meetings in it are refused,
    which would wait for ever.
    """
    world = current_world()
    world.absent = (
        "some ranks have no samples in this step and do not run the forward pass. If ranks must "
        "meet in it, say so: Trainer(collective_forward=True)."
    )
    try:
        yield
    finally:
        world.absent = ""


@contextlib.contextmanager
def apart(reason: str) -> Iterator[None]:
    """Around code that each rank runs as often as it has pieces: meetings in it are refused, in a
    world of one too, whose numbers would not be those of several.
    """
    world = current_world()
    world.apart = reason
    try:
        yield
    finally:
        world.apart = ""


def wire_for(device: torch.device, group: Group) -> torch.device:
    """Where tensors of ``device`` must be to travel: gloo carries CPU tensors only."""
    backends = wire_types(str(dist.get_backend_config(group)))
    if backends.get(device.type, backends.get("*")) == "nccl":
        return current_world().device
    if "nccl" in backends.values() and device.type not in backends:
        return current_world().device
    return torch.device("cpu")


def size_of(group: Group) -> int:
    world = current_world()
    if world.apart:
        raise SettingError(f"ranks would meet here, where each must be alone. {world.apart}")
    return world.size if group is None or world.group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    world = current_world()
    rank = world.rank if group is None or world.group is None else dist.get_rank(group)
    if rank < 0:
        raise WorldError(f"rank {world.rank} is not in the group that it was asked to meet.")
    return rank


def member(rank: int, group: Group, name: str) -> int:
    if not 0 <= rank < size_of(group):
        raise SettingError(f"{name}={rank}: the ranks here are 0 to {size_of(group) - 1}.")
    return rank
