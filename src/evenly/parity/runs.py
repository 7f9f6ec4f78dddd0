"""The user's program at each process count, one after the other, with tracing on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import LaunchError, SettingError
from evenly.launcher import Settings
from evenly.parity.reading import Run
from evenly.tracing import FOLDER, STEPS

_TAIL = 40  # lines of a failed program that are shown
_END = 10.0  # seconds that the launcher has to end its processes


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run, on how many processes, and for how long. Checked when made."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    counts: tuple[int, ...] = (1, 2)
    steps: int = 20
    threads: int | None = None
    """Of each process, the same at all counts: the number of threads changes bits. Default: the
    user's OMP_NUM_THREADS, else cores // the largest count."""
    device: str | None = None
    timeout: float = 600.0
    """Seconds that each run may take."""

    def __post_init__(self) -> None:
        if len(self.counts) < 2 or min(self.counts) < 1:
            raise SettingError(
                f"-n {','.join(map(str, self.counts))}: give at least two process counts, the "
                "first of which the others are compared with, such as 1,2,3."
            )
        if self.steps < 1:
            raise SettingError(f"--steps {self.steps}: give 1 or more.")
        if not self.timeout > 0:
            raise SettingError(f"--timeout {self.timeout:g}: give a number of seconds above 0.")
        self.settings(self.counts[0])

    def settings(self, count: int) -> Settings:
        return Settings(
            target=self.target,
            arguments=self.arguments,
            module=self.module,
            processes=count,
            threads=self.threads,
            device=self.device,
        )


def run_all(
    program: Program, folder: Path, started: Callable[[int], None] = lambda count: None
) -> list[Run]:
    """Run the program at each count, and read what it wrote down.

    Raises LaunchError if it fails or takes too long, with the end of its output, or if it has no
    step to compare.
    """
    runs = []
    for number, count in enumerate(program.counts):
        started(count)
        trace = folder / f"run{number}"
        trace.mkdir()
        _run(program, count, trace)
        runs.append(Run(trace, count))
        runs[-1].check()
    return runs


def _run(program: Program, count: int, trace: Path) -> None:
    threads = program.settings(count).thread_count(max(program.counts))
    # Its own process: the launcher takes over the signals, and the program's output is not ours.
    command = [sys.executable, "-P", "-m", "evenly", "run", "-n", str(count)]
    command += ["--threads", threads]
    command += ["--device", program.device] if program.device else []
    command += ["-m"] if program.module else []
    command += ["--", program.target, *program.arguments]
    environ = {**os.environ, FOLDER: str(trace), STEPS: str(program.steps)}
    said = trace / "output.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = process.wait(timeout=program.timeout)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"on {_processes(count)} the program did not end within {program.timeout:g} s. A "
                "loop of your own runs to its end unless it stops by `if trace.done: break`; give "
                f"it less to do, or more time by --timeout.\n{_tail(said)}"
            ) from None
        finally:
            _end(process)
    if code:
        raise LaunchError(
            f"on {_processes(count)} the program failed (exit code {code}).\n{_tail(said)}"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and with it its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END)


def _tail(file: Path) -> str:
    lines: Sequence[str] = file.read_text(errors="replace").splitlines()
    dropped = [f"({len(lines) - _TAIL} lines before)"] if len(lines) > _TAIL else []
    return "\n".join([*dropped, *lines[-_TAIL:]])


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
