"""Opening, closing and failing together, with real processes."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import evenly
from evenly.errors import (
    DeviceError,
    LateError,
    LaunchError,
    LostError,
    NoWorldError,
    RankFailedError,
    SettingError,
)
from evenly.testing import run_ranks


def test_alone_the_world_has_no_group_no_store_and_no_thread() -> None:
    threads = threading.active_count()
    with evenly.open_world() as world:
        assert (world.rank, world.size, world.backend) == (0, 1, "none")
        assert world.group is None
        assert world.store is None
        assert not dist.is_initialized()
        assert threading.active_count() == threads


def test_nested_opens_return_the_same_world_and_close_once() -> None:
    with evenly.open_world() as outer:
        with evenly.open_world() as inner:
            assert inner is outer
        assert evenly.current_world() is outer
    with pytest.raises(NoWorldError, match=r"with evenly\.open_world"):
        evenly.current_world()


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="timeout=0"):
        evenly.open_world(timeout=0)


def open_close_open() -> dict[str, Any]:
    before = dict(os.environ)
    seen = []
    for _ in range(3):
        with evenly.open_world() as world:
            seen.append((world.rank, world.size, world.local_rank, world.backend))
            evenly.barrier()
    return {
        "seen": seen,
        "group": dist.is_initialized(),
        "threads": [t.name for t in threading.enumerate()],
        "environ": dict(os.environ) == before,
    }


def test_open_close_open_works_and_leaves_nothing_behind() -> None:
    for rank, found in enumerate(run_ranks(open_close_open, 3)):
        assert found["seen"] == [(rank, 3, rank, "gloo")] * 3
        assert not found["group"]
        assert found["threads"] == ["MainThread"]
        assert found["environ"]


REOPEN = """
import sys, torch, evenly
for _ in range(3):
    with evenly.open_world() as world:
        total = evenly.all_reduce(torch.tensor(world.rank)).item()
