"""A part: one rank's share of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenly.errors import DataError, SettingError
from evenly.plan import microbatches
from evenly.world import World


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's samples of a step. A rank without any gets a part of weight 0."""

    data: Any
    """What the collate function made of the samples, on the world's device."""
    indices: Tensor
    """Which samples of the data set these are."""
    epoch: int
    step: int
    weight: int
    """How many samples are here."""
    global_weight: int
    """How many samples the step has over all ranks."""
    world: World

    def share(self, loss: Tensor) -> Tensor:
        """This part's share of the mean over the whole step, from the mean over this part.

        Gradients of replicas are averaged over ranks, so that the shares' gradients add up to that
        of the mean over all samples of the step, however unevenly they are split.
        """
        if loss.numel() != 1:
            raise SettingError(
                f"share() takes the mean loss of this part, one number; it was given a tensor of "
                f"shape {tuple(loss.shape)}. Use reduction='mean', or call .mean() on it."
            )
        if self.weight == 0:
            # The mean of nothing is nan; its gradient must be zero and not nan.
            return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if self.weight == self.global_weight and self.world.size == 1:
            return loss
        return loss * (self.weight * self.world.size / self.global_weight)

    def microbatches(self, limit: int) -> Iterator[Part]:
        """Walk this part in runs of at most ``limit`` samples, for accumulation.

        Replicas made by `evenly.replicate` hold back their gradient exchange until the last run,
        so do forward and backward of each run before asking for the next. Ranks may have
        different numbers of runs; a rank without samples has one, empty.
        """
        bounds = microbatches(self.weight, limit) or [(0, 0)]
        replicas = [r for r in (reference() for reference in self.world.replicas) if r is not None]
        try:
            for number, (start, stop) in enumerate(bounds):
                for replica in replicas:
                    replica.require_backward_grad_sync = number == len(bounds) - 1
                if len(bounds) == 1:
                    yield self
                    continue
                yield replace(
                    self,
                    data=_rows(self.data, start, stop, self.weight),
                    indices=self.indices[start:stop],
                    weight=stop - start,
                )
        finally:
            for replica in replicas:
                replica.require_backward_grad_sync = True


def _rows(data: Any, start: int, stop: int, count: int) -> Any:
    if isinstance(data, Mapping):
        return {name: _rows(value, start, stop, count) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_rows(value, start, stop, count) for value in data))
    if isinstance(data, list | tuple):
        if len(data) == count and not any(isinstance(value, Tensor) for value in data):
            return data[start:stop]
        return type(data)(_rows(value, start, stop, count) for value in data)
    if isinstance(data, Tensor) and data.dim():
        if data.shape[0] != count:
            raise DataError(
                f"a batch of {count} samples holds a tensor of shape {tuple(data.shape)}, which "
                "cannot be cut into micro-batches by sample. Let collate_fn put the samples first."
            )
        return data[start:stop]
    if isinstance(data, torch.Tensor | int | float | str | bytes | type(None)):
        return data
    raise DataError(
        f"a batch holds a {type(data).__name__}, which cannot be cut into micro-batches. "
        "Let collate_fn return tensors, lists and dictionaries, or leave out the micro-batch."
    )
