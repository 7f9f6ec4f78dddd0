"""The Python stack of a process, written by the process itself on a signal.

faulthandler does so without Python's lock, so that a process stuck in compiled code shows its
stack as well. The signal is SIGURG, which processes that did not prepare for it ignore; those that
are forked from a prepared one (data-loading workers) are prepared, too. No torch here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

_SIGNAL = getattr(signal, "SIGURG", None)
_THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
# Threads of ours that are there in every rank and tell nothing.
_OURS = ("evenly/watchdog/", "evenly/board.py", "evenly/stopping.py")
# Frames of every program.
_FRAMES = ("<frozen importlib", "evenly/worker.py")


def prepare(path: str) -> None:
    """Let this process append its stack to a file whenever it gets the signal."""
    if _SIGNAL is None or not hasattr(faulthandler, "register"):
        return
    with contextlib.suppress(OSError):
        # Stays open as long as the process lives.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.set_inheritable(number, False)
        faulthandler.register(_SIGNAL, file=number, all_threads=True, chain=False)


def ask(pid: int, path: Path, *, wait: float = 2.0) -> str:
    """The stack of another process that was prepared with this path, and those of the processes
    that it started; "" if none came.
    """
    if _SIGNAL is None:
        return ""
    before = _size(path)
    own = _told(path, before, pid, wait)
    workers = []
    for child in _children(pid):
        begin = _size(path)
        text = _told(path, begin, child, wait / 8)
        if text:
            workers.append(f"Its process {child}:\n{tidy(text)}")
    return "\n".join([tidy(own), *workers] if own else workers)


def mine() -> str:
    """The stack of this process, from one of its threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return tidy(file.read().decode(errors="replace"))


def tidy(text: str) -> str:
    """Without the threads and frames that are ours, or Python's, in every process."""
    starts = [match.start() for match in _THREAD.finditer(text)]
    blocks = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    kept = [block for block in blocks if not _is_ours(block)] or blocks
    if len(kept) == 1:
        kept = [kept[0].partition("\n")[2]]  # without the thread's number
    lines = "".join(kept).splitlines() or text.splitlines()
    return "\n".join(line for line in lines if line and not any(name in line for name in _FRAMES))


def _is_ours(block: str) -> bool:
    begun_as_thread = block.rstrip().endswith("in _bootstrap")
    return begun_as_thread and any(name in block for name in _OURS)


def state_of(pid: int, *, silent: bool) -> str:
    """What the kernel says of a process that does not move, or is even ``silent``, in words."""
    state = _state(pid)
    return {
        "T": "its process is stopped, as by SIGSTOP or Ctrl-Z; SIGCONT lets it go on",
        "t": "its process is held by a debugger",
        "D": "its process waits for a disk or a network drive",
        "R": "its process computes and holds Python's lock" if silent else "",
        "Z": "its process is dead",
        "gone": "its process is gone",
    }.get(state, "")


def cannot_answer(pid: int) -> bool:
    """Whether a process is stopped or dead, so that it writes no stack."""
    return _state(pid) in ("T", "t", "Z", "gone")


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; "" where there is none."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"


def _told(path: Path, before: int, pid: int, wait: float) -> str:
    try:
        os.kill(pid, _SIGNAL or 0)
    except (ProcessLookupError, PermissionError):
        return ""
    deadline = time.monotonic() + wait
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = _size(path)
        if now > before and now == size:  # and no more has come since
            break
        size = now
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found[:4]
