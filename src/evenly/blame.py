"""Whose failure an error is: the rank's own, or the echo of another rank's.

When one rank fails, the others fail too, by lost connections and by what the error board tells
them. The launcher and a crew show the user the first kind and count the second.
"""

import sys
import traceback
from typing import Literal

from evenly.errors import LostError, RankFailedError

Blame = Literal["own", "other", "lost"]

# What gloo, nccl and the store say when a peer is gone; most of it comes as plain RuntimeError.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "pair closure",
    "timed out waiting",
    "connectfullmesh failed",
    "remote process exited",
    "communicator was aborted",
    "failed to recv, got 0 bytes",
)


def blame(error: BaseException | None, rank: int | None = None) -> Blame:
    """Whose failure this is. An error raised while handling another's counts as that one's."""
    for _ in range(100):  # a chain may be a ring
        if error is None:
            break
        if isinstance(error, RankFailedError):
            return "other"
        if rank is not None and getattr(error, "evenly_rank", rank) != rank:
            return "other"
        if lost_contact(error):
            return "lost"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "own"


def lost_contact(error: BaseException) -> bool:
    """Whether an error means that another rank, or the store, is gone."""
    distributed = sys.modules.get("torch.distributed")
    if isinstance(error, LostError):
        return True
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and any(text in _text(error) for text in _LOST)


def raised_by_torch(error: BaseException) -> bool:
    """Whether torch raised it: a program's own "timed out" is nobody else's failure."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def summary_of(error: BaseException) -> str:
    """The error in one line, as Python's own last traceback line, cut to a readable length."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return traceback.format_exception_only(error)[0].strip()[:2000]


def _text(error: BaseException) -> str:
    """The error's type and message in lower case, also where making the message raises."""
    return "".join(traceback.format_exception_only(error)).lower()
