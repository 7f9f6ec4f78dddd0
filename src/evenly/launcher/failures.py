"""Which rank's failure came first, and the words for it."""

import json
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evenly.wording import ranks

if TYPE_CHECKING:
    from torch.distributed import Store

    from evenly.launcher.rendezvous import Meeting

Kind = Literal["own", "signal", "hang", "lost", "other"]

# In the attempt's store, where the machines of a run tell each other what failed.
_KEY = "evenly/failure"

_HINTS = {
    signal.SIGKILL: "often because the machine ran out of memory",
    signal.SIGSEGV: "a crash in compiled code; its stack is above",
    signal.SIGBUS: "often because shared memory ran out",
    signal.SIGABRT: "compiled code gave up; its message is above",
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended: by itself or by a signal, and what it wrote about it."""

    rank: int
    code: int
    """The exit code; below zero the signal that ended it."""
    kind: Kind
    """own: it raised or exited; signal: it was killed; lost: a connection broke under it;
    other: it was told that another rank failed; hang: it was stuck and had to be ended."""
    time: float
    traceback: str = ""
    what: str = ""
    """Of a hang: what was wrong."""
    elsewhere: bool = False
    """Whether it was on another machine."""

    @property
    def exit_code(self) -> int:
        """What a shell would report: 128 + s after signal s."""
        return self.code if self.code >= 0 else 128 - self.code


def read_ending(rank: int, code: int, error_file: Path, seen: float) -> Ending:
    """The ending of a rank that exited with ``code`` and was first ``seen`` dead at that time."""
    try:
        record = json.loads(error_file.read_text())
        ours = record["evenly"]
        return Ending(
            rank=rank,
            # A process that raised may still be killed on its way out; the error is the cause.
            code=int(ours["exit_code"]),
            kind=ours["kind"],
            time=float(ours["time"]),
            traceback=str(record["message"]["extraInfo"]["py_callstack"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Ending(rank=rank, code=code, kind="signal" if code < 0 else "own", time=seen)


def root_cause(endings: Iterable[Ending]) -> Ending:
    """The ending that explains the others: the earliest failure of a rank's own, else a death by
    a signal, else the earliest of those that only noticed.
    """
    order = {"own": 0, "hang": 0, "signal": 1, "lost": 2, "other": 3}
    return min(endings, key=lambda ending: (order[ending.kind], ending.time, ending.rank))


def is_cause(ending: Ending) -> bool:
    """Whether the rank failed by itself, not because another one did."""
    return ending.kind in ("own", "signal", "hang")


def publish(cause: Ending, meeting: "Meeting") -> None:
    """Tell the other machines what failed here, unless one of them was first."""
    with suppress(RuntimeError):
        meeting.connect().compare_set(_KEY, "", json.dumps(asdict(cause)))


def published(store: "Store") -> Ending | None:
    """What another machine told, if it did."""
    with suppress(RuntimeError):
        if store.check([_KEY]):
            return Ending(**json.loads(store.get(_KEY)) | {"elsewhere": True})
    return None


def describe(cause: Ending, *, stopped: Sequence[int], finished: Sequence[int]) -> str:
    """What happened, in one line without its end: the cause, then what became of the others."""
    parts = [f"rank {cause.rank} {_what(cause)}{' on another machine' * cause.elsewhere}"]
    if finished:
        parts.append(f"{ranks(finished)} had finished")
    if stopped:
        parts.append(f"{ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
    return "; ".join(parts)


def _what(cause: Ending) -> str:
    if cause.kind == "hang":
        return f"{cause.what} (exit code {cause.code})"
    if cause.code < 0:
        try:
            number = signal.Signals(-cause.code)
        except ValueError:  # a real-time signal has no name
            return f"was killed by signal {-cause.code}"
        hint = _HINTS.get(number)
        return f"was killed by {number.name}" + (f" ({hint})" if hint else "")
    code = f"(exit code {cause.code})"
    if cause.kind == "lost":
        return f"lost contact with another rank {code}"
    if cause.kind == "other":
        return f"ended because another rank failed {code}"
    return f"failed {code}"
