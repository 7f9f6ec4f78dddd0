"""The carrier: what ranks tell each other every step, inside the gradient exchange they do anyway.

A tiny extra parameter lies in DDP's own gradient bucket. Its "gradient" is what this rank has to
say (loss total, weight, whether to stop, which step this is), so that the sum over ranks arrives
with the gradients and no collective is added. (A model all of whose parameters are of half
precision has no bucket that could hold these numbers; there they travel in one of their own.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SLOTS = 6  # loss total, weight, stop, save, step tag, its square
_TAGS = (-1.0, 0.0, 1.0)  # of steps in turn; small, so that adding them up hardly rounds


class Wishes(NamedTuple):
    """What a rank wants all of them to do after this step."""

    stop: bool = False
    save: bool = False


NO_WISHES = Wishes()


class News(NamedTuple):
    """What all ranks said in one step, added up."""

    total: float
    """Of the loss."""
    weight: float
    stop: bool
    """Whether any rank wants to stop."""
    save: bool
    """Whether any rank wants a checkpoint."""
    apart: bool
    """Whether the ranks were at different steps."""
    norm: float = 0.0
    """Of the gradient, where it was not looked at before the update."""


class Message:
    """The news of a step, perhaps still on its way from a GPU."""

    def __init__(self, values: Tensor | list[float], size: int, norm: Tensor | None = None) -> None:
        """``norm`` is the gradient's, where it was computed and not looked at yet."""
        self._size = size
        self._event: torch.cuda.Event | None = None
        if isinstance(values, Tensor):
            if norm is not None:
                values = torch.cat([values, norm.reshape(1).to(values)])
            received = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            received.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            values = received
        self._values = values

    def read(self) -> News:
        """The news; waits for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        values = self._values.tolist() if isinstance(self._values, Tensor) else self._values
        total, weight, stop, save, tag, square, *norm = values
        return News(
            total=total * self._size,
            weight=weight * self._size,
            stop=stop * self._size > 0.5,
            save=save * self._size > 0.5,
            apart=square - tag * tag > _largest_spread(self._size),
            norm=norm[0] if norm else 0.0,
        )


def _largest_spread(size: int) -> float:
    """What the variance of equal tags may be by rounding. One rank among others makes it about
    1 / size, which float32 cannot tell from rounding beyond some thousand ranks; then it is not
    noticed, rather than all of them stopped.
    """
    return max(0.25 / size, 2 * size * torch.finfo(torch.float32).eps)


class Carriage(nn.Module):
    """Modules that are trained, and the carrier, as DDP sees them.

    Its forward pass runs ``function``, which may use the modules in any way, so that all of the
    user's code lies inside DDP's forward pass. A world of one has no use for the parameter: what
    is loaded is kept, and the backward pass is plain torch's.
    """

    def __init__(self, modules: list[nn.Module], *, size: int, device: torch.device) -> None:
        super().__init__()
        self.trained = nn.ModuleList(modules)
        self.parameters_of_modules = [p for p in self.trained.parameters() if p.requires_grad]
        self._size = size
        self._desk = _Desk()
        double = any(p.dtype == torch.float64 for p in self.parameters_of_modules)
        self.kind = kind = torch.float64 if double else torch.float32
        self._rows = _rows(kind).to(device)
        if size > 1:
            # The parameters' own type, or DDP would give it a bucket, and a collective, alone.
            self.carrier = nn.Parameter(torch.zeros(_SLOTS, dtype=kind, device=device))

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()

    def begin(self, epoch: int, step: int) -> None:
        """The step that comes next, by which ranks that are apart are noticed."""
        self._desk.step = epoch + step

    def load(
        self,
        loss: Tensor,
        *,
        factor: float,
        total: Tensor | float,
        weight: Tensor | float,
        last: bool,
        wishes: Wishes,
    ) -> Tensor:
        """A loss with ``factor`` times this one's gradient, whose backward pass sends the values.

        Its own value means nothing. ``last`` is for the last micro-batch of a step, which also
        sends the wishes and the tag.
        """
        values = self._values(total, weight, last, wishes)
        if self._size == 1:
            self._keep(values)
            return loss if factor == 1.0 else loss * factor
        if isinstance(values, list):
            values = torch.tensor(values, dtype=self.kind)
        elif loss.device != values.device:
            loss = loss.to(values.device)
        # The values become the carrier's gradient. It is zero itself, and adds nothing.
        return torch.add(torch.dot(self.carrier, values), loss, alpha=factor)

    def load_nothing(self, *, touch: bool, last: bool, wishes: Wishes) -> Tensor:
        """What a rank without samples gives instead of running the user's code.

        With ``touch`` that is a zero gradient for each parameter, which DDP waits for.
        """
        zero = self._rows.new_zeros(())
        if touch:
            zero = _Nothing.apply(zero, *self.parameters_of_modules)
        return self.load(zero, factor=1.0, total=0.0, weight=0.0, last=last, wishes=wishes)

    def arrived(self) -> Tensor | list[float]:
        """After the backward pass: the mean over ranks of what was sent, for `Message`."""
        desk = self._desk
        values: Tensor | list[float] | None
        if self._size == 1:
            values, desk.kept = desk.kept, None
        else:
            # A copy, because it is a part of DDP's bucket, which the next step overwrites.
            carrier = self.carrier
            assert carrier.grad is not None
            values = carrier.grad.clone() if carrier.is_cuda else carrier.grad.tolist()
            carrier.grad = None
        assert values is not None
        return values

    def _values(
        self, total: Tensor | float, weight: Tensor | float, last: bool, wishes: Wishes
    ) -> Tensor | list[float]:
        place = self._desk.step % len(_TAGS) if last else _TAGS.index(0.0)
        stop, save = wishes if last else NO_WISHES
        if not self._rows.is_cuda:
            tag = _TAGS[place]
            return [float(total), float(weight), float(stop), float(save), tag, tag * tag]
        # Filled there: a copy from here would wait for the GPU.
        values = self._rows[int(stop), int(save), place].clone()
        values[0], values[1] = total, weight
        return values

    def _keep(self, values: Tensor | list[float]) -> None:
        desk = self._desk
        if desk.kept is None:
            desk.kept = values
        elif isinstance(desk.kept, Tensor):
            desk.kept = desk.kept + torch.as_tensor(values)
        else:
            desk.kept = [a + float(b) for a, b in zip(desk.kept, values, strict=True)]


class _Desk:
    """What changes at every step: setting an attribute of a module costs microseconds."""

    def __init__(self) -> None:
        self.step = 0
        self.kept: Tensor | list[float] | None = None


def _rows(kind: torch.dtype) -> Tensor:
    """What can be sent besides total and weight, for all wishes and each tag."""
    tags = torch.tensor(_TAGS, dtype=kind)
    rows = torch.zeros(2, 2, len(_TAGS), _SLOTS, dtype=kind)
    rows[1, :, :, 2] = rows[:, 1, :, 3] = 1
    rows[..., 4], rows[..., 5] = tags, tags * tags
    return rows


class _Nothing(torch.autograd.Function):
    """A zero whose gradient is zero for each parameter, without running the user's code.

    Zero times a parameter would not do: it is nan where the parameter is.
    """

    @staticmethod
    def forward(context: Any, zero: Tensor, *parameters: Tensor) -> Any:
        context.parameters = parameters
        return zero.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return None, *(torch.zeros_like(p) for p in context.parameters)
