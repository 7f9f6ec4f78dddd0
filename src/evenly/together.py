"""Do something on every rank, and let all of them know how it went."""

from collections.abc import Callable
from typing import TypeVar

import cloudpickle

from evenly.blame import blame, summary_of
from evenly.collectives import all_gather_object
from evenly.errors import SettingError
from evenly.turn import copy_of
from evenly.world import current_world

T = TypeVar("T")


def together(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and meet: each gets the values of all, or all raise.

    A rank whose work raised raises that error, the others a copy of it, and the world stays
    usable. ``work`` must not talk to other ranks: one that failed would not be there.
    """
    world = current_world()
    if world.size == 1:
        return [work()]
    error: Exception | None = None
    try:
        sent = cloudpickle.dumps((work(), None))
    except Exception as raised:
        if blame(raised, world.rank) != "own":
            raise  # the world is breaking; nobody would come to the meeting
        error = raised
        sent = _outcome(raised, world.rank)
    outcomes = [cloudpickle.loads(entry) for entry in all_gather_object(sent)]
    for failure in (error, *(other for _, other in outcomes)):
        if failure is not None:
            failure.agreed = True  # every rank raises it here
            raise failure
    return [value for value, _ in outcomes]


def from_first(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and meet: all get its value, or all raise.

    The others wait in a collective, in which a rank that dies without a word is noticed at once;
    in the store, where `on_rank` waits, it is not.
    """
    return together(lambda: work() if current_world().rank == 0 else None)[0]  # type: ignore[return-value]


def _outcome(error: Exception, rank: int) -> bytes:
    try:
        return cloudpickle.dumps((None, copy_of(error, rank)))  # type: ignore[no-any-return]
    except Exception:  # its notes or attributes may refuse to travel
        return cloudpickle.dumps((None, SettingError(summary_of(error))))  # type: ignore[no-any-return]
