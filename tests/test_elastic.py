"""Machines that come and go (`--nodes 1:4`): the run goes on from its last checkpoint on those that
are there, and has the numbers of a run that was left alone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import Nursery, free_port
from soak import share
from test_kills import check_finished, furthest
from test_launcher import Launched, start
from test_preemption import program

__all__ = ["start"]  # the fixture


class Cluster:
    """Launchers on loopback that stand for machines; the first serves the rendezvous."""

    def __init__(
        self, begin: Callable[..., Launched], folder: Path, most: int, slow: float
    ) -> None:
        self._begin, self._folder = begin, folder
        lines = f"marathon(Path({str(folder)!r}), slow={slow})"
        # Each attempt has a record of its own.
        naming = "os.environ['RUN'] = os.environ['EVENLY_ATTEMPT']"
        self._words = ["-n", "1", "--nodes", f"1:{most}", "--wait", "1"]
        self._words += ["--rendezvous", f"127.0.0.1:{free_port()}", "--address", "127.0.0.1"]
        self._words += ["--job", "elastic", "--restarts", "9", program(folder, naming, lines)]

    def machine(self) -> Launched:
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        return self._begin(*self._words, env=env)

    def sizes(self) -> set[int]:
        """The numbers of processes that have made steps so far."""
        return {
            int(line.split()[2])
            for file in self._folder.glob("witness-*-0")
            for line in file.read_text().splitlines()
            if line.startswith("step")
        }

    def wait_for(self, size: int, *machines: Launched) -> None:
        """Until a checkpoint was made on that many processes."""
        deadline = time.monotonic() + 100
        while size not in self.sizes():
            assert time.monotonic() < deadline, [m.lines for m in machines]
            assert all(m.alive() for m in machines), [m.errors() for m in machines]
            time.sleep(0.05)
        step = furthest(self._folder)
        while furthest(self._folder) == step:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_machine_joins_and_both_stop_as_asked(
    start: Callable[..., Launched], nursery: Nursery, left_alone: Path, tmp_path: Path
) -> None:
    cluster = Cluster(start, tmp_path, 2, slow=0.05)
    first = cluster.machine()
    cluster.wait_for(1, first)
    second = cluster.machine()
    cluster.wait_for(2, first, second)
    second.signal(signal.SIGTERM)
    assert [first.end(), second.end()] == [75, 75], (first.errors(), second.errors())
    assert "another machine joined or left" in first.errors()
    assert nursery.start("marathon", 3, tmp_path).wait() == [0] * 3
    check_finished(tmp_path, left_alone)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(share(5)))
def test_a_lost_machine_leaves_the_rest_going_on(
    start: Callable[..., Launched], left_alone: Path, tmp_path: Path, turn: int
) -> None:
    cluster = Cluster(start, tmp_path, 2, slow=0.03)
    first = cluster.machine()
    cluster.wait_for(1, first)
    second = cluster.machine()
    cluster.wait_for(2, first, second)
    second.signal(signal.SIGKILL)
    assert second.end() == -signal.SIGKILL
    assert first.end(120) == 0, first.errors()
    assert second.orphans(patience=5.0) == []
    check_finished(tmp_path, left_alone)


@pytest.mark.soak
def test_four_machines_come_and_go(
    start: Callable[..., Launched], left_alone: Path, tmp_path: Path
) -> None:
    cluster = Cluster(start, tmp_path, 4, slow=0.1)
    machines = [cluster.machine()]
    cluster.wait_for(1, *machines)
    while len(machines) < 4:
        machines.append(cluster.machine())
        cluster.wait_for(len(machines), *machines)
    for _ in range(2):
        lost = machines.pop()
        lost.signal(signal.SIGKILL)
        lost.end()
    assert [machine.end(200) for machine in machines] == [0, 0]
    assert {1, 2, 3, 4} <= cluster.sizes()
    check_finished(tmp_path, left_alone)
