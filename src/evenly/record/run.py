"""One run, put together from the lines of its record, whatever the number of its launches."""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evenly.errors import StorageError
from evenly.record.reading import VERSION, Entry, Tail, record_of
from evenly.record.series import Series

State = Literal["running", "finished", "stopped", "failed", "killed", "empty"]

# The writer touches the file twice a second; a network file system may show that late.
_FRESH = 30.0

# So that a long record is not held in memory line by line.
_AT_ONCE = 2**18


@dataclass
class Run:
    """Everything a record says. `apply` takes more lines, as they come.

    Where a launch goes on from a checkpoint, what the one before did after that is forgotten here,
    as it is in the run itself; ``redone`` counts those steps.
    """

    path: Path
    launches: list[Entry] = field(default_factory=list)
    starts: list[Entry] = field(default_factory=list)
    """Of `fit`; each with "launch", the number of the launch."""
    ends: list[Entry] = field(default_factory=list)
    settings: Entry = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    evaluations: list[Entry] = field(default_factory=list)
    ranks: list[Entry] = field(default_factory=list)
    coverage: list[Entry] = field(default_factory=list)
    """Of epochs; each with "plan", the plan that it followed."""
    checkpoints: list[Entry] = field(default_factory=list)
    redone: int = 0
    damaged: int = 0
    """Lines that made no sense, and were passed over."""

    @property
    def name(self) -> str:
        return self.path.resolve().parent.name or str(self.path)

    @property
    def step(self) -> int:
        """The last one there is a number of."""
        known = [series.steps[-1] for series in self.series.values() if len(series)]
        return max([*known, *(start["step"] for start in self.starts[-1:])], default=0)

    @property
    def epochs(self) -> int:
        """Epochs finished."""
        return max((entry["epoch"] + 1 for entry in self.coverage), default=0)

    @property
    def processes(self) -> list[int]:
        """Of each launch, without repetitions: [4, 2] went on with two."""
        counts: list[int] = []
        for launch in self.launches:
            if not counts or counts[-1] != launch.get("processes"):
                counts.append(launch.get("processes", 1))
        return counts

    @property
    def seconds(self) -> float:
        """How long its launches took, without the time between them."""
        return float(sum(launch["last"] - launch["time"] for launch in self.launches))

    @property
    def state(self) -> State:
        if not self.starts:
            return "empty"
        last = self.starts[-1]
        if self.ends and self.ends[-1]["order"] > last["order"]:
            found: State = self.ends[-1]["state"]
            return found
        return "running" if self._lives() else "killed"

    def _lives(self) -> bool:
        launch = self.launches[-1]
        if launch.get("host") == socket.gethostname() and not _exists(launch.get("pid")):
            return False
        return time.time() - self.path.stat().st_mtime < _FRESH

    def apply(self, entries: Iterable[Entry]) -> None:
        """Take these lines, the next ones of the record."""
        for entry in entries:
            if not self.launches and entry["kind"] != "launch":
                continue  # there is no telling what it would mean
            take = _TAKES.get(entry["kind"])
            try:
                if take is not None:
                    take(self, entry)
                self.launches[-1]["last"] = float(entry["time"])
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
                self.damaged += 1

    def _launch(self, entry: Entry) -> None:
        if entry.get("version") != VERSION:
            raise StorageError(
                f"{self.path} has version {entry.get('version')!r} of its format and this Evenly "
                f"reads {VERSION}. Read it with the version that wrote it."
            )
        self.launches.append({**entry, "last": entry["time"]})

    def _start(self, entry: Entry) -> None:
        step, epoch = entry["step"], entry["epoch"]
        self.redone += max(0, self.step - step) if self.starts else 0
        for series in self.series.values():
            series.cut(step)
        self.evaluations = [one for one in self.evaluations if one["step"] <= step]
        self.ranks = [one for one in self.ranks if one["step"] <= step]
        self.coverage = [one for one in self.coverage if one["epoch"] < epoch]
        self.starts.append({**entry, "launch": len(self.launches), "order": self._order()})

    def _end(self, entry: Entry) -> None:
        self.ends.append({**entry, "order": self._order()})

    def _order(self) -> int:
        return len(self.starts) + len(self.ends)

    def _settings(self, entry: Entry) -> None:
        self.settings = {n: v for n, v in entry.items() if n not in ("kind", "time")}

    def _values(self, entry: Entry) -> None:
        for name, (steps, values) in entry["values"].items():
            if name not in self.series:
                self.series[name] = Series()
            if len(steps) == len(values):
                self.series[name].extend(array("q", steps), _numbers(values))

    def _coverage(self, entry: Entry) -> None:
        plan = self.starts[-1].get("plan") if self.starts else None
        self.coverage.append({**entry, "plan": plan})


_TAKES = {
    "launch": Run._launch,
    "settings": Run._settings,
    "start": Run._start,
    "values": Run._values,
    "evaluation": lambda run, entry: run.evaluations.append(entry),
    "ranks": lambda run, entry: run.ranks.append(entry),
    "coverage": Run._coverage,
    "checkpoint": lambda run, entry: run.checkpoints.append(entry),
    "end": Run._end,
}


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in a folder, or in the record itself; also one that is going on."""
    file = record_of(Path(path))
    run = Run(file)
    tail = Tail(file)
    before = -1
    while tail.offset > before:
        before = tail.offset
        run.apply(tail.read(_AT_ONCE))
    run.damaged += tail.damaged
    if not run.launches:
        raise StorageError(f"{file} has no line of a launch; it is empty, or no run record.")
    return run


def _numbers(values: list[Any]) -> array[float]:
    try:
        return array("d", values)
    except TypeError:  # "NaN" among them
        return array("d", map(float, values))


def _exists(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (OSError, TypeError, ValueError):
        return False
    return True
