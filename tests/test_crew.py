"""A function on several processes, from anywhere: its results, its errors, its limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import evenly
from evenly.crew import Crew
from evenly.errors import LateError, LaunchError, SettingError
from evenly.testing import run_ranks


def test_launch_runs_closures_and_lambdas_and_returns_each_ranks_value() -> None:
    base = 10

    def work(offset: int, *, scale: int) -> tuple[int, int]:
        with evenly.open_world() as world:
            print(f"this is rank {world.rank}")
            total = evenly.all_reduce(torch.tensor(world.rank)).item()
            return scale * (base + offset + world.rank), int(total)

    assert evenly.launch(work, 2, 5, scale=2) == [(30, 1), (32, 1)]


SCRIPT = """
import evenly, torch
twice = lambda x: 2 * x
print(evenly.launch(lambda: twice(evenly.open_world().rank), 2))
"""


def test_launch_needs_no_main_guard_and_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "notebook_like.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 2]\n"
    assert done.stderr == ""
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in str(p.info)]


def failing(kind: str) -> None:
    rank = int(os.environ["RANK"])
    with evenly.open_world():
        if rank == 1 and kind == "raise":
            raise KeyError("missing column")
        if rank == 1 and kind == "exit":
            os._exit(7)
        if rank == 1 and kind == "sys.exit":
            sys.exit(3)
        evenly.barrier()


def test_the_failing_ranks_own_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="missing column") as caught:
        run_ranks(failing, 3, "raise")
    notes = "".join(caught.value.__notes__)
    assert "raised on rank 1" in notes
    assert "in failing" in notes


@pytest.mark.parametrize(
    ("kind", "words"), [("exit", "rank 1 exited with code 7"), ("sys.exit", "SystemExit: 3")]
)
def test_a_rank_that_exits_is_an_error(kind: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        run_ranks(failing, 3, kind)


def printing_for_ever() -> None:
    while os.environ["RANK"] == "1":
        os.write(1, b"x\n" * 1000)


def test_a_time_limit_holds_for_a_rank_that_keeps_printing() -> None:
    run_ranks(os.getpid, 2)  # the limit is for the function, not for starting processes
    with pytest.raises(LateError, match="ranks 1 did not finish"):
        run_ranks(printing_for_ever, 2, timeout=1)


def dies_with_a_child() -> None:
    if os.environ["RANK"] == "1" and os.fork():
        os.kill(os.getpid(), 9)
    time.sleep(30)


def test_a_rank_that_dies_is_seen_although_its_child_lives() -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        run_ranks(dies_with_a_child, 2, timeout=25)
    assert time.monotonic() - begin < 15


def test_a_line_without_an_end_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda: print("no newline", end="", flush=True), 1)
    assert capsys.readouterr().out == "[0] no newline\n"


def sleeping_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return os.getpid()


def test_a_time_limit_names_the_late_ranks_and_shows_their_stacks() -> None:
    run_ranks(os.getpid, 3)
    begin = time.monotonic()
    with pytest.raises(LateError, match="ranks 1 did not finish within 1 s") as caught:
        run_ranks(sleeping_on_rank_1, 3, timeout=1)
    assert caught.value.ranks == (1,)
    assert "in sleeping_on_rank_1" in str(caught.value)
    assert time.monotonic() - begin < 5


def test_processes_are_kept_between_calls_and_replaced_after_a_failure() -> None:
    before = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 2) == before
    with pytest.raises(LaunchError):
        run_ranks(failing, 2, "exit")
    after = run_ranks(os.getpid, 2)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_variables_of_one_function_do_not_reach_the_next() -> None:
    run_ranks(lambda: os.environ.update(LEFT_BEHIND="1"), 2)
    assert run_ranks(lambda: os.environ.get("LEFT_BEHIND"), 2) == [None, None]


def test_closing_a_crew_ends_its_processes() -> None:
    with Crew(2) as crew:
        processes = [psutil.Process(pid) for pid in crew.run(os.getpid, size=2)]
    assert not any(process.is_running() for process in processes)


def test_a_crew_of_none_is_refused() -> None:
    with pytest.raises(SettingError, match="0 processes"):
        evenly.launch(print, 0)
    with pytest.raises(SettingError, match="this crew has 1"), Crew(1) as crew:
        crew.run(print, size=2)
