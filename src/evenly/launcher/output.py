"""The lines of all ranks, whole and with their rank in front.

Each stream of each worker is a pipe; one thread reads them all and writes complete lines, so that
lines of different ranks never mix. Bytes pass through as they are.
"""

import os
import selectors
import sys
import threading
from dataclasses import dataclass, field
from typing import TextIO

# A "line" longer than this is written in pieces: a program that never ends its line must not
# make the launcher hold everything it prints.
_LONGEST = 1 << 20
_AT_ONCE = 1 << 16


@dataclass
class _Stream:
    reader: int
    prefix: bytes
    target: int
    partial: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> bytes:
        """The complete lines that ``data`` brings, prefixed; the rest waits for its end."""
        self.partial += data
        end = self.partial.rfind(b"\n") + 1
        lines = self.partial[:end].split(b"\n")[:-1]
        del self.partial[:end]
        text = b"".join(self.prefix + line + b"\n" for line in lines)
        return text + self.rest() if len(self.partial) > _LONGEST else text

    def rest(self) -> bytes:
        """The unfinished last line, finished."""
        line, self.partial = bytes(self.partial), bytearray()
        return self.prefix + line + b"\n" if line else b""


class Output:
    """The streams of the workers of one attempt at a time: ``path`` makes each of them, ``start``
    begins to read once the workers run, ``finish`` writes what is left when they have ended.
    """

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._writers: list[int] = []
        self._thread: threading.Thread | None = None
        self._wake = -1

    def path(self, rank: int, name: str, *, alone: bool) -> str:
        """A path that rank ``rank`` opens to write its stream ``name`` ("stdout" or "stderr"), or
        "" where it inherits the launcher's: when it is alone, and as rank 0 on a terminal, whose
        progress bars then work.
        """
        stream: TextIO = getattr(sys, name)
        if alone or (rank == 0 and stream.isatty()):
            return ""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._streams.append(_Stream(reader, f"[{rank}] ".encode(), _descriptor(stream, name)))
        self._writers.append(writer)
        return f"/dev/fd/{writer}"

    def start(self) -> None:
        """Read on, now that the workers hold the writing ends."""
        self._close_writers()
        if self._streams:
            woken, self._wake = os.pipe()
            self._thread = threading.Thread(
                target=_read_all, args=(self._streams, woken), name="evenly-output", daemon=True
            )
            self._thread.start()

    def finish(self, timeout: float | None = None) -> None:
        """Write everything that the ended workers left in the pipes, and close them.

        Waits until it is written, ``timeout`` seconds at most: whoever reads the launcher's
        output may have stopped reading.
        """
        self._close_writers()
        if self._thread is not None:
            os.close(self._wake)
            self._thread.join(timeout)
            self._thread = None
        else:
            for stream in self._streams:
                os.close(stream.reader)
        self._streams = []

    def _close_writers(self) -> None:
        for writer in self._writers:
            os.close(writer)
        self._writers = []


def _read_all(streams: list[_Stream], woken: int) -> None:
    """Pass lines on until ``woken`` is closed at its other end, then what is left."""
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.reader, selectors.EVENT_READ, stream)
        ended = False
        while not ended:
            for key, _ in selector.select():
                if key.data is None:
                    ended = True
                elif not _pass_on(key.data):
                    selector.unregister(key.fd)
                    os.close(key.fd)
        left = [key.data for key in selector.get_map().values() if key.data is not None]
    # The workers are gone, so all they wrote is in the pipes, which hold 1 MiB at most. Their end
    # is not waited for: a process that a worker left behind may write to one for ever.
    for stream in left:
        reads = 0
        while _pass_on(stream, waiting=False) and reads < (1 << 20) // _AT_ONCE:
            reads += 1
        os.close(stream.reader)
    os.close(woken)


def _pass_on(stream: _Stream, *, waiting: bool = True) -> bool:
    """Copy what is there; False if no more will come (or, if not ``waiting``, none is there)."""
    try:
        data = os.read(stream.reader, _AT_ONCE)
    except BlockingIOError:
        if waiting:
            return True
        data = b""
    try:
        _write(stream.target, stream.take(data) if data else stream.rest())
    except OSError:
        # Nobody reads the launcher's output any more (`| head`). Closing the pipe tells the
        # worker as it would tell a plain Python process.
        return False
    return bool(data)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def _descriptor(stream: TextIO, name: str) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # replaced by something that is no file, as notebooks do
        return 1 if name == "stdout" else 2
