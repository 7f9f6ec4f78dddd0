"""A scheduler that wants its machine back gets it soon, and the run goes on elsewhere: signals to
one rank, all ranks and the launcher; in a step, a save, an evaluation, at the start and the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import Nursery, Ranks, free_port
from soak import share
from test_kills import check_finished, furthest, reached
from test_launcher import Launched, environment, start

__all__ = ["start"]  # the fixture

TESTS = str(Path(__file__).parent)


def wait_for(condition: Callable[[], bool], started: Ranks | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        if started is not None:
            assert started.whole(), started.log()
        time.sleep(0.001)


def interrupted(
    nursery: Nursery, folder: Path, phase: str, who: str, number: signal.Signals, size: int
) -> int:
    """Ask a run to stop in this phase; the step at which it stopped."""
    started = nursery.start("marathon", size, folder, slow=0.002, pause=0.1)
    step = furthest(folder) + 5
    wait_for(lambda: reached(folder, phase, step, str(started.run)), started)
    started.kill(*(range(size) if who == "all" else [size - 1]), number=number)
    assert started.wait(20) == [75] * size, started.log()
    stopped = furthest(folder)
    assert f"stopped as asked at step {stopped}" in started.log()
    return stopped


PHASES = ("step", "save", "evaluation")


def test_one_rank_or_all_may_be_asked_in_any_phase(
    nursery: Nursery, left_alone: Path, tmp_path: Path
) -> None:
    """Without a launcher of ours, as under srun; in the end, the numbers of a run left alone."""
    steps = [0]
    for index, phase in enumerate(PHASES):
        for who in ("one", "all"):
            number = (signal.SIGTERM, signal.SIGUSR1)[index % 2]
            steps.append(
                interrupted(nursery, tmp_path, phase, who, number, size=1 + len(steps) % 3)
            )
            if phase == "evaluation":
                assert steps[-1] % 20 == 0, "acted on right after the evaluation"
    assert steps == sorted(set(steps))
    assert nursery.start("marathon", 2, tmp_path).wait() == [0, 0]
    check_finished(tmp_path, left_alone)


@pytest.mark.parametrize("idle", ["before", "after"])
def test_ranks_that_do_not_listen_yet_end_at_once_by_the_signal(
    nursery: Nursery, tmp_path: Path, idle: str
) -> None:
    started = nursery.start("marathon", 2, tmp_path, idle=idle)
    wait_for(lambda: all((tmp_path / f"idle-{rank}").exists() for rank in (0, 1)), started)
    sent = time.monotonic()
    started.kill(0, 1, number=signal.SIGTERM)
    assert started.wait(10) == [-signal.SIGTERM] * 2
    assert time.monotonic() - sent < 5


def test_ranks_that_wait_for_one_that_was_ended_at_its_start_say_so(
    nursery: Nursery, tmp_path: Path
) -> None:
    started = nursery.start("marathon", 2, tmp_path, timeout=2)
    started.kill(1, number=signal.SIGTERM)  # forked a moment ago
    codes = started.wait(20)
    assert codes == [1, -signal.SIGTERM]
    assert "rank 1" in started.log()


def test_a_signal_and_its_echo_are_one_request_and_a_later_one_ends_the_run(
    nursery: Nursery, tmp_path: Path
) -> None:
    def asked_twice(later: float) -> list[int]:
        started = nursery.start("marathon", 1, tmp_path, pause=2.0)
        step = furthest(tmp_path) + 1
        wait_for(lambda: reached(tmp_path, "evaluation", step, str(started.run)), started)
        started.kill(0, number=signal.SIGTERM)
        time.sleep(later)
        started.kill(0, number=signal.SIGTERM)
        return started.wait(20)

    assert asked_twice(later=0.2) == [75]
    assert asked_twice(later=1.3) == [-signal.SIGTERM]


def program(folder: Path, *lines: str) -> str:
    """A script that trains on the digits, with these lines before."""
    text = "import os, signal, sys, time\nfrom pathlib import Path\n"
    text += f"sys.path.insert(0, {TESTS!r})\nfrom faults import marathon, Witness\n"
    script = folder / "train.py"
    script.write_text(text + "\n".join(lines) + "\n")
    return str(script)


def test_torchrun_passes_the_request_on_but_not_the_code(tmp_path: Path) -> None:
    script = program(tmp_path, f"marathon(Path({str(tmp_path)!r}), slow=0.01)")
    words = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(free_port()), script]
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=environment({"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: reached(tmp_path, "step", 5, "0"))
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=40)
    finally:
        run.kill()
    assert run.returncode == 1
    assert f"stopped as asked at step {furthest(tmp_path)}" in errors


def test_a_launched_run_that_is_still_starting_ends_at_once(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    script = program(tmp_path, f"marathon(Path({str(tmp_path)!r}), idle='after')")
    run = start("-n", "2", "--restarts", "2", script)
    wait_for(lambda: (tmp_path / "idle-0").exists() and (tmp_path / "idle-1").exists())
    sent = run.signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    assert time.monotonic() - sent < 4
    assert run.orphans(patience=5.0) == []
    assert "ended by SIGTERM" in run.errors()


def test_sigusr1_to_one_launched_rank_stops_the_run(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    script = program(tmp_path, f"marathon(Path({str(tmp_path)!r}), pause=0.3)")
    run = start("-n", "2", "--restarts", "2", script)
    wait_for(lambda: reached(tmp_path, "evaluation", 1, "0"))
    run.tree()[1].send_signal(signal.SIGUSR1)
    assert run.end() == 75
    assert "the run has stopped as asked, and saved" in run.errors()
    assert furthest(tmp_path) % 20 == 0


LAST = """
from torch.distributed import TCPStore
class Ask(Witness):
    def on_run_end(self, trainer):
        if trainer.world.rank == 0:
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            os.kill(os.getppid(), signal.SIGTERM)
            store.wait(["evenly/stop"])
import faults
faults.Witness = Ask
"""


def test_a_request_after_the_last_step_of_a_launched_run_is_not_lost(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    script = program(tmp_path, LAST, f"marathon(Path({str(tmp_path)!r}), steps=3)")
    run = start("-n", "1", script)
    assert run.end() == 75, run.errors()
    assert furthest(tmp_path) == 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(share(20)))
def test_a_launched_run_may_be_asked_at_any_moment(
    start: Callable[..., Launched], left_alone: Path, tmp_path: Path, seed: int
) -> None:
    """It ends with 75 and goes on, or (nobody listened yet) with the signal's code; at last the
    numbers are those of a run left alone.
    """
    script = program(tmp_path, f"marathon(Path({str(tmp_path)!r}), slow=0.005, pause=0.2)")
    for attempt in range(4):
        run = start("-n", str(1 + (seed + attempt) % 4), script, env={"RUN": f"asked{attempt}"})
        time.sleep(1.0 + (seed * 37 + attempt * 91) % 100 / 12)
        number = (signal.SIGTERM, signal.SIGUSR1)[attempt % 2]
        if run.alive():
            run.signal(number)
        assert run.end() in (0, 75, 128 + number), run.errors()
        assert run.orphans(patience=5.0) == []
    run = start("-n", "2", script, env={"RUN": "last"})
    assert run.end() == 0, run.errors()
    check_finished(tmp_path, left_alone)
