"""A crew of processes that run functions: `evenly.launch` and the tests' warm ranks.

Plain subprocesses that wait for work on a socket. The function travels by cloudpickle, so
lambdas, closures and functions of a notebook work and no `if __name__` guard is needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as dist

from evenly.errors import LateError, LaunchError, RankFailedError, SettingError
from evenly.member import Report, Task, receive, send
from evenly.store import loopback_interface, serve
from evenly.variables import LOOPBACK

R = TypeVar("R")

# After one rank has failed, how long the others have to notice and say so.
_GRACE = 5.0


def launch(
    function: Callable[..., R], n: int, *args: Any, timeout: float | None = None, **kwargs: Any
) -> list[R]:
    """Run ``function(*args, **kwargs)`` on ``n`` processes; returns their results in rank order.

    Works from a script, a notebook or a test. The first failing rank's error is raised here with
    its traceback as a note. After ``timeout`` seconds (none by default) LateError names the ranks
    that have not finished and shows their stacks.
    """
    with Crew(n) as crew:
        return crew.run(function, *args, size=n, timeout=timeout, **kwargs)


class Crew:
    """``n`` processes that stay ready between functions; close it, or use it in a `with`."""

    def __init__(self, n: int, *, threads: int | None = None) -> None:
        if n < 1:
            raise SettingError(f"{n} processes cannot run anything; give 1 or more.")
        self._threads = threads or max(1, (os.cpu_count() or 1) // n)
        self._folder = tempfile.TemporaryDirectory(prefix="evenly-crew-")
        self._store: dist.TCPStore | None = None
        self._members: list[_Member] = []
        self.grow(n)

    @property
    def size(self) -> int:
        return len(self._members)

    def grow(self, n: int) -> None:
        """Have at least ``n`` processes."""
        self._members += [self._start(rank) for rank in range(self.size, n)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., R],
        *args: Any,
        size: int,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[R]:
        """Run a function on the first ``size`` processes. A crew that saw a failure starts the
        processes it had to stop anew.
        """
        if not 1 <= size <= self.size:
            raise SettingError(f"size={size}: this crew has {self.size} processes.")
        call = cloudpickle.dumps((function, args, kwargs))
        # New for every run: a program that makes a process group itself writes to it without a
        # prefix, and must not read what an earlier one left.
        self._store = serve()
        attempt = uuid.uuid4().hex
        reports: dict[int, Report] = {}
        try:
            for rank, member in enumerate(self._members[:size]):
                member.give(
                    Task(
                        environ=_environ(rank, size, attempt, self._store.port),
                        path=sys.path,
                        call=call,
                    )
                )
            self._collect(reports, size, timeout)
        except KeyboardInterrupt:
            for member in self._members[:size]:
                member.interrupt()
            with contextlib.suppress(LateError):  # their `finally` blocks run
                self._collect(reports, size, 2.0)
            raise
        finally:
            for member in self._members[:size]:
                member.show(last=True)  # printed before the report, so it is there
            self._renew(unfinished=[rank for rank in range(size) if rank not in reports])
        failed = [report for report in reports.values() if report.error is not None]
        if failed:
            raise _first(failed)
        return [cloudpickle.loads(reports[rank].value) for rank in range(size)]

    def close(self) -> None:
        """End the processes; nothing is left running."""
        for member in self._members:
            member.channel.close()  # all at once, so that they end side by side
        for member in self._members:
            member.end()
        self._folder.cleanup()

    def _collect(self, reports: dict[int, Report], size: int, timeout: float | None) -> None:
        """Wait for every rank's report, or for the limit, or for the grace after a failure."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, member in enumerate(self._members[:size]):
                if rank not in reports:
                    selector.register(member.channel, selectors.EVENT_READ, rank)
                selector.register(member.output, selectors.EVENT_READ)
            while len(reports) < size:
                # At least once a second, to see a process that died while a child of its own holds
                # its connections open.
                rest = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                events = selector.select(max(0.0, rest))
                dead = [r for r in range(size) if r not in reports and self._members[r].dead()]
                for rank in dead:
                    reports[rank] = self._members[rank].report()
                    selector.unregister(self._members[rank].channel)
                for key, _ in events:
                    if key.data in dead:
                        continue
                    if key.data is None:
                        if not next(m for m in self._members if m.output == key.fd).show():
                            selector.unregister(key.fileobj)
                    else:
                        reports[key.data] = self._members[key.data].report()
                        selector.unregister(key.fileobj)
                if deadline is not None and time.monotonic() >= deadline and len(reports) < size:
                    late = [rank for rank in range(size) if rank not in reports]
                    if any(report.error is not None for report in reports.values()):
                        return  # they had their grace; the failure is what the user must see
                    raise self._late(late, timeout or 0.0)
                if any(report.error is not None for report in reports.values()):
                    grace = time.monotonic() + _GRACE
                    deadline = grace if deadline is None else min(deadline, grace)

    def _late(self, ranks: list[int], timeout: float) -> LateError:
        stacks = "\n".join(f"rank {rank}:\n{self._members[rank].stack()}" for rank in ranks)
        names = ", ".join(map(str, ranks))
        return LateError(f"ranks {names} did not finish within {timeout:g} s.\n{stacks}", ranks)

    def _renew(self, unfinished: list[int]) -> None:
        for rank, member in enumerate(self._members):
            if rank in unfinished or member.process.poll() is not None:
                member.end(at_once=True)
                self._members[rank] = self._start(rank)

    def _start(self, rank: int) -> _Member:
        return _Member(rank, Path(self._folder.name), self._threads)


