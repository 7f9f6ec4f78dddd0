"""How each rank is: what the watchdog wrote, what the kernel says, and how old all that is."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evenly.errors import StorageError
from evenly.record.run import Run
from evenly.report.figures import NOTHING
from evenly.report.tables import duration
from evenly.watchdog import stacks
from evenly.watchdog.table import FILE, read_ranks

_OLD = 4.0
"""Seconds: a rank gives a sign of life every second."""
_QUIET = 5.0
"""Seconds: the table of ranks is written twice a second."""
_WAITS = 2.0
"""Seconds that a rank may wait for another before the page says so."""

_EARLIER = 2.0
"""Seconds before a launch: a table from then is of the launch before."""

Tone = Literal["good", "bad", "calm"]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A rank, in words."""

    rank: int
    state: str
    tone: Tone
    why: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    stack: str = ""


class Ranks:
    """The table of ranks in a folder, judged at each look.

    Processes are asked for on this machine alone, where their death is seen at once; of others the
    age of their last sign of life tells.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = socket.gethostname()
        self._table: dict[str, Any] = {}
        self._mark: object = None
        self._since = 0.0
        """When the table was written, on this process's monotonic clock."""
        self._gone: dict[tuple[int, int], float] = {}
        """When a process was first seen gone."""
        self.report = ""
        """Why the run failed, or what the watchdog says, as long as it holds."""
        self.failed = False
        """Whether the launcher has said that the run failed."""

    def look(self, run: Run | None) -> list[Tile]:
        """A tile for each rank; without a table one for the process that records."""
        self._read()
        now = time.monotonic()
        state = run.state if run is not None and run.path.exists() else "empty"
        if not self._table or self._before(run):
            self.report, self.failed = "", False
            return [_alone(run, state)] if run is not None and run.launches else []
        failure = self._table.get("failure")
        self.failed = isinstance(failure, dict)
        told = failure["text"] if isinstance(failure, dict) else self._table.get("report", "")
        self.report = str(told).partition("\nStack of rank")[0]
        rows = [row for row in self._table["ranks"] if isinstance(row, dict)]
        for row in rows:
            self._ask(row, now)
        quiet = now - self._since > _QUIET
        over = quiet and state not in ("running", "empty")
        return [self._tile(row, now, quiet, state if over else "") for row in rows]

    def _read(self) -> None:
        path = self._folder / FILE
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_mtime_ns, status.st_size)
            if mark == self._mark:
                return
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise StorageError(f"{path} leads out of the run's folder.")
            table = read_ranks(self._folder)
            table["ranks"] = list(table["ranks"])
            # Of a file that is met for the first time, only the clocks can tell its age.
            age = max(0.0, time.time() - float(table["time"])) if self._mark is None else 0.0
        except (OSError, StorageError, KeyError, TypeError, ValueError):
            self._table, self._mark = {}, None
            return
        self._table, self._mark, self._since = table, mark, time.monotonic() - age

    def _before(self, run: Run | None) -> bool:
        """Whether the table is of an earlier launch."""
        if run is None or not run.launches:
            return False
        return float(self._table["time"]) < float(run.launches[-1]["time"]) - _EARLIER

    def _ask(self, row: Row, now: float) -> None:
        pid = row.get("pid")
        if row.get("host") != self._host or not pid:
            return
        key = (row["rank"], pid)
        if stacks.state_of(pid, silent=False) in ("its process is dead", "its process is gone"):
            self._gone.setdefault(key, now)
        else:
            self._gone.pop(key, None)

    def _died(self, row: Row, age: float, now: float) -> bool:
        """Whether its process is gone. One that still gives signs of life is in a container."""
        gone = self._gone.get((row["rank"], row.get("pid") or 0))
        return gone is not None and now - age < gone + 1.5

    def _tile(self, row: Row, now: float, quiet: bool, over: str) -> Tile:
        rank = row["rank"]
        written = now - self._since
        age = written + max(
            0.0, self._table["time"] - (row.get("last_beat") or self._table["time"])
        )
        told, failure = row.get("state"), self._table.get("failure")
        facts, stack = _facts(row, age), str(row.get("stack") or "")

        def tile(state: str, tone: Tone, why: str = "") -> Tile:
            return Tile(rank=rank, state=state, tone=tone, why=why, facts=facts, stack=stack)

        if isinstance(failure, dict):
            if failure.get("rank") == rank:
                text = str(failure["text"]).partition(";")[0].removeprefix(f"rank {rank} ")
                return tile(str(failure.get("state", "failed")), "bad", _sentence(text))
            return tile("ended", "calm", "It ended because another rank failed.")
        died = told != "left" and self._died(row, age, now)
        if over in ("finished", "stopped") or told == "left":
            return tile("ended", "calm")
        if died and self._first(row["rank"], row.get("pid") or 0):
            return tile("dead", "bad", f"Process {row['pid']} is gone.")
        if died:
            return tile("ended", "bad" if over == "killed" else "calm", "Its process is gone too.")
        if over:
            return tile("ended", "bad", f"The run {_ended(over)}, without a word of this rank.")
        if told == "unborn":
            late = f"It has not opened the world; no word since {duration(written)}."
            return tile("starting", "bad" if quiet else "calm", late if quiet else "")
        local = row.get("host") == self._host and row.get("pid")
        kernel = stacks.state_of(row["pid"], silent=True) if local else ""
        note = f" It seems that {kernel}." if kernel and age > _OLD else ""
        if told == "stuck":
            return tile("stuck", "bad", f"It has not moved for {duration(_idle(row, written))}.")
        if quiet:
            return tile(
                "no word", "bad", f"Nothing was heard of any rank for {duration(written)}.{note}"
            )
        if told == "silent" or age > _OLD:
            return tile("silent", "bad", f"No sign of life for {duration(age)}.{note}")
        idle, waits = _idle(row, written), row.get("waits_for") or []
        if waits and idle > _WAITS:
            return tile("waiting", "good", f"For {_names(waits)}, since {duration(idle)}.")
        return tile("working", "good")

    def _first(self, rank: int, pid: int) -> bool:
        """Whether this process was among the first to be gone."""
        pids = {(row["rank"], row.get("pid")) for row in self._table["ranks"]}
        times = [when for key, when in self._gone.items() if key in pids]
        return self._gone[rank, pid] <= min(times) + 0.05


