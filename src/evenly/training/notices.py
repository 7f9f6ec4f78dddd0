"""What a user is told before training: where the numbers will depend on the process count."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from evenly.layers import SyncBatchNorm
from evenly.wording import some


def notices(model: nn.Module, *, size: int, cut: bool) -> Iterator[str]:
    """Sentences about this model on ``size`` ranks; ``cut`` where steps come in micro-batches."""
    kinds: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        kind = next(
            (k for k in (SyncBatchNorm, _BatchNorm, _DropoutNd) if isinstance(module, k)), None
        )
        if kind is not None and module.training:
            kinds.setdefault(kind, []).append(name or type(module).__name__)
    if _BatchNorm in kinds and size > 1:
        yield (
            f"{some(kinds[_BatchNorm], 3)}: BatchNorm takes its statistics over each rank's "
            "samples, so the numbers depend on the process count. "
            "evenly.SyncBatchNorm.convert(model) takes them over the whole step."
        )
    elif _BatchNorm in kinds and cut:
        yield (
            f"{some(kinds[_BatchNorm], 3)}: BatchNorm takes its statistics over a micro-batch, so "
            "the numbers depend on microbatch=. Without it they are the whole step's."
        )
    if SyncBatchNorm in kinds and cut:
        yield (
            f"{some(kinds[SyncBatchNorm], 3)}: SyncBatchNorm takes its statistics over the ranks' "
            "micro-batches, so the numbers depend on microbatch= and the process count. Without "
            "microbatch= they are the whole step's."
        )
    if _DropoutNd in kinds and (size > 1 or cut):
        yield (
            f"{some(kinds[_DropoutNd], 3)}: dropout draws for each rank by itself, so the numbers "
            "depend on the process count, as they do on the seed."
        )
