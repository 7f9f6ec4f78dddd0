"""Which device each rank computes on, and which backend carries their collectives.

The choice is made once, by the rank that arrives last, from what every rank brought: nccl when
each has a GPU of its own, gloo otherwise. So machines of different kinds come to one answer.
"""

import socket
from typing import TypedDict

import torch

from evenly.errors import DeviceError

NCCL = "cpu:gloo,cuda:nccl"  # CPU tensors travel on a GPU world too
GLOO = "gloo"


class Offer(TypedDict):
    """What one rank brings to the choice."""

    device: str
    identity: str
    """Host and GPU, so that two ranks on one GPU are seen whatever the numbering."""


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """This rank's device. CUDA_VISIBLE_DEVICES is respected: torch counts what it shows.

    Slurm may show each rank one GPU only, always numbered 0; hence the remainder.
    """
    try:
        device = torch.device("cpu" if wanted == "auto" else wanted)
    except RuntimeError as error:
        raise DeviceError(f"device={wanted!r} is not a device that torch knows.") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and gpus:
        device = torch.device("cuda")
    if device.type == "cuda" and not gpus:
        raise DeviceError(
            f"device={wanted!r} was asked for but torch sees no GPU here (CUDA_VISIBLE_DEVICES "
            "hides them, the driver is missing, or torch is a CPU build). Use device='cpu'."
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank % gpus)
    return device


def offer(device: torch.device) -> Offer:
    identity = ""
    if device.type == "cuda":
        identity = f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
    return Offer(device=str(device), identity=identity)


def choose_backend(offers: list[Offer], wanted: str | None) -> str:
    """The backend for these ranks. Raises DeviceError when GPUs are shared and nobody asked."""
    kinds = {entry["device"].partition(":")[0] for entry in offers}
    if len(kinds) > 1:
        listing = ", ".join(f"rank {rank}: {entry['device']}" for rank, entry in enumerate(offers))
        raise DeviceError(
            f"the ranks are on different kinds of device ({listing}). Pass device='cpu', or "
            "start ranks only on machines that have a GPU for each."
        )
    if kinds == {"cpu"}:
        return wanted or GLOO
    sharers: dict[str, list[int]] = {}
    for rank, entry in enumerate(offers):
        sharers.setdefault(entry["identity"], []).append(rank)
    shared = [ranks for ranks in sharers.values() if len(ranks) > 1]
    if wanted is None and not shared:
        return NCCL
    if shared and wanted != GLOO:
        raise DeviceError(
            f"ranks {', '.join(map(str, shared[0]))} would share one GPU ({len(sharers)} GPUs for "
            f"{len(offers)} ranks), and nccl refuses that. Start {len(sharers)} processes, or pass "
            "backend='gloo' to open_world() to share (correct but slow), or leave the GPU alone: "
            "`evenly run --device cpu`, or device='cpu'."
        )
    return NCCL if wanted == "nccl" else str(wanted)


def wire_types(config: str) -> dict[str, str]:
    """Device type -> backend, of torch's notation ("cpu:gloo,cuda:nccl" or just "gloo")."""
    pairs = (item.rpartition(":") for item in config.split(","))
    return {device or "*": backend for device, _, backend in pairs}
