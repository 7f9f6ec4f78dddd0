"""Looks at the beats of all ranks, reports who is stuck or slow, and says when to end the run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenly.watchdog import beats, table, words
from evenly.watchdog.activity import NAMES
from evenly.watchdog.blackbox import Recorded
from evenly.watchdog.judge import Finding, Standing, judge
from evenly.watchdog.pace import Patience, stragglers
from evenly.wording import ranks

StackOf = Callable[[Standing], tuple[str, str]]
"""The stack of a rank, and what else is known of its process."""
BoxOf = Callable[[int], Recorded | None]
"""The black box of a rank, where it can be read."""

# Stacks of more ranks than this are of little use to a reader.
_STACKS = 4


class Watcher:
    """One attempt's watcher, in the launcher or in a rank. ``look`` comes about once a second."""

    def __init__(
        self,
        *,
        size: int,
        attempt: str,
        say: Callable[[str], None],
        stack_of: StackOf,
        box_of: BoxOf = lambda rank: None,
        writes: bool,
    ) -> None:
        """``writes``: whether this one keeps the table of ranks, where a rank asks for it."""
        self.size, self._attempt = size, attempt
        self._say, self._stack_of, self._box_of, self._writes = say, stack_of, box_of, writes
        self._began = time.monotonic()
        self._known: set[int] = set()
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        self._patience = Patience()
        self._reported: tuple[object, ...] | None = None
        self._suspected: tuple[tuple[object, ...] | None, float] = (None, 0.0)
        self._named: list[int] = []
        self._report = ""
        self._stacks: dict[int, str] = {}
        self._folders: set[str] = set()
        self.standings: list[Standing] = []

    def look(self, store: dist.Store) -> Finding | None:
        """Report what is wrong; a finding that is to end the run, if there is one."""
        found, now = self.update(store), time.monotonic()
        finding = self._confirmed(judge(self.standings), now)
        if finding is None:
            self._moved_on()
        elif finding.incident != self._reported:
            self._tell(finding)
        self._tell_slow(found, now)
        if self._writes:
            self._write(finding)
        return finding if finding is not None and finding.end else None

    def _confirmed(self, finding: Finding | None, now: float) -> Finding | None:
        """A finding that has lasted for two beats: just after a rank moved on, the beats of those
        that waited for it are still old.
        """
        if finding is None:
            self._suspected = (None, now)
            return None
        if finding.incident != self._suspected[0]:
            self._suspected = (finding.incident, now)
        beat = max(min(1.0, s.beat.report / 4) for s in self.standings if s.beat is not None)
        return finding if now - self._suspected[1] >= 2 * beat else None

    def update(self, store: dist.Store) -> dict[int, beats.Beat]:
        """Take in the beats."""
        found = beats.read(store, self._attempt, self.size, self._known)
        now = time.monotonic()
        self.standings = [self._standing(rank, found.get(rank), now) for rank in range(self.size)]
        return found

    def places(self) -> str:
        """Where each rank was when it was last heard of, in words."""
        return words.places(self.standings)

    def _standing(self, rank: int, beat: beats.Beat | None, now: float) -> Standing:
        if beat is None:
            return Standing(rank, None, now - self._began)
        mark = (beat.pid, beat.count)
        if self._seen.get(rank, (None, 0.0))[0] != mark:
            self._seen[rank] = (mark, now)
        standing = Standing(rank, beat, now - self._seen[rank][1])
        late = standing.silent > 2 * min(1.0, beat.report / 4)
        box = self._box_of(rank) if late else None
        if box is None or not 0 <= box.phase < len(NAMES):
            return standing
        numbers = {**box._asdict(), "phase": NAMES[box.phase]}
        around = NAMES[numbers.pop("around") % len(NAMES)]
        if all(getattr(beat, name) == value for name, value in numbers.items()):
            return standing
        stage = numbers["phase"] == "data" and around in ("evaluation", "prediction")
        doing = around if stage else ""
        moved = dataclasses.replace(beat, doing=doing, waits=None, idle=0.0, **numbers)
        return Standing(rank, moved, standing.silent)

    def _tell(self, finding: Finding) -> None:
        self._reported, self._named = finding.incident, [s.rank for s in finding.stuck]
        self._stacks, notes = {}, {}
        for standing in finding.stuck[:_STACKS]:
            self._stacks[standing.rank], notes[standing.rank] = self._stack_of(standing)
        self._report = words.report(finding, self._stacks, notes)
        self._say(f"{self._report}\nevenly: {words.outlook(finding)}")

    def _moved_on(self) -> None:
        if self._reported is not None:
            self._say(f"{ranks(self._named)} moved on.")
        self._reported, self._report, self._stacks = None, "", {}

    def _tell_slow(self, found: dict[int, beats.Beat], now: float) -> None:
        wait = max((beat.report for beat in found.values()), default=0.0)
        if wait and self._reported is None:
            for slow in self._patience.due(stragglers(found), now, wait):
                self._say(words.slow(*slow))

    def failed(self, rank: int, state: str, text: str) -> None:
        """Put into the table why the run failed, and by whom: the last that is written in it."""
        if self._writes:
            self._write(None, {"rank": rank, "state": state, "text": text})

    def _write(self, finding: Finding | None, failure: dict[str, Any] | None = None) -> None:
        folders = {s.beat.folder for s in self.standings if s.beat is not None and s.beat.folder}
        for folder in folders:
            if folder not in self._folders:  # once: a folder that the user takes away stays away
                self._folders.add(folder)
                with contextlib.suppress(OSError):
                    Path(folder).mkdir(parents=True, exist_ok=True)
            table.write(folder, self.table(finding, failure))

    def table(
        self, finding: Finding | None = None, failure: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """All that is known, as `table` describes it."""
        return table.table(
            self.standings,
            attempt=self._attempt,
            time=time.time(),
            finding=finding,
            stacks=self._stacks,
            report=self._report,
            failure=failure,
        )