class _Member:
    """One process of a crew, seen from its owner."""

    def __init__(self, rank: int, folder: Path, threads: int) -> None:
        self.rank = rank
        self.channel, theirs = socket.socketpair()
        self._stacks = folder / f"{uuid.uuid4().hex}.stack"
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        loopback = loopback_interface()
        if loopback is not None:
            environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "evenly.member",
                    str(theirs.fileno()),
                    str(self._stacks),
                    str(os.getpid()),
                ],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._line = b""

    def give(self, task: Task) -> None:
        try:
            send(self.channel, task)
        except OSError as error:
            raise LaunchError(
                f"a process of the crew ended early (exit code {self.process.poll()})."
            ) from error

    def show(self, *, last: bool = False) -> bool:
        """Print what the process has printed, line by line; False when no more will come. The
        ``last`` time a line without an end is printed too.
        """
        text, more = b"", True
        with contextlib.suppress(BlockingIOError):
            text = os.read(self.output, 1 << 16)
            more = bool(text)
        *lines, self._line = (self._line + text).split(b"\n")
        if self._line and (last or not more):
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            sys.stdout.write(f"[{self.rank}] {line.decode(errors='replace')}\n")
        return more

    def dead(self) -> bool:
        """Whether the process ended without a report."""
        if self.process.poll() is None:
            return False
        readable, _, _ = select.select([self.channel], [], [], 0)
        return not readable or not self.channel.recv(1, socket.MSG_PEEK)

    def report(self) -> Report:
        """What this rank has to say; a death without a word becomes a report too."""
        rank = self.rank
        try:
            if not self.dead():
                report: Report = receive(self.channel)
                return report
            code = self.process.wait(timeout=10)
        except (EOFError, ConnectionError):
            code = self.process.wait(timeout=10)
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        error = LaunchError(f"rank {rank} {how} before it finished.")
        return Report(rank=rank, kind="died", time=time.time(), error=error)

    def interrupt(self) -> None:
        """What Ctrl-C does to a plain program; the terminal sends it to the owner alone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def stack(self) -> str:
        """Where the process is now: faulthandler writes it, without needing the GIL."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR2)
        for _ in range(20):
            time.sleep(0.05)
            if self._stacks.exists() and self._stacks.stat().st_size:
                time.sleep(0.05)
                return self._stacks.read_text()
        return "  (no stack: the process did not answer)\n"

    def end(self, *, at_once: bool = False) -> None:
        self.channel.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=3)
        # The group, so that a member's own children (data-loading workers) end too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _environ(rank: int, size: int, attempt: str, port: int) -> dict[str, str]:
    """What torchrun would set, so that the function meets the same world as a script."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "EVENLY_ATTEMPT": attempt,
    }


def _first(failed: list[Report]) -> BaseException:
    """The error that caused the others: its own rather than a consequence, and the earliest."""
    order = {"own": 0, "died": 1, "lost": 2, "other": 3}
    first = min(failed, key=lambda report: (order[report.kind], report.time))
    error = first.error or LaunchError(f"rank {first.rank} failed")
    if isinstance(error, RankFailedError):
        return LaunchError(f"{error}\n{error.traceback}")
    return error
