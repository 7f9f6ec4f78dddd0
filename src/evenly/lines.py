"""The lines between ranks: which sockets a process group opened, and how to cut them.

gloo cannot abort: a rank that waits goes on waiting until the one it waits for closes its
connection, and that may be a healthy rank which itself waits. A rank that leaves because of a
failure therefore cuts its lines; those who wait for it leave, too, and so on. Destroying the group
does not do it while a traceback holds on to the group. A rank does not cut them while it waits
itself: gloo then misses, now and then, that the wait is over. Linux only; elsewhere nothing is cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from types import TracebackType

_OPEN = Path("/proc/self/fd")


class Lines:
    """While entered, takes note of the sockets that are opened."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._own: dict[int, int] = {}

    def __enter__(self) -> Lines:
        self._before = _sockets()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._own = {
            number: node for number, node in _sockets().items() if self._before.get(number) != node
        }

    def cut(self) -> None:
        """End the connections, here and for those at the other end."""
        here = _sockets()
        for number, node in self._own.items():
            if here.get(number) != node:  # closed since, and perhaps opened as something else
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
                # gloo aborts the process where the one that it listens on ends.
                if not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    line.shutdown(socket.SHUT_RDWR)
        self._own = {}


def _sockets() -> dict[int, int]:
    """The open sockets of this process: number and inode, which is never used twice."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_OPEN):  # noqa: PTH208 - the entries are numbers, not paths
            with contextlib.suppress(OSError, ValueError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found
