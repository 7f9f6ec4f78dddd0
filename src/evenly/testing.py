"""Test code that runs on several processes, with pytest or without.

::

    def sum_of_ranks():
        with evenly.open_world() as world:
            return evenly.all_reduce(torch.tensor(world.rank)).item()

    def test_sum():
        assert evenly.testing.run_ranks(sum_of_ranks, 3) == [3, 3, 3]

    def test_training_is_the_same_on_one_and_three():
        evenly.testing.assert_same(train, processes=(1, 3))
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from evenly import tracing
from evenly.crew import Crew
from evenly.errors import SettingError
from evenly.parity import Comparison, Promise, compare
from evenly.parity.reading import Run

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


def verify(
    function: Callable[..., Any],
    *args: Any,
    processes: tuple[int, ...] = (1, 2, 3),
    steps: int = 20,
    promise: Promise = "numbers",
    timeout: float = 60.0,
    **kwargs: Any,
) -> Comparison:
    """What ``evenly verify`` finds in ``function(*args, **kwargs)``, which trains.

    It runs at each process count in turn, as by `run_ranks`; every count is compared with the
    first. ``comparison.holds`` says whether the promise is kept, ``str(comparison)`` why not.
    """
    if len(processes) < 2 or min(processes) < 1 or steps < 1:
        raise SettingError(
            f"processes={processes}, steps={steps}: give at least two process counts and one step."
        )
    with tempfile.TemporaryDirectory(prefix="evenly-verify-") as folder:
        runs = []
        for number, size in enumerate(processes):
            trace = Path(folder) / f"run{number}"
            call = (function, args, kwargs)
            run_ranks(_traced, size, call, str(trace), steps, timeout=timeout)
            runs.append(Run(trace, size))
        return compare(runs, promise)


def assert_same(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Fail, with the report, unless `verify` finds that the promise holds; the same arguments."""
    __tracebackhide__ = True
    comparison = verify(function, *args, **options)
    if not comparison.holds:
        raise AssertionError(f"\n{comparison}")


def _traced(call: tuple[Callable[..., Any], Any, Any], folder: str, steps: int) -> None:
    """On a rank: the function with tracing on. What it returns is not needed."""
    function, args, kwargs = call
    os.environ[tracing.FOLDER], os.environ[tracing.STEPS] = folder, str(steps)
    try:
        function(*args, **kwargs)
    finally:
        del os.environ[tracing.FOLDER]
        tracing.current()  # which closes the one that was


def stop_ranks() -> None:
    """End the processes that `run_ranks` keeps; the next call starts new ones."""
    global _crew
    if _crew is not None:
        _crew.close()
        _crew = None
