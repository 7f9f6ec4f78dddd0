"""A process that ends with the one that started it."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it (Linux only).

    ``parent`` is the process that is expected to be the parent: if that one has ended before the
    kernel knew, this process ends now. Strictly it is the parent's *thread* that started this
    process whose end counts, so start processes from a thread that lives as long as they do.
    """
    if not sys.platform.startswith("linux"):
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