sys.stdout.write(f"sum {total}\\n")
"""


def test_open_close_open_works_under_plain_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "reopen.py"
    script.write_text(REOPEN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["sum 1", "sum 1"]


@pytest.mark.parametrize("family", ["slurm", "mpirun"])
def test_the_same_script_runs_as_slurm_and_mpirun_start_it(tmp_path: Path, family: str) -> None:
    """Rank 0 serves the store itself there, on a port that all ranks derive from the job."""
    script = tmp_path / "reopen.py"
    script.write_text(REOPEN)
    unique = f"{os.getpid()}{time.time_ns()}"

    def variables(rank: int) -> dict[str, str]:
        if family == "slurm":
            return {
                "SLURM_JOB_ID": unique,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NUM_TASKS": "2",
            }
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "PMIX_NAMESPACE": unique,
        }

    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **variables(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [p.communicate(timeout=90)[0] for p in processes] == ["sum 1\n", "sum 1\n"]
    assert [p.returncode for p in processes] == [0, 0]


def adopt() -> tuple[int, bool]:
    dist.init_process_group("gloo")
    try:
        with evenly.open_world():
            total = evenly.all_reduce(torch.ones(())).item()
        return int(total), dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_program_made_is_used_and_left_open() -> None:
    for _ in range(2):  # the second must not read what the first left in the store
        assert run_ranks(adopt, 2) == [(2, True)] * 2


def fail_on_rank_1(where: str) -> None:
    with evenly.open_world():
        if evenly.current_world().rank == 1:
            raise ValueError("the disk is full")
        if where == "collective":
            evenly.barrier()
        if where == "backward":
            model = nn_replica()
            model(torch.ones(1, 2)).sum().backward()


def nn_replica() -> torch.nn.Module:
    return evenly.replicate(torch.nn.Linear(2, 2))


def what_others_raise(where: str) -> tuple[str, int, float]:
    begin = time.monotonic()
    try:
        fail_on_rank_1(where)
    except RankFailedError as error:
        told = "the disk is full" in error.traceback
        return str(error) if told else "no traceback", error.rank, time.monotonic() - begin
    except ValueError as error:
        return str(error), -1, time.monotonic() - begin
    return "nothing", -1, time.monotonic() - begin


@pytest.mark.parametrize("where", ["collective", "backward"])
def test_when_one_rank_fails_the_others_raise_its_error(where: str) -> None:
    first, second, third = run_ranks(what_others_raise, 3, where)
    for text, rank, seconds in (first, third):
        assert text == "rank 1 failed: ValueError: the disk is full"
        assert rank == 1
        assert seconds < 25
    assert second[0] == "the disk is full"


def leave_early() -> str:
    try:
        with evenly.open_world() as world:
            if world.rank != 1:
                evenly.all_reduce(torch.ones(1))
    except (LostError, RankFailedError) as error:
        return str(error)
    return ""


def test_a_collective_that_some_ranks_skip_names_them() -> None:
    first, _, third = run_ranks(leave_early, 3)
    texts = first + third
    assert "rank 1 left the world while rank" in texts
    assert "inside an `if`" in texts


def own_timeout() -> str:
    try:
        with evenly.open_world() as world:
            if world.rank == 1:
                raise RuntimeError("download timed out")
            evenly.barrier()
    except (RuntimeError, RankFailedError) as error:
        return str(error)
    return ""


def test_a_programs_own_error_is_not_taken_for_a_lost_connection() -> None:
    first, second = run_ranks(own_timeout, 2)
    assert second == "download timed out"
    assert first == "rank 1 failed: RuntimeError: download timed out"


def caught_inside() -> str:
    with evenly.open_world() as world:
        try:
            with evenly.open_world():
                if world.rank == 1:
                    raise ValueError("caught")
        except ValueError:
            pass
        evenly.barrier()
        evenly.barrier()
    return "done"


def test_an_error_that_is_caught_inside_the_world_harms_nobody() -> None:
    assert run_ranks(caught_inside, 2) == ["done", "done"]


def fork_inside() -> int:
    with evenly.open_world() as world:
        if world.rank == 1:
            child = os.fork()
            if child == 0:
                try:
                    world.close()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        return int(evenly.all_reduce(torch.ones(())))


def test_a_forked_child_does_not_close_its_parents_world() -> None:
    assert run_ranks(fork_inside, 2) == [2, 2]


def open_and_leave() -> bool:
    for _ in range(20):
        with evenly.open_world(timeout=30):
            pass
    return True


def test_worlds_that_close_at_once_open_reliably() -> None:
    assert run_ranks(open_and_leave, 5, timeout=120) == [True] * 5


def late_rank() -> tuple[str, tuple[int, ...]]:
    with evenly.open_world() as world:
        # Opening may take long on a busy machine; only the wait below is to be short.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
        world.timeout = 2
        try:
            if world.rank == 1:
                time.sleep(6)
            else:
                evenly.barrier()
        except LateError as error:
            return str(error), error.ranks
    return "", ()


def test_a_wait_has_a_limit_and_names_the_late_rank() -> None:
    first, _, third = run_ranks(late_rank, 3)
    for text, ranks in (first, third):
        assert ranks == (1,)
        assert "rank 1 did not reach barrier within 2 s" in text


def missing_rank() -> str:
    if int(os.environ["RANK"]) == 1:
        return ""
    with pytest.raises(LateError) as caught:
        evenly.open_world(timeout=8)
    return str(caught.value)


def test_a_rank_that_never_opens_the_world_is_named() -> None:
    first, _, third = run_ranks(missing_rank, 3)
    assert "rank 1 of 3 did not open the world within 8 s" in first
    assert "rank 1 of 3" in third


def killed_rank() -> None:
    with evenly.open_world() as world:
        if world.rank == 1:
            os.kill(os.getpid(), 9)
        evenly.barrier()


def test_a_rank_that_is_killed_is_named_and_nobody_hangs() -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        run_ranks(killed_rank, 3)
    assert time.monotonic() - begin < 25


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="Use device='cpu'"):
        evenly.open_world(device="cuda")