def _alone(run: Run | None, state: str) -> Tile:
    """A run that no watchdog watches: the record is all there is."""
    assert run is not None
    size = run.launches[-1].get("processes", 1)
    facts = [("step", f"{run.step:,}")]
    for name, word in (("step_seconds", "step time"), ("data_wait_seconds", "data wait")):
        series = run.series.get(name)
        if series is not None and len(series):
            facts.append((word, _milliseconds(series.values[-1])))
    dead = state in ("failed", "killed")
    working = state == "running"
    why = "" if size == 1 else f"Of {size} ranks; nothing is known of the others."
    return Tile(
        rank=0,
        state="working" if working else "dead" if dead else "ended" if run.ends else "starting",
        tone="good" if working else "bad" if dead else "calm",
        why=why,
        facts=facts,
    )


def _facts(row: Row, age: float) -> list[tuple[str, str]]:
    if row.get("state") == "unborn":
        return []
    phase = str(row.get("phase", ""))
    doing = f" ({row['doing']})" if row.get("doing") and row["doing"] != phase else ""
    memory = [("memory", _bytes(row.get("memory")))]
    if row.get("gpu_memory") is not None:
        memory.append(("GPU memory", _bytes(row["gpu_memory"])))
    return [
        ("step", f"{row['step']:,}"),
        ("phase", phase + doing),
        ("step time", _milliseconds(row.get("step_seconds"))),
        ("its own", _milliseconds(row.get("own_seconds"))),
        ("data wait", _milliseconds(row.get("data_seconds"))),
        *memory,
        ("heartbeat", f"{duration(age)} ago" if age >= 1.5 else "now"),
        ("process", f"{row.get('pid')} on {row.get('host')}"),
    ]


def _idle(row: Row, written: float) -> float:
    return float(row.get("idle") or 0.0) + written


def _names(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {some}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _ended(state: str) -> str:
    return {"failed": "has failed", "killed": "was killed"}.get(state, "has ended")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bytes(count: int | None) -> str:
    if count is None:
        return NOTHING
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
