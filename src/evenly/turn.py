"""Run something on one rank: files, downloads, printing. The others wait, and never for ever."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from traceback import format_exception
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from evenly.blame import summary_of
from evenly.errors import LateError, RankFailedError, SettingError, WorldError
from evenly.store import discard, put, take
from evenly.watchdog.activity import State, activity
from evenly.world import World, current_world

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """Truthy on the chosen rank. ``share(value)`` there makes ``value`` the same on all ranks."""

    def __init__(self, mine: bool) -> None:
        self.value: Any = None
        self._mine = mine

    def __bool__(self) -> bool:
        return self._mine

    def share(self, value: Any) -> None:
        """Give ``value`` to every rank; it is there after the block ends."""
        if not self._mine:
            raise SettingError("share() is for the chosen rank; put it under `if turn:`.")
        self.value = value


class on_rank:  # noqa: N801 - reads as a decorator and as a block, like contextlib's own
    """Run a block or a function on one rank only. All ranks must reach it, in the same order.

    ::

        with evenly.on_rank(0) as turn:
            if turn:
                turn.share(download())
        data = turn.value

        @evenly.on_rank(0)
        def report(...): ...          # returns rank 0's value on every rank

    If the chosen rank raises, every rank raises that error. The others wait in the store, not in
    a collective, for at most ``timeout`` seconds (the world's unless given).
    """

    def __init__(self, rank: int = 0, *, timeout: float | None = None) -> None:
        self.rank = rank
        self.timeout = timeout
        self._open: list[tuple[World, Turn, str, int, State, float]] = []

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def on_one(*args: P.args, **kwargs: P.kwargs) -> R:
            with on_rank(self.rank, timeout=self.timeout) as turn:
                if turn:
                    turn.share(function(*args, **kwargs))
            value: R = turn.value
            return value

        return on_one

    def __enter__(self) -> Turn:
        world = current_world()
        if not 0 <= self.rank < world.size:
            raise SettingError(
                f"on_rank({self.rank}): the world has ranks 0 to {world.size - 1}. "
                "Rank 0 exists in every world."
            )
        if world.board is not None:
            world.board.check()
        turn = Turn(world.rank == self.rank)
        world.turns += 1
        world.in_turn += 1
        where = f"{_caller()} (on rank {self.rank})"
        before, allowed = activity.enter(activity.phase, f"on_rank at {where}"), activity.allowed
        activity.allowed = max(allowed, self.timeout or 0.0)
        self._open.append((world, turn, where, world.turns, before, allowed))
        return turn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        world, turn, where, number, before, activity.allowed = self._open.pop()
        activity.back(before)
        world.in_turn -= 1
        if world.board is None or world.store is None:
            return
        key = f"turn/{number}"
        if turn:
            entry, unsendable = _pack(where, turn.value, error, world.rank)
            if not put(world.store, key, entry) and error is None:
                raise _different(cloudpickle.loads(take(world.store, key))[0], where)
            if unsendable is not None:
                raise unsendable
            if error is not None:
                error.agreed = True  # type: ignore[attr-defined]
            return
        if error is not None:
            return  # leaves by itself; the world tells the others
        with activity.within(activity.phase, f"on_rank at {where}", self.rank):
            world.board.wait(
                key,
                limit=self.timeout or world.timeout,
                left=f"left/{self.rank}",
                late=lambda gone: self._late(gone, where, world),
            )
        there, value, raised = cloudpickle.loads(take(world.store, key))
        if world.store.add(f"{key}/read", 1) == world.size - 1:
            discard(world.store, key)
            world.store.delete_key(f"{key}/read")
        if raised is not None:
            raised.agreed = True
            raise raised
        if there != where:
            raise _different(there, where)
        turn.value = value

    def _late(self, gone: bool, where: str, world: World) -> LateError:
        if gone:
            return LateError(
                f"rank {self.rank} left the world without its section at {where}, which rank "
                f"{world.rank} waited for. Every rank must reach on_rank().",
                [self.rank],
            )
        return LateError(
            f"rank {self.rank} has not finished its section at {where} within "
            f"{self.timeout or world.timeout:g} s (rank {world.rank} waited). If it needs longer, "
            "pass timeout= to on_rank().",
            [self.rank],
        )


def _different(there: str, here: str) -> WorldError:
    return WorldError(
        f"one rank ran a section at {there} while another was at {here}: the ranks took different "
        "branches, or chose different ranks. All must reach the same on_rank(), with the same rank."
    )


def _pack(
    where: str, value: Any, error: BaseException | None, rank: int
) -> tuple[bytes, SettingError | None]:
    """The outcome of a section as bytes, and the error to raise if its value cannot be sent."""
    try:
        return cloudpickle.dumps((where, value, copy_of(error, rank))), None
    except Exception as reason:  # pickling runs the value's own code
        unsendable = SettingError(
            f"the value of the section at {where} cannot be sent to the other ranks "
            f"({summary_of(reason)}). Return None, or use the block form and share less."
        )
        unsendable.evenly_rank = rank  # type: ignore[attr-defined]
        return cloudpickle.dumps((where, None, unsendable)), unsendable


def copy_of(error: BaseException | None, rank: int) -> BaseException | None:
    """The error as other ranks raise it: the same type if it survives pickling, marked with the
    rank it comes from and carrying that rank's traceback as a note.
    """
    if error is None:
        return None
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return RankFailedError(rank, f"ended by {summary_of(error)}")
    text = "".join(format_exception(error)).rstrip()
    try:
        copy: BaseException = cloudpickle.loads(cloudpickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise TypeError
        copy.evenly_rank = rank  # type: ignore[attr-defined]
        copy.add_note(f"raised on rank {rank}:\n{text}")
    except Exception:  # an error class of any kind may refuse to be pickled or rebuilt
        return RankFailedError(rank, summary_of(error), text)
    return copy


def _caller() -> str:
    """File and line of the user's `with` or call, to recognise ranks at different places."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
