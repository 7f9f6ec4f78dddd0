"""Layers whose numbers would depend on how a batch is split, made independent of it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from evenly import world as worlds
from evenly.collectives import all_reduce
from evenly.errors import SettingError

M = TypeVar("M", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d and 3d over the batch of all ranks, split evenly or not, on any device.

    Wherever statistics of the batch are used, the forward pass is a meeting of all ranks, and so
    is its backward pass: one sum over ranks each. So every rank must run all of them, of each
    micro-batch too; a rank without samples does so with an empty tensor.

    The gradient of the input is that of the sum of all ranks' losses. Those of ``weight`` and
    ``bias`` are over this rank's samples, as with any layer: their sum over ranks is that of the
    whole batch, which is what DDP's average and ``part.share`` make of them.

    Alone, and with running statistics in eval mode, it is exactly nn.BatchNorm.
    """

    @classmethod
    def convert(cls, model: M) -> M:
        """Turn every BatchNorm of ``model``, torch's SyncBatchNorm included, into this one.

        The modules stay the objects that they are and only their class changes: parameters,
        statistics, hooks, flags and sharing are untouched, and optimizers made before still hold.
        Returns the model. What it cannot convert is refused before anything is changed.
        """
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        }
        for name, module in found.items():
            _check_convertible(module, f"{name or 'the model'} ({type(module).__name__})")
        for module in found.values():
            module.__dict__.pop("process_group", None)  # torch's SyncBatchNorm has one
            module.__class__ = cls
        return model

    def forward(self, input: Tensor) -> Tensor:
        stored = self.running_mean is not None or self.running_var is not None
        if (stored and not self.training) or _alone():
            return super().forward(input)
        self._check_input_dim(input)
        whole = _whole_batch(input.detach())
        if whole is None:
            return super().forward(input)
        if self.training and self.track_running_stats:
            self._track(whole)
        scale = (whole.variance + self.eps).rsqrt()
        normalized: Tensor = _Normalize.apply(
            input, self.weight, self.bias, whole.mean, scale, whole.values
        )
        return normalized

    def _track(self, whole: _Statistics) -> None:
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain average over all batches
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = whole.variance * (whole.values / (whole.values - 1))
        for running, now in ((self.running_mean, whole.mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(now.to(running.dtype), factor)

    def _check_input_dim(self, input: Tensor) -> None:
        # Before ranks meet: there, a shape unlike the others' would wait or mix up numbers.
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) was given a tensor of shape "
                f"{tuple(input.shape)}; it takes (samples, {self.num_features}, ...)."
            )


class _Statistics(NamedTuple):
    """Of each channel, in float64; ``variance`` is the mean square of the deviations."""

    mean: Tensor
    variance: Tensor
    values: Tensor
    """How many there are."""


