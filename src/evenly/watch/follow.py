"""A record that grows, read from where the last look ended."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from evenly.errors import StorageError
from evenly.record.reading import FILE, Tail
from evenly.record.run import Run
from evenly.record.series import Series
from evenly.watch.thinning import Thinned

_AT_ONCE = 2**19
_FIRST = 200
"""Bytes by which one record is told from another: its first launch, with the time."""
_BUDGET = 0.1
"""Seconds of reading in one look; a long record takes several."""


class Follower:
    """The run in a folder, as far as it was read. ``run`` is None while there is no record.

    Memory grows by 16 bytes for each logged value; the work of a look, with what is new alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self.run: Run | None = None
        self.problem = ""
        """Why the record cannot be read, if so."""
        self.share = 1.0
        """Of the record that was read."""
        self._tail = Tail(self.file)
        self._first = b""
        self._starts = 0
        self._thin: dict[str, Thinned] = {}

    def look(self) -> bool:
        """Read on, for a tenth of a second or so; whether there was something."""
        try:
            with self.file.open("rb") as file:
                first, size = file.read(_FIRST), file.seek(0, 2)
        except OSError:
            known = self.run is not None or bool(self.problem)
            self._forget()
            return known
        if not first.startswith(self._first) or size < self._tail.offset:
            self._forget()
        self._first = first
        if self.problem:
            return False
        try:
            self._inside()
            return self._read(size)
        except StorageError as error:
            self.problem = str(error)
            return True

    @property
    def behind(self) -> bool:
        """Whether there is much to read still."""
        return self.share < 0.999 and not self.problem

    def thinned(self) -> Run | None:
        """The run with some of the points of each of its series."""
        if self.run is None:
            return None
        if len(self.run.starts) != self._starts:  # a restart takes points back
            self._starts, self._thin = len(self.run.starts), {}
        series = self.run.series
        found = {name: self._some(name, one) for name, one in series.items()}
        # The page divides these two, so they are shown at the same steps.
        wait, step = (series.get(name) for name in ("data_wait_seconds", "step_seconds"))
        if wait is not None and step is not None and len(wait) == len(step):
            found["step_seconds"] = _at(step, self._thin["data_wait_seconds"].places(wait))
        return replace(self.run, series=found)

    def _some(self, name: str, series: Series) -> Series:
        if name not in self._thin:
            self._thin[name] = Thinned()
        return _at(series, self._thin[name].places(series))

    def _read(self, size: int) -> bool:
        start, until = self._tail.offset, time.monotonic() + _BUDGET
        while True:
            before = self._tail.offset
            entries = self._tail.read(_AT_ONCE)
            if entries:
                if self.run is None:
                    self.run = Run(self.file)
                self.run.apply(entries)
            if self._tail.offset == before or time.monotonic() > until:
                break
        self.share = self._tail.offset / max(1, size)
        return self._tail.offset > start

    def _inside(self) -> None:
        if not self.file.resolve().is_relative_to(self.folder.resolve()):
            raise StorageError(f"{self.file} leads out of the run's folder, and is not read.")

    def _forget(self) -> None:
        self.run, self.problem, self.share = None, "", 1.0
        self._tail = Tail(self.file)
        self._first = b""
        self._starts = 0
        self._thin = {}


def _at(series: Series, places: list[int]) -> Series:
    found = Series()
    found.extend([series.steps[i] for i in places], [series.values[i] for i in places])
    return found
