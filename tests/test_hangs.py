"""Hangs planted by (phase, rank, step) in real runs: named correctly, in time, and ended."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from evenly.watchdog.table import read_ranks
from test_launcher import EVENLY_RUN, environment

PROGRAM = str(Path(__file__).with_name("hanging.py"))
LATE = 5.0  # what the bar allows beyond the time that was set


class Line(NamedTuple):
    at: float
    text: str


class Run:
    """Processes whose lines are kept with the time at which they came."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path):
        self.lines: list[Line] = []
        self.processes = [
            subprocess.Popen(
                words,
                cwd=folder,
                env=environment(env),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for words, env in commands
        ]
        self._readers = [threading.Thread(target=self._read, args=(p,)) for p in self.processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append(Line(time.monotonic(), line.rstrip("\n")))

    def wait(self, timeout: float = 150) -> list[int]:
        codes = [process.wait(timeout) for process in self.processes]
        for reader in self._readers:
            reader.join(10)
        return codes

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(10)

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def delay(self, planted: str, report: str) -> float:
        """Seconds from the hang to the first line about it."""
        begin = next((n for n, line in enumerate(self.lines) if planted in line.text), None)
        assert begin is not None, f"{planted!r} never came:\n{self.text}"
        for line in self.lines[begin:]:
            if re.search(report, line.text):
                return line.at - self.lines[begin].at
        raise AssertionError(f"no line like {report!r} after {planted!r}:\n{self.text}")

    def stack_after(self, report: str) -> str:
        text = self.text
        match = re.search(report, text)
        assert match is not None, text
        return text[match.start() :].partition("\nevenly: the run goes on")[0]


@contextlib.contextmanager
def running(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path
) -> Iterator[Run]:
    run = Run(commands, folder)
    try:
        yield run
    finally:
        run.end()


def launched(folder: Path, *words: str) -> contextlib.AbstractContextManager[Run]:
    return running([([*EVENLY_RUN, *words], {})], folder)


# (phase, rank, step): what is said of it, and a function in its stack.
PLACES = {
    ("data", 1, 5): (r"waiting for data, at step 1 of epoch 1\.", "__getitem__"),
    ("step", 0, 6): (r"in the step, at step 2 of epoch 1\.", "in loss"),
    ("callback", 1, 6): (
        r"in a callback \(on_step_end of Hang\), at step 2 of epoch 1\.",
        "on_step_end",
    ),
    ("evaluation", 0, 8): (r"in evaluation \(validation\), after 8 steps", "in evaluate"),
    ("evaluation-data", 1, 8): (r"waiting for data of evaluation, after 8 steps", "evaluate"),
    ("saving", 0, 8): (r"saving a checkpoint, after 8 steps\.", "state_dict"),
    ("prediction", 1, 12): (r"in prediction, after 12 steps\.", "in predict"),
    ("program", 0, 0): (r"in the program's own code\.", "hanging.py"),
    ("start-up", 1, 0): (r"", "hanging.py"),
}


def check_named(run: Run, phase: str, rank: int, step: int, limit: float) -> None:
    place, function = PLACES[phase, rank, step]
    report = rf"evenly: rank {rank} has not (moved for|opened the world) .*{place}"
    assert run.delay(f"planted {phase} {rank} {step}", report) <= limit
    assert function in run.stack_after(report)


def test_hangs_in_each_phase_are_named_and_the_last_one_ends_the_run(tmp_path: Path) -> None:
    planted = [("data", 1, 5), ("step", 0, 6), ("callback", 1, 6), ("saving", 0, 8)]
    words = [f"{phase}:{rank}:{step}:sleep:3.5" for phase, rank, step in planted]
    options = ("-n", "2", "--hang-report", "1.5", "--hang-timeout", "6")
    with launched(tmp_path, *options, PROGRAM, *words, "step:1:10:lock:0") as run:
        assert run.wait() == [124]
        for phase, rank, step in planted:
            check_named(run, phase, rank, step, 1.5 + LATE)
            run.delay(f"planted {phase} {rank} {step}", rf"evenly: rank {rank} moved on\.")
        # One that holds Python's lock: silent, its phase and step known all the same.
        silent = (
            r"evenly: rank 1 has given no sign of life for .*: in the step, at step 2 of epoch 2 "
            r"\(its process computes and holds Python's lock\)\. Rank 0 waits for it in the "
            r"exchange of gradients of step 2 of epoch 2\."
        )
        assert run.delay("planted step 1 10", silent) <= 1.5 + LATE
        assert "in match" in run.stack_after(silent)
        end = (
            r"^evenly: rank 1 was stuck for \d+ s, in the step, at step 2 of epoch 2 "
            r"\(exit code 124\); rank 0 was stopped\.$"
        )
        assert run.delay("planted step 1 10", end) <= 6 + LATE
    table = read_ranks(tmp_path / "run")
    assert [row["state"] for row in table["ranks"]] == ["moves", "silent"]
    assert "in match" in table["ranks"][1]["stack"]
    assert table["ranks"][0]["waits_for"] == [1]
    assert table["ranks"][0]["memory"] > 0


@pytest.mark.soak
def test_a_stopped_rank_0_is_named_the_run_ended_restarted_and_finished(tmp_path: Path) -> None:
    options = ("-n", "2", "--hang-report", "1.5", "--hang-timeout", "3", "--restarts", "1")
    words = ("callback:0:6:stop:0", "/", "start-up:1:0:sleep:8")
    with launched(tmp_path, *options, PROGRAM, *words) as run:
        assert run.wait() == [0]
        stopped = (
            r"rank 0 has given no sign of life for .*: in a callback, at step 2 of epoch 1 "
            r"\(its process is stopped, as by SIGSTOP"
        )
        assert run.delay("planted callback 0 6", stopped) <= 1.5 + LATE
        assert run.delay("planted callback 0 6", r"restarting \(1 of 1\)") <= 3 + 2 + LATE
        # Before the world is open a rank is named, and nobody is ended.
        check_named(run, "start-up", 1, 0, 8)
        assert run.text.count("finished") == 2


def plain(
    folder: Path, *words: str, report: str, timeout: str
) -> contextlib.AbstractContextManager[Run]:
    """Two processes that nobody launched: rank 0 serves the store, and they watch each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EVENLY_HANG_REPORT": report,
        "EVENLY_HANG_TIMEOUT": timeout,
    }
    command = [sys.executable, PROGRAM, *words]
    return running([(command, {**common, "RANK": str(rank)}) for rank in range(2)], folder)


def test_without_a_launcher_a_stuck_rank_is_named_and_the_run_ended(tmp_path: Path) -> None:
    with plain(tmp_path, "callback:1:6:loop:60", report="1.5", timeout="4") as run:
        assert run.wait() == [124, 124]
        report = r"rank 1 has not moved for .*in a callback \(on_step_end of Hang\), at step 2 of"
        assert run.delay("planted callback 1 6", report) <= 1.5 + LATE
        assert "on_step_end" in run.stack_after(report)
        assert run.text.count("rank 1 was stuck for") == 1


@pytest.mark.soak
def test_without_a_launcher_a_stopped_rank_0_which_serves_the_store_is_named(
    tmp_path: Path,
) -> None:
    with plain(tmp_path, "callback:0:6:stop:0", report="1.5", timeout="4") as run:
        assert run.processes[1].wait(100) == 124
        report = r"evenly: rank 0, which serves the store, has not answered for"
        assert run.delay("planted callback 0 6", report) <= 1.5 + LATE


@pytest.mark.soak
def test_two_machines_both_name_the_stuck_rank_and_both_end(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--rendezvous", f"127.0.0.1:{port}", "--address", "127.0.0.1", "--job", "hangs")
    options = ("-n", "1", "--nodes", "2", *where, "--hang-report", "3", "--hang-timeout", "7")
    command = [*EVENLY_RUN, *options, PROGRAM, "callback:1:6:sleep:600"]
    with running([(command, {}), (command, {})], tmp_path) as run:
        assert run.wait() == [124, 124]
        assert run.text.count("evenly: rank 1 has not moved for") == 2
        assert run.text.count("in on_step_end") == 2
        assert run.text.count("evenly: rank 1 was stuck for") == 2


@pytest.mark.soak
@pytest.mark.parametrize("how", ["sleep", "loop", "stop", "lock"])
@pytest.mark.parametrize(("phase", "rank", "step"), list(PLACES))
def test_every_phase_and_kind_of_hang_is_named_in_time(
    phase: str, rank: int, step: int, how: str, tmp_path: Path
) -> None:
    """The bar: named within the time that was set and 5 seconds, and ended (after a first step)."""
    limit = 3.0
    begun = phase not in ("start-up", "program")
    options = ("-n", "2", "--hang-report", str(limit), "--hang-timeout", "6")
    with launched(tmp_path, *options, PROGRAM, f"{phase}:{rank}:{step}:{how}:3600") as run:
        place = PLACES[phase, rank, step][0].replace(r" \(validation\)", "( .*)?")
        place = place.replace(r" \(on_step_end of Hang\)", "( .*)?").removesuffix(r"\.")
        report = rf"evenly: rank {rank} has (not moved for|not opened|given no sign) .*{place}"
        deadline = time.monotonic() + 120
        while not re.search(report, run.text.partition(f"planted {phase}")[2]):
            assert time.monotonic() < deadline, run.text
            time.sleep(0.05)
        delay = run.delay(f"planted {phase} {rank} {step}", report)
        print(f"{phase:16} {how:6} rank {rank} named after {delay:.1f} s of {limit:g} + {LATE:g}")
        assert delay <= limit + LATE
        if begun:
            assert run.wait() == [124]
            assert re.search(rf"evenly: rank {rank} was stuck for .*exit code 124", run.text)