class _Normalize(torch.autograd.Function):
    """``(x - mean) * scale * weight + bias``, where the statistics depend on every rank's x."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        values: Tensor,
    ) -> Tensor:
        if x.is_cuda:  # as its kernels take them
            mean, scale = mean.to(_kind(x)), scale.to(_kind(x))
        context.save_for_backward(x, weight, mean, scale, values)
        return _normalized(x, weight, bias, mean, scale)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SettingError(
                "create_graph=True asks for second derivatives, which SyncBatchNorm does not have "
                "across ranks. Use nn.GroupNorm or nn.LayerNorm where gradients are in the loss."
            )
        x, weight, mean, scale, values = context.saved_tensors
        own = _sums(gradients[0], x, mean, scale)
        # Also where this rank's x needs no gradient, because another rank's may.
        level, slope = all_reduce(own, check=False) / values
        dx = None
        if context.needs_input_grad[0]:
            dx = _input_gradient(gradients[0], x, weight, mean, scale, level, slope)
        return (
            dx,
            own[1] * scale if context.needs_input_grad[1] else None,
            own[0] if context.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _whole_batch(x: Tensor) -> _Statistics | None:
    """The statistics over all ranks; None if none of them has a sample. One sum over ranks.

    Each rank's mean, variance and count are merged (Chan, Golub and LeVeque 1979), which keeps
    the digits where the mean is large; sums of squares would lose them. Each rank's go into a row
    of their own: adding zeros is exact, so that all ranks compute the same bits.
    """
    world, channels, count = worlds.current_world(), x.shape[1], x.numel() // max(1, x.shape[1])
    table = torch.zeros(world.size, 2 * channels + 1, dtype=torch.float64, device=x.device)
    if count:
        # Filled there and not assigned: that would copy from the CPU, which waits for a GPU.
        values = torch.full((1,), count, dtype=table.dtype, device=x.device)
        table[world.rank] = torch.cat([*_own_statistics(x, count), values])
    means, variances, counts = all_reduce(table, check=False).split([channels, channels, 1], dim=1)
    total = counts.sum()
    # With two values here there are two in total: a GPU need not be waited for.
    if count < 2 and total < 2:
        if total == 0:
            return None
        raise ValueError(
            "Expected more than 1 value per channel when training, got 1 over all ranks (the input "
            f"of this one has shape {tuple(x.shape)}). If it is a short last step, tail='drop' "
            "leaves it out; else use a larger batch_size."
        )
    shares = counts / total
    mean = (shares * means).sum(0)
    apart = means - mean
    variance = (shares * torch.addcmul(variances, apart, apart)).sum(0)
    return _Statistics(mean, variance, total)


# The arithmetic on whole tensors. Half precision is computed in float32; on the CPU, numbers of
# channels are float64, and a mean is subtracted as a rounded part and the rest of it, so that
# large means cost no digits. On CUDA the kernels of torch's own SyncBatchNorm go over the data
# once where the lines for the CPU go several times; they do not take empty tensors.


def _own_statistics(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel."""
    if x.is_cuda:
        mean, variance = torch.batch_norm_update_stats(_dense(x), None, None, 0.0)
        return mean, variance
    rough = (_sum(x.to(_kind(x))) / count).double()
    centred, _ = _centred(x, rough)
    rest = _sum(centred).double() / count
    variance = _sum(centred.square_()).double() / count - rest.square()
    return rough + rest, variance.clamp_min(0)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
) -> Tensor:
    if x.is_cuda and x.numel():
        weight = None if weight is None else weight.to(mean.dtype)
        bias = None if bias is None else bias.to(mean.dtype)
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, scale, 0.0)
    centred, rest = _centred(x, mean)
    factor = scale if weight is None else scale * weight
    shift = -rest * factor if bias is None else bias - rest * factor
    return centred.mul_(_wide(factor, x)).add_(_wide(shift, x)).to(x.dtype)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Of each channel: the sum of dy, and that of dy * (x - mean)."""
    if x.is_cuda and x.numel():
        reduced = torch.batch_norm_backward_reduce(
            _dense(dy), _dense(x), mean, scale, None, True, False, False
        )
        return torch.stack(reduced[:2])
    centred, rest = _centred(x, mean)
    dy = dy.to(_kind(x))
    total = _sum(dy).to(mean.dtype)
    return torch.stack([total, _sum(centred.mul_(dy)).to(mean.dtype) - rest * total])


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    level: Tensor,
    slope: Tensor,
) -> Tensor:
    """``(dy - level - slope * scale ** 2 * (x - mean)) * scale * weight``."""
    if x.is_cuda and x.numel():
        weight = None if weight is None else weight.to(mean.dtype)
        # It divides by a count of 32 bits, which a large world can exceed; so that was done.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            _dense(dy), _dense(x), mean, scale, weight, level, slope, one
        )
    factor = scale if weight is None else scale * weight
    slope = slope * scale.square()
    centred, rest = _centred(x, mean)
    bend = centred.mul_(_wide(slope, x)).add_(_wide(level - slope * rest, x))
    return (dy.to(bend.dtype) - bend).mul_(_wide(factor, x)).to(x.dtype)


def _centred(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """A new tensor of x less the rounded mean, and what of the mean is still to be subtracted."""
    rounded = mean.to(_kind(x))
    return x.to(rounded.dtype) - _wide(rounded, x), mean - rounded


def _kind(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _wide(channels: Tensor, x: Tensor) -> Tensor:
    """Numbers of channels in the type of x's arithmetic, shaped to meet x."""
    return channels.to(_kind(x)).reshape(1, -1, *[1] * (x.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    return x.sum([dimension for dimension in range(x.dim()) if dimension != 1])


def _dense(x: Tensor) -> Tensor:
    """As torch's kernels want it: contiguous, or with the channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x if last and x.is_contiguous(memory_format=last) else x.contiguous()


def _alone() -> bool:
    world = worlds._current
    if world is None and dist.is_initialized() and dist.get_world_size() > 1:
        worlds.current_world()  # raises: several processes would train on statistics of their own
    return world is None or world.size == 1


def _check_convertible(module: _BatchNorm, where: str) -> None:
    if isinstance(module, _LazyNormBase):
        raise SettingError(
            f"{where} does not know its number of channels yet. Run one batch through the model "
            "first, in eval mode, then convert it."
        )
    plain = type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if not plain or parametrize.is_parametrized(module):
        raise SettingError(
            f"{where} does more than a BatchNorm does, and that would be lost. Build it from an "
            "evenly.SyncBatchNorm instead, or convert the parts of the model around it."
        )
    group = getattr(module, "process_group", None)
    if group is not None and group is not dist.group.WORLD:
        raise SettingError(
            f"{where} takes its statistics over some of the ranks; evenly.SyncBatchNorm takes them "
            "over all. Give it no process_group before converting, if that is what you want."
        )
