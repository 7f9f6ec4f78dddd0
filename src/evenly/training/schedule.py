"""The schedule: how the learning rate moves, by step, by epoch or by what validation says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenly.errors import SettingError

Factory = Callable[..., LRScheduler]


class Schedule:
    """A scheduler of torch's, stepped at the right time. Steps are the same at any process count.

    ``factory`` takes the optimizer and, if it has a parameter of that name, ``steps``: their total.
    ``every`` is "step" or "epoch"; not given, it is "step" for one that asks for steps.
    """

    def __init__(
        self,
        factory: Factory | None,
        optimizer: Optimizer,
        *,
        every: Literal["step", "epoch"] | None,
        monitor: str,
        steps: int,
        stages: Collection[str],
    ) -> None:
        if every not in ("step", "epoch", None):
            raise SettingError(f"scheduler_every={every!r}; give 'step' or 'epoch'.")
        if factory is not None and not callable(factory):
            raise SettingError(
                f"scheduler={factory!r}: give a function of the optimizer that makes one: "
                "lambda optimizer: StepLR(optimizer, 30)."
            )
        asks = factory is not None and "steps" in _parameters(factory)
        self._by_step = asks if every is None else every == "step"
        self._monitor = monitor
        self.scheduler: Any = None
        if factory is not None:
            made = factory(optimizer, steps=steps) if asks else factory(optimizer)
            if not isinstance(made, LRScheduler):
                raise SettingError(
                    f"scheduler= returned a {type(made).__name__}; it must return one of "
                    "torch.optim.lr_scheduler's."
                )
            self.scheduler = made
        self._waits = isinstance(self.scheduler, ReduceLROnPlateau)
        stage = monitor.partition("/")[0]
        if self._waits and stage != "train" and stage not in stages:
            raise SettingError(
                f"ReduceLROnPlateau is to look at {monitor!r}, and there is no evaluation of that "
                "name. Give fit() a validate= set, or look at another: "
                "scheduler_monitor='train/loss'."
            )

    def state_dict(self) -> Any:
        return None if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)

    def after_step(self) -> None:
        if self.scheduler is not None and self._by_step and not self._waits:
            self.scheduler.step()

    def after_epoch(self, values: Mapping[str, Any]) -> None:
        """``values`` are the epoch's own, such as train/loss."""
        if self._waits and self._monitor.startswith("train/"):
            self._look(values)
        elif self.scheduler is not None and not self._by_step and not self._waits:
            self.scheduler.step()

    def after_evaluation(self, stage: str, values: Mapping[str, Any]) -> None:
        """``values`` are by their full names, such as validation/loss."""
        if self._waits and self._monitor.startswith(f"{stage}/"):
            self._look(values)

    def _look(self, values: Mapping[str, Any]) -> None:
        if self._monitor not in values:
            raise SettingError(
                f"ReduceLROnPlateau is to look at {self._monitor!r}, and there is "
                f"{', '.join(values)}. Name one of these in scheduler_monitor=."
            )
        self.scheduler.step(values[self._monitor])


def _parameters(factory: Factory) -> Collection[str]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins do not tell
        return ()
