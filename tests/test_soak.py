"""Long repetitions of what must never fail: `make soak`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evenly
from evenly.testing import run_ranks

pytestmark = pytest.mark.soak


def open_many() -> int:
    total = 0
    for _ in range(100):
        with evenly.open_world() as world:
            total += int(evenly.all_reduce(torch.tensor(world.rank)))
    return total


def test_a_hundred_worlds_one_after_the_other() -> None:
    assert run_ranks(open_many, 4, timeout=300) == [600] * 4


RESTARTED = """
import os, sys, torch, evenly
with evenly.open_world() as world:
    total = evenly.all_reduce(torch.ones(())).item()
    if world.rank == 0:
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], total, flush=True)
    if world.rank == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 50:
        os.kill(os.getpid(), 9)
    evenly.barrier()
"""


def test_fifty_of_fifty_restarts_recover(tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "evenly", "run", "-n", "3", "--restarts", "50", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"[0] attempt {i} 3.0" for i in range(51)]


LEFT_OPEN = """
import torch, evenly
evenly.open_world()
evenly.replicate(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
"""


def test_none_of_a_hundred_programs_that_leave_the_world_open_aborts(tmp_path: Path) -> None:
    script = tmp_path / "left_open.py"
    script.write_text(LEFT_OPEN)
    for _ in range(100):
        command = [sys.executable, "-m", "evenly", "run", "-n", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
