"""Test code that runs on several processes, with pytest or without.

::

    def sum_of_ranks():
        with evenly.open_world() as world:
            return evenly.all_reduce(torch.tensor(world.rank)).item()

    def test_sum():
        assert evenly.testing.run_ranks(sum_of_ranks, 3) == [3, 3, 3]
"""

import atexit
from collections.abc import Callable
from typing import Any, TypeVar

from evenly.crew import Crew

R = TypeVar("R")

_crew: Crew | None = None


def run_ranks(
    function: Callable[..., R], n: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[R]:
    """Run ``function(*args, **kwargs)`` on ``n`` processes; returns each rank's value.

    The processes are kept for the next call, because importing torch takes seconds; each has one
    thread. The first failing rank's error is raised here. After ``timeout`` seconds LateError
    names the ranks that have not finished and shows where they are.
    """
    global _crew
    if _crew is None:
        atexit.register(stop_ranks)
        _crew = Crew(n, threads=1)
    _crew.grow(n)
    return _crew.run(function, *args, size=n, timeout=timeout, **kwargs)


def stop_ranks() -> None:
    """End the processes that `run_ranks` keeps; the next call starts new ones."""
    global _crew
    if _crew is not None:
        _crew.close()
        _crew = None
