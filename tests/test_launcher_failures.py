"""`evenly run`: what the user reads when a rank fails, and the exit code."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import evenly.worker
from evenly.launcher.failures import Ending, describe, read_ending, root_cause
from test_launcher import environment, evenly_run, write


def test_the_failing_rank_has_the_only_traceback_and_it_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path / "bad.py",
        """
        import time
        import torch
        import torch.distributed as dist

        def train(rank):
            if rank == 1:
                raise ValueError("this rank has bad data")
            dist.all_reduce(torch.ones(1))

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1))
        try:
            train(rank)
        finally:
            if rank == 1:  # the others lose the connection before this rank can say why
                dist.destroy_process_group()
                time.sleep(0.7)
        """,
    )

    done = evenly_run("-n", "3", "bad.py", folder=tmp_path)

    trace, line = done.stderr.split("ValueError: this rank has bad data\n")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.count("Traceback") == 1
    assert trace.count('bad.py", line') == 2  # the program's frames, and none of the launcher's
    assert trace.count("  File ") == 2
    assert line == "evenly: rank 1 failed (exit code 1); ranks 0, 2 were stopped.\n"
    assert done.returncode == 1


def test_the_exit_code_is_the_failing_ranks_and_finished_ranks_are_named(tmp_path: Path) -> None:
    write(
        tmp_path / "exits.py",
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(1)
            sys.exit(3)
        """,
    )

    done = evenly_run("-n", "2", "exits.py", folder=tmp_path)

    assert done.stderr == "evenly: rank 1 failed (exit code 3); rank 0 had finished.\n"
    assert done.returncode == 3


def test_a_killed_rank_is_named_and_its_helpers_end_too(tmp_path: Path) -> None:
    write(
        tmp_path / "killed.py",
        """
        import os, signal, subprocess, sys, time
        if os.environ["RANK"] == "0":
            helper = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
            print(subprocess.Popen([sys.executable, "-c", helper]).pid)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        """,
    )

    done = evenly_run("-n", "2", "killed.py", folder=tmp_path)

    assert done.stderr == (
        "evenly: rank 0 was killed by SIGKILL (often because the machine ran out of memory); "
        "rank 1 was stopped.\n"
    )
    assert done.returncode == 137
    helper = int(done.stdout.removeprefix("[0] "))
    assert not psutil.pid_exists(helper) or psutil.Process(helper).status() == "zombie"


def ending(rank: int, kind: str, time: float, code: int = 1) -> Ending:
    return Ending(rank=rank, code=code, kind=kind, time=time)  # type: ignore[arg-type]


def test_the_root_cause_is_a_ranks_own_failure_before_a_kill_before_a_lost_connection() -> None:
    lost, other = ending(0, "lost", 1.0), ending(1, "other", 0.5)
    killed = ending(2, "signal", 3.0, code=-signal.SIGKILL)
    late, early = ending(3, "own", 5.0), ending(4, "own", 4.0)
    assert root_cause([lost, other, killed, late, early]) is early
    assert root_cause([lost, other, killed]) is killed
    assert root_cause([lost, other]) is lost


def test_the_line_about_a_failure_reads_well_for_many_ranks() -> None:
    cause = ending(2, "own", 0.0)
    others = [0, 1, 3]
    assert describe(cause, stopped=others, finished=[]) == (
        "rank 2 failed (exit code 1); ranks 0, 1, 3 were stopped"
    )
    assert describe(cause, stopped=range(3, 64), finished=[1]) == (
        "rank 2 failed (exit code 1); rank 1 had finished; ranks 3 to 63 were stopped"
    )
    assert describe(cause, stopped=[], finished=[]) == "rank 2 failed (exit code 1)"


def test_an_error_file_cut_short_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text('{"message": {')
    assert read_ending(1, -11, file, 7.0) == Ending(rank=1, code=-11, kind="signal", time=7.0)
    assert read_ending(1, 5, tmp_path / "none", 7.0) == Ending(rank=1, code=5, kind="own", time=7.0)


