"""A process of a crew: it waits for functions, runs them, and reports.

Started as ``python -m evenly.member CHANNEL STACKS PARENT``; not for users.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle

from evenly.blame import blame
from evenly.lifeline import die_with_parent


@dataclass(frozen=True)
class Task:
    """A function to run, and the world to run it in."""

    environ: dict[str, str]
    path: list[str]
    call: bytes


@dataclass(frozen=True)
class Report:
    """How a function ended on one rank."""

    rank: int
    kind: str = "own"
    time: float = 0.0
    value: bytes = b""
    error: BaseException | None = None


def send(channel: socket.socket, message: object) -> None:
    body = cloudpickle.dumps(message)
    channel.sendall(struct.pack("!Q", len(body)) + body)


def receive(channel: socket.socket) -> Any:
    (size,) = struct.unpack("!Q", _read(channel, 8))
    return pickle.loads(_read(channel, size))


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def perform(task: Task) -> Report:
    """Run one function in its world and leave nothing of it behind."""
    from evenly import world
    from evenly.turn import copy_of

    rank = int(task.environ["RANK"])
    before = dict(os.environ)
    os.environ.update(task.environ)
    sys.path[:] = task.path
    try:
        function, args, kwargs = cloudpickle.loads(task.call)
        return Report(rank=rank, value=cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as error:
        world.report(error)
        kind, copy = blame(error, rank), copy_of(error, rank)
        return Report(rank=rank, kind=kind, time=time.time(), error=copy)
    finally:
        world.close_all()
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    die_with_parent(int(sys.argv[3]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    stacks = open(sys.argv[2], "w")  # noqa: SIM115, PTH123 - faulthandler needs it for ever
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False)
    import torch.distributed  # noqa: F401 - loaded while the owner prepares the first function

    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            report = perform(receive(channel))
            sys.stdout.flush()
            sys.stderr.flush()
            send(channel, report)


if __name__ == "__main__":
    # Under its own name, so that a report is pickled as evenly.member.Report and not __main__'s.
    from evenly import member

    member.main()
