"""What is known of all ranks, as JSON: the file ``ranks.json`` in the Trainer's folder.

::

    {"version": 1, "time": 1789.0, "attempt": "...", "size": 2, "report": "", "failure": null,
     "ranks": [{"rank": 0, "state": "moves" | "stuck" | "silent" | "unborn" | "left",
                "phase": "step", "doing": "", "waits_for": [1], "epoch": 0, "position": 3,
                "step": 3, "since": 1780.0, "idle": 9.0, "last_beat": 1788.4, "host": "...",
                "pid": 1234, "step_seconds": 0.2, "own_seconds": 0.1, "data_seconds": 0.05,
                "memory": 1000, "gpu_memory": null, "collectives": 17, "stack": ""}]}

"failure" is, once the run has failed, {"rank": 1, "state": "dead" | "stuck" | "failed",
"text": "..."}, from the launcher.
Times are seconds since 1970 on the clock of whoever writes; what is not known is null. A reader
must look at ``version``, and must not take an old file for a live one: compare ``time``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenly.errors import StorageError
from evenly.watchdog.judge import Finding, Standing, waits_for

VERSION = 1
FILE = "ranks.json"


def table(
    standings: Sequence[Standing],
    *,
    attempt: str,
    time: float,
    finding: Finding | None,
    stacks: Mapping[int, str],
    report: str,
    failure: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The table at ``time``, with what is wrong and the stacks of those that are stuck."""
    stuck = {s.rank for s in finding.stuck} if finding is not None else set()
    rows = [_row(s, standings, time, s.rank in stuck, stacks.get(s.rank, "")) for s in standings]
    return {
        "version": VERSION,
        "time": time,
        "attempt": attempt,
        "size": len(standings),
        "report": report,
        "failure": failure,
        "ranks": rows,
    }


def write(folder: str, found: Mapping[str, Any]) -> None:
    """Put the table into a folder, in one move; where that is not possible, there is none."""
    path = Path(folder) / FILE
    partial = path.with_name(f".{FILE}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(found))
        partial.replace(path)


def read_ranks(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a folder. Raises StorageError where there is none that can be read."""
    path = Path(folder) / FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        version = found["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is no table of ranks: {error}") from error
    if version != VERSION:
        raise StorageError(f"{path} has version {version!r}; this Evenly reads {VERSION}.")
    return found


def _row(
    standing: Standing, standings: Sequence[Standing], time: float, stuck: bool, stack: str
) -> dict[str, Any]:
    beat = standing.beat
    if beat is None:
        return {"rank": standing.rank, "state": "stuck" if stuck else "unborn", "stack": stack}
    state = "stuck" if stuck else "moves"
    if beat.phase == "left":
        state = "left"
    elif standing.is_silent:
        state = "silent"
    return {
        "rank": standing.rank,
        "state": state,
        "phase": beat.phase,
        "doing": beat.doing,
        "waits_for": sorted(waits_for(standing, standings)),
        "epoch": beat.epoch,
        "position": beat.position,
        "step": beat.step,
        "since": time - standing.idle,
        "idle": standing.idle,
        "last_beat": time - standing.silent,
        "host": beat.host,
        "pid": beat.pid,
        "step_seconds": beat.step_seconds,
        "own_seconds": beat.own,
        "data_seconds": beat.data,
        "memory": beat.memory,
        "gpu_memory": beat.gpu_memory,
        "collectives": beat.collectives,
        "stack": stack,
    }
