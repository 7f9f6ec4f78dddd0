"""The schedule: how the learning rate moves, by step, by epoch or by what validation says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenly.errors import SettingError

Factory = Callable[..., LRScheduler]


class Schedule:
    """A scheduler of torch's, stepped at the right time. Steps are the same at any process count.

    ``factory`` takes the optimizer, or the optimizer and the total number of steps.
    """

    def __init__(
        self,
        factory: Factory | None,
        optimizer: Optimizer,
        *,
        every: Literal["step", "epoch"],
        monitor: str,
        steps: int,
    ) -> None:
        if every not in ("step", "epoch"):
            raise SettingError(f"scheduler_every={every!r}; give 'step' or 'epoch'.")
        self._by_step = every == "step"
        self._monitor = monitor
        self.scheduler: Any = None
        if factory is not None:
            made = factory(optimizer, steps) if _takes_two(factory) else factory(optimizer)
            if not isinstance(made, LRScheduler):
                raise SettingError(
                    f"scheduler= returned a {type(made).__name__}; it must return one of "
                    "torch.optim.lr_scheduler's."
                )
            self.scheduler = made
        self._waits = isinstance(self.scheduler, ReduceLROnPlateau)

    def after_step(self) -> None:
        if self.scheduler is not None and self._by_step and not self._waits:
            self.scheduler.step()

    def after_epoch(self) -> None:
        if self.scheduler is not None and not self._by_step and not self._waits:
            self.scheduler.step()

    def after_evaluation(self, values: Mapping[str, Any]) -> None:
        """For ReduceLROnPlateau; ``values`` by their full names, such as validation/loss."""
        if not self._waits:
            return
        if self._monitor not in values:
            raise SettingError(
                f"ReduceLROnPlateau is to look at {self._monitor!r}, and validation gives "
                f"{', '.join(values)}. Name one of these in scheduler_monitor=."
            )
        self.scheduler.step(values[self._monitor])


def _takes_two(factory: Factory) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some builtins do not tell
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) >= 2
