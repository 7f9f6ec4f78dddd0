"""A part: one rank's share of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evenly import tracing
from evenly.collectives import all_reduce
from evenly.errors import DataError, SettingError
from evenly.objective import Total
from evenly.plan import microbatches, split
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
    pieces: tuple[Part, ...] | None = None
    """Where steps are cut into pieces: this rank's, without the empty ones; ``data`` is then the
    list of their batches."""
    piece: int | None = None
    """The number of the piece that this is, if it is one."""

    _progress: _Progress = field(default_factory=lambda: _Progress(), repr=False)

    def share(self, loss: Tensor | Total, *, of: float | None = None) -> Tensor:
        """This part's share of the mean over the whole step.

        ``loss`` is the mean over this part's samples, or a `Total` where the loss divides by
        something else. Gradients of replicas are averaged over ranks, so that the shares'
        gradients add up to that of the mean over the step, however unevenly it is split.

        A Total's weight over all ranks must be known: it is summed here, by one small all-reduce
        that every rank takes part in, unless ``of`` gives it. Micro-batches need ``of``: sum the
        weights of the whole part before cutting it.
        """
        if self._progress.walking:
            raise SettingError(
                "this part is being walked in micro-batches; call share() of the micro-batch."
            )
        self._progress.shared = True
        if isinstance(loss, Total):
            return self._share_total(loss, of)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            given = f"a{shape or ' ' + type(loss).__name__}"
            raise SettingError(
                f"share() takes the mean loss of this part, a tensor of one number, or a Total; it "
                f"was given {given}. Use reduction='mean', and no .item()."
            )
        if tracing.active is not None:
            tracing.active.shared(self.indices, loss, self.weight)
        if self.weight == 0:
            # The mean of nothing is nan; its gradient must be zero and not nan.
            return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if self.weight == self.global_weight and self.world.size == 1:
            return loss
        return loss * (self.weight * self.world.size / self.global_weight)

    def _share_total(self, total: Total, of: float | None) -> Tensor:
        if not isinstance(total.sum, Tensor):
            raise SettingError(
                f"the sum of a Total is {total.sum!r}, which has no gradient; give a tensor."
            )
        if of is None:
            if self._progress.cut:
                raise SettingError(
                    "a micro-batch does not know the weight of the whole step. Sum it first: "
                    "of = evenly.all_reduce(torch.tensor(weight_of_the_part)).item(), then "
                    "share(total, of=of)."
                )
            weight = torch.as_tensor(total.weight, dtype=torch.float64).detach().reshape(())
            of = float(all_reduce(weight, check=False))
        if tracing.active is not None:
            tracing.active.shared(self.indices, total.sum / total.weight, total.weight)
        if of == 0:
            raise SettingError(
                f"the weights of step {self.step} sum to 0 over all ranks, so there is no mean. "
                "Leave such steps out, or give their samples some weight."
            )
        return total.sum * (self.world.size / of)

    def microbatches(self, limit: int) -> Iterator[Part]:
        """Walk this part in runs of at most ``limit`` samples, for accumulation.

        Replicas made by `evenly.replicate` hold back their gradient exchange until the last run,
        so do forward and backward of each run before asking for the next. Every rank has as many
        runs as the one with most samples needs, so that layers which meet other ranks (such as
        `SyncBatchNorm`) meet the same run; with fewer samples the last ones may be empty.
        """
        runs = self.cut(limit)
        replicas = [r for r in (reference() for reference in self.world.replicas) if r is not None]
        self._progress.walking = True
        try:
            for micro in runs:
                last = micro is runs[-1]
                for replica in replicas:
                    replica.require_backward_grad_sync = last
                yield micro
                if not last and torch.is_grad_enabled() and not micro._progress.shared:
                    raise SettingError(
                        "the next micro-batch was asked for before share() of this one was called. "
                        "Do forward, share() and backward() of each in turn; a list of them would "
                        "exchange gradients at the wrong time."
                    )
        finally:
            self._progress.walking = False
            for replica in replicas:
                replica.require_backward_grad_sync = True

    def cut(self, limit: int) -> list[Part]:
        """The runs that `microbatches` walks, all at once."""
        _, largest = split(self.global_weight, 0, self.world.size)
        runs = max(1, len(microbatches(largest, limit)))
        bounds = [split(self.weight, run, runs) for run in range(runs)]
        return [
            replace(
                self,
                data=rows(self.data, start, stop, self.weight) if runs > 1 else self.data,
                indices=self.indices[start:stop],
                weight=stop - start,
                _progress=_Progress(cut=runs > 1),
            )
            for start, stop in bounds
        ]


@dataclass
class _Progress:
    """What has been done with a part."""

    shared: bool = False
    walking: bool = False
    cut: bool = False
    """It is one micro-batch of several."""


_PLAIN = (str, bytes, int, float, complex, type(None))


def rows(data: Any, start: int, stop: int, count: int) -> Any:
    """The samples from ``start`` to ``stop`` of a batch of ``count``, in the batch's structure."""
    if isinstance(data, Mapping):
        return {name: rows(value, start, stop, count) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(rows(value, start, stop, count) for value in data))
    if isinstance(data, list | tuple):
        # One plain value for each sample; a list of fields holds tensors or structures.
        if len(data) == count and all(isinstance(value, _PLAIN) for value in data):
            return data[start:stop]
        return type(data)(rows(value, start, stop, count) for value in data)
    if isinstance(data, Tensor) and data.dim():
        if data.shape[0] != count:
            raise DataError(
                f"a batch of {count} samples holds a tensor of shape {tuple(data.shape)}, which "
                "cannot be cut into micro-batches by sample. Let collate_fn put the samples first."
            )
        return data[start:stop]
    if isinstance(data, Tensor | int | float | str | bytes | None):
        return data
    raise DataError(
        f"a batch holds a {type(data).__name__}, which cannot be cut into micro-batches. "
        "Let collate_fn return tensors, lists and dictionaries, or leave out the micro-batch."
    )
