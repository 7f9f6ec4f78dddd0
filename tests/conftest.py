"""A suite that leaves nothing behind: no process group, no thread, no changed variable."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import evenly
import evenly.world
import faults

# How long an example takes is the machine's business.
settings.register_profile("evenly", deadline=None)
settings.load_profile("evenly")

# Tests of several ranks run on the CPU also where there is one GPU; GPU tests ask for it.
os.environ["EVENLY_DEVICE"] = "cpu"
# torch's store looks up a name for 127.0.0.1 now and then; where DNS is slow, five seconds long.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


BROWSER = Path("/usr/bin/chromium")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    variables = _variables()
    threads = set(threading.enumerate())
    yield
    assert _variables() == variables, "the test changed the environment"
    assert evenly.world._current is None, "the test left a world open"
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=2)  # torch does not wait for those that feed its workers
        assert not thread.is_alive(), f"the test left a thread behind: {thread}"


def _variables() -> dict[str, str]:
    """The environment without what pytest, and torch at an optimizer's first step, set in it."""
    theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in theirs}


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


@pytest.fixture(scope="session")
def nursery() -> Iterator["faults.Nursery"]:
    """Starts ranks of fault tests, which may be killed."""
    with faults.nursery() as opened:
        yield opened


@pytest.fixture(scope="session")
def left_alone(nursery: "faults.Nursery", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a marathon that nobody disturbed, on one process."""
    folder = tmp_path_factory.mktemp("left_alone")
    started = nursery.start("marathon", 1, folder)
    assert started.wait() == [0], started.log()
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one, without a window. Not for modules that use asyncio: playwright does, too."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    if not BROWSER.exists():
        pytest.skip(f"{BROWSER} is missing: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=str(BROWSER), args=["--no-sandbox"])
        yield opened
        opened.close()
