"""Lines into a record: queued by the run, written by a thread, at most a second late.

The file is opened for each writing, so that nothing stays open between, and a network file system
shows others what was written. A last half line, which a kill leaves, is cut before the next one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenly.errors import EvenlyWarning, StorageError
from evenly.record.reading import VERSION

_PAUSE = 0.5
"""Seconds between writings: half of what a kill may lose."""
_PATIENCE = 10.0
"""Seconds that a run waits for a file system that does not answer."""


class Writer:
    """Writes one record. Lines are `add`ed; ``more`` is asked for others before each writing.

    Between `start` and `stop` a thread writes twice a second, and keeps the file's time fresh;
    otherwise lines are written at once. A write that fails is told once and tried again: no run
    should end because of its record.
    """

    def __init__(self, path: Path, more: Callable[[], list[dict[str, Any]]] = list) -> None:
        self.path = path
        self._more = more
        self._queue: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._problem: OSError | None = None
        self._told = False

    def open(self, **launch: Any) -> None:
        """The first line of a launch. An error here is raised: better now than after hours."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise StorageError(
                f"the run record {self.path} cannot be written: {error}. See whether the folder "
                "may be written to, or leave out folder=."
            ) from error
        self.add("launch", version=VERSION, **launch)

    def add(self, kind: str, **fields: Any) -> None:
        """A line, with the time."""
        self._queue.append({"kind": kind, "time": round(time.time(), 3), **fields})
        if self._thread is None:
            self.flush()
        self._tell()

    def start(self) -> None:
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._work, name="evenly record", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write what is left, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            thread.join(_PATIENCE)
        self.flush()
        self._tell()

    def flush(self) -> None:
        """Write what there is now."""
        if not self._lock.acquire(timeout=_PATIENCE):
            self._problem = OSError(f"writing has taken longer than {_PATIENCE:g} seconds")
            return
        try:
            count = len(self._queue)
            lines = self._more() + self._queue[:count]
            del self._queue[:count]
            if not lines:
                return
            try:
                self._write("".join(map(_line, lines)).encode())
                self._problem = None
            except OSError as error:
                self._problem = error
                self._queue[:0] = lines
        finally:
            self._lock.release()

    def _tell(self) -> None:
        if self._problem is not None and not self._told:
            self._told = True
            warnings.warn(
                f"the run record {self.path} cannot be written: {self._problem}. It is tried "
                "again; if the run ends before that succeeds, the rest of its record is lost.",
                EvenlyWarning,
                stacklevel=3,
            )

    def _work(self) -> None:
        while not self._ending.wait(_PAUSE):
            self.flush()
            with contextlib.suppress(OSError):
                os.utime(self.path)  # says that the run lives

    def _write(self, data: bytes) -> None:
        with self.path.open("ab+", buffering=0) as file:
            size = _cut(file)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise


def _cut(file: Any) -> int:
    """Leave whole lines only; the size then."""
    size: int = file.seek(0, 2)
    place = size
    if size:
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return size
    while place > 0:
        start = max(0, place - 65536)
        file.seek(start)
        end = file.read(place - start).rfind(b"\n")
        if end >= 0:
            place = start + end + 1
            break
        place = start
    if place < size:
        file.truncate(place)
    return place


def _line(entry: dict[str, Any]) -> str:
    try:
        return json.dumps(entry, separators=(",", ":"), allow_nan=False, default=str) + "\n"
    except ValueError:
        return json.dumps(_finite(entry), separators=(",", ":"), default=str) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity; they are written as "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