def worker(
    folder: Path, program: str, error_file: str = "error.json"
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    """Run a program as a worker process does, without a launcher; with its error file."""
    write(folder / "program.py", program)
    done = subprocess.run(
        [sys.executable, evenly.worker.__file__, "script", "program.py"],
        cwd=folder,
        env=environment({"TORCHELASTIC_ERROR_FILE": error_file, "RANK": "2"}),
        capture_output=True,
        text=True,
        check=False,
    )
    file = folder / error_file
    return done, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("raise ValueError('x')", "own"),
        ("raise ConnectionResetError('a web server: connection reset by peer')", "own"),
        ("import evenly.errors as e; raise e.RankFailedError(1, 'ValueError: x')", "other"),
        ("import evenly.errors as e; raise e.LostError('rank 1 is gone')", "lost"),
        ("raise RuntimeError('[pair.cc:534] Connection closed by peer [127.0.0.1]')", "lost"),
        (
            """
            try:
                raise RuntimeError("Connection closed by peer")
            except RuntimeError:
                raise SystemExit(1)
            """,
            "lost",
        ),
    ],
)
def test_an_error_is_filed_under_whose_failure_it_is(
    tmp_path: Path, program: str, kind: str
) -> None:
    done, record = worker(tmp_path, program)
    assert done.returncode == 1
    assert done.stderr == ""
    assert record["evenly"]["kind"] == kind
    assert record["evenly"]["rank"] == 2


def test_exits_pass_through_as_in_plain_python(tmp_path: Path) -> None:
    done, record = worker(tmp_path, "import sys; sys.exit('no such data')")
    assert (done.returncode, done.stderr) == (1, "no such data\n")
    assert record["evenly"]["exit_code"] == 1
    done, record = worker(tmp_path / "fine", "import sys; sys.exit()")
    assert (done.returncode, done.stderr, record) == (0, "", {})
    done, record = worker(tmp_path / "stopped", "raise KeyboardInterrupt")
    assert (done.returncode, done.stderr, record) == (130, "", {})


def test_an_error_is_printed_if_it_cannot_be_filed(tmp_path: Path) -> None:
    done, _ = worker(tmp_path, "def f(:", error_file="no/such/folder.json")
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{tmp_path}/program.py", line 1\n')
    assert done.stderr.count("SyntaxError") == 1


def test_a_programs_own_hook_for_exceptions_is_called(tmp_path: Path) -> None:
    done, record = worker(
        tmp_path,
        """
        import sys
        before = sys.excepthook
        def hook(kind, error, trace):
            print("reported", error, trace.tb_frame.f_code.co_name)
            before(kind, error, trace)
        sys.excepthook = hook
        raise ValueError("x")
        """,
    )
    assert (done.stdout, done.stderr) == ("reported x <module>\n", "")
    assert record["evenly"]["kind"] == "own"


def test_a_rank_that_raises_while_its_threads_go_on_is_shown(tmp_path: Path) -> None:
    write(
        tmp_path / "threads.py",
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("read me")
        """,
    )
    done = evenly_run("-n", "1", "threads.py", folder=tmp_path)
    assert "ValueError: read me" in done.stderr
    assert done.returncode == 1


def test_an_option_after_the_program_and_one_that_does_not_exist_are_told(tmp_path: Path) -> None:
    write(tmp_path / "fine.py", "print('fine')")
    after = evenly_run("fine.py", "-n", "2", folder=tmp_path)
    assert "put it before" in after.stderr
    assert after.stdout == "fine\n"
    wrong = evenly_run("--thread", "2", "fine.py", folder=tmp_path)
    assert wrong.returncode == 2
    assert "--threads" in wrong.stderr
    folder = evenly_run(".", folder=tmp_path)
    assert folder.returncode == 2
    assert "no __main__.py" in folder.stderr
