"""`evenly.trace`: two lines that let `evenly verify` see into any loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from evenly import tracing
from evenly.errors import SettingError
from evenly.tracing.recorder import Recorder

B = TypeVar("B")


def trace(model: nn.Module, optimizer: Any) -> Trace:
    """Let `evenly verify` see the gradients and parameters of a loop of your own.

    Call it once, when model and optimizer are made; every ``optimizer.step()`` is then recorded.
    What is returned takes more, if you tell it: samples, loss, metrics, predictions. Without
    `evenly verify` nothing happens, at no cost. Talks to no other rank.
    """
    recorder = tracing.current()
    if recorder is not None:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's and Lightning's wrappers
        if not isinstance(inner, Optimizer):
            raise SettingError(f"trace() takes (model, optimizer); {optimizer!r} is no optimizer.")
        held = {id(p) for group in inner.param_groups for p in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise SettingError(
                "the optimizer holds none of the model's parameters, so its steps do not train "
                "this model. Make it from the model that is trained: after moving or wrapping it."
            )
        recorder.watch(model)
    return Trace(recorder)


class Trace:
    """What a loop can tell `evenly verify`. Without it, every call does nothing."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._epochs = 0

    @property
    def done(self) -> bool:
        """Whether all steps that verify wants are made, so that the loop may end."""
        return self._recorder is not None and self._recorder.done

    def samples(self, indices: Tensor | Iterable[int]) -> None:
        """The indices of this rank's samples, before the step that uses them."""
        if self._recorder is not None:
            given = indices if isinstance(indices, Tensor) else list(indices)
            self._recorder.samples(given)

    def batches(self, loader: Iterable[B]) -> Iterable[B]:
        """The batches of a torch DataLoader; the samples in them are noted as they come."""
        if self._recorder is None:
            return loader
        self._epochs += 1
        return _noted(self._recorder, loader, self._epochs - 1)

    def loss(self, value: Tensor | float, weight: float | None = None) -> None:
        """The loss of a step, once in each: this rank's, with the ``weight`` of its mean (taken
        to be its samples if not given), or that over all ranks.
        """
        if self._recorder is not None:
            self._recorder.loss(value, weight)

    def metric(self, name: str, value: Tensor | float) -> None:
        """A number that is meant to be the same on all ranks."""
        if self._recorder is not None:
            self._recorder.metrics({name: value})

    def predictions(self, value: Any, name: str = "predictions") -> None:
        """Predictions over all ranks, in data-set order; or this rank's, to see what becomes of
        them when they are put together in rank order.
        """
        if self._recorder is not None:
            self._recorder.predictions(value, name)


def _noted(recorder: Recorder, loader: Any, epoch: int) -> Iterator[Any]:
    drawn = _drawn(loader)
    for batch in loader:
        if drawn:
            recorder.samples(drawn.popleft(), epoch=epoch)
        yield batch


def _drawn(loader: Any) -> deque[list[int]]:
    """The samples of each batch, in the order in which they are drawn and come."""
    name = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
    sampler = getattr(loader, name, None)
    if sampler is None:
        raise SettingError(
            f"batches() takes a torch DataLoader, which says which samples it draws; a "
            f"{type(loader).__name__} does not. Tell them by samples(indices)."
        )
    if not isinstance(sampler, _Sampler):
        sampler = _Sampler(sampler)
        object.__setattr__(loader, name, sampler)  # a DataLoader refuses to change it otherwise
    sampler.drawn.clear()
    return sampler.drawn


class _Sampler:
    """A sampler that remembers what it has drawn."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for indices in self.inner:
            self.drawn.append(list(indices) if isinstance(indices, list) else [int(indices)])
            yield indices

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, while a copy of this is made
            raise AttributeError(name)
        return getattr(self.inner, name)
