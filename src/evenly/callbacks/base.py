"""What a callback is: an object whose methods the Trainer calls at certain points of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evenly.errors import SettingError
from evenly.watchdog.activity import activity
from evenly.world import World

if TYPE_CHECKING:
    from evenly.trainer import Trainer

Ranks = Literal["every", "one"]

HOOKS = (
    "on_run_start",
    "on_epoch_start",
    "on_step_start",
    "on_gradients",
    "on_step_end",
    "on_evaluation_start",
    "on_evaluation_end",
    "on_epoch_end",
    "on_run_end",
    "on_exception",
)


class Callback:
    """Override what you need; every hook gets the trainer, whose attributes say where the run is.

    ``ranks`` must say where it runs: "every" for what must happen on all ranks alike (changing the
    model or the course of the run), "one" for what must happen once (writing, printing; on rank 0).
    With several processes a callback that does not say is refused. In a callback on one rank,
    collectives are refused, because no other rank would come.
    """

    ranks: ClassVar[Ranks | None] = None

    def on_run_start(self, trainer: Trainer) -> None:
        """`fit` begins; model and optimizer are ready."""

    def on_epoch_start(self, trainer: Trainer) -> None: ...

    def on_step_start(self, trainer: Trainer) -> None:
        """The batch is there; nothing is computed yet."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Gradients are those of the whole step, the same on all ranks, not yet clipped."""

    def on_step_end(self, trainer: Trainer) -> None:
        """The weights are updated. ``trainer.loss`` is the step's, on a GPU that of one before."""

    def on_evaluation_start(self, trainer: Trainer, stage: str) -> None: ...

    def on_evaluation_end(
        self, trainer: Trainer, stage: str, values: Mapping[str, Any]
    ) -> None: ...

    def on_epoch_end(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        """An epoch is complete. ``values`` are its means, over all ranks."""

    def on_run_end(self, trainer: Trainer) -> None:
        """`fit` ends in good order, also when it was stopped early."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """`fit` ends by an error, this rank's or another's. Not the place for collectives."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Hooks:
    """The callbacks of this rank, sorted by the hooks that they have."""

    def __init__(self, callbacks: Sequence[Any], world: World) -> None:
        self._world = world
        self._calls: dict[str, list[tuple[Any, bool, str]]] = {name: [] for name in HOOKS}
        for callback in callbacks:
            self._check(callback)
            alone = getattr(callback, "ranks", None) == "one"
            if alone and world.rank != 0:
                continue
            for name in HOOKS:
                method = getattr(callback, name, None)
                inherited = getattr(type(callback), name, None) is getattr(Callback, name)
                if method is not None and not inherited:
                    label = f"{name} of {type(callback).__name__}"
                    self._calls[name].append((method, alone, label))

    def has(self, name: str) -> bool:
        return bool(self._calls[name])

    def call(self, name: str, *args: Any) -> None:
        for method, alone, label in self._calls[name]:
            self._world.in_turn += alone
            before = activity.enter("callback", label)
            try:
                method(*args)
            finally:
                activity.back(before)
                self._world.in_turn -= alone

    def call_all(self, name: str, *args: Any) -> None:
        """As `call`, but an error in one does not keep the others from theirs."""
        for method, alone, _ in self._calls[name]:
            self._world.in_turn += alone
            try:
                with contextlib.suppress(Exception):
                    method(*args)
            finally:
                self._world.in_turn -= alone

    def _check(self, callback: Any) -> None:
        name = type(callback).__name__
        if isinstance(callback, type):
            raise SettingError(f"callbacks= holds the class {callback.__name__}; give an object.")
        unknown = [n for n in dir(callback) if n.startswith("on_") and n not in HOOKS]
        if isinstance(callback, Callback) and unknown:
            raise SettingError(
                f"{name} has {', '.join(unknown)}, which nobody calls. The hooks are "
                f"{', '.join(HOOKS)}."
            )
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise SettingError(
                f"callbacks= holds a {name}, which has none of the hooks {', '.join(HOOKS)}."
            )
        ranks = getattr(callback, "ranks", None)
        if ranks not in ("every", "one", None):
            raise SettingError(f"{name}.ranks is {ranks!r}; it must be 'every' or 'one'.")
        if ranks is None and self._world.size > 1:
            raise SettingError(
                f"the callback {name} does not say on which ranks it runs, and there are "
                f"{self._world.size}: what it writes would be written {self._world.size} times, or "
                "what it decides would differ. Give the class ranks = 'one' (rank 0, for output) "
                "or ranks = 'every' (for what all ranks must do alike)."
            )
