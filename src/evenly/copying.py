"""Batches onto the device, one ahead of the computation."""

from collections.abc import Iterator
from typing import Any

import torch

from evenly.fetching import Batch
from evenly.tree import leaves, map_leaves


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Batch, Any]]:
    """Each batch with its data on ``device``.

    For a GPU the next batch is copied from pinned memory on a stream of its own while the current
    one is computed on.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch, batch.data
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Batch, Any] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = map_leaves(lambda leaf: _copy(leaf, device), batch.data)
        if waiting is not None:
            yield _ready(waiting, stream)
        waiting = (batch, copied)
    if waiting is not None:
        yield _ready(waiting, stream)


def _copy(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf


def _ready(waiting: tuple[Batch, Any], stream: torch.cuda.Stream) -> tuple[Batch, Any]:
    """Make the computation wait for the copy, and keep its memory until the computation is done."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for leaf in leaves(waiting[1]):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
    return waiting
