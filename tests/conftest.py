"""A suite that leaves nothing behind: no process group, no thread, no changed variable."""

import os
import threading
from collections.abc import Iterator

import pytest

import evenly

# Tests of several ranks run on the CPU also where there is one GPU; GPU tests ask for it.
os.environ["EVENLY_DEVICE"] = "cpu"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    variables = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    variables["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    assert dict(os.environ) == variables, "the test changed the environment"
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=2)  # torch does not wait for those that feed its workers
        assert not thread.is_alive(), f"the test left a thread behind: {thread}"


@pytest.fixture
def world() -> Iterator["evenly.World"]:
    """A world of one, in the test's own process."""
    with evenly.open_world() as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Start as many ranks as any test asks for, once; stop them before pytest looks for leaks."""
    yield
    evenly.testing.stop_ranks()
