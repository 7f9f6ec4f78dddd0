"""What this process does now. Others read it from a thread; the training thread sets attributes.

``phase`` is one of `PHASES`; ``doing`` says more ("all_reduce", "on_step_end of Timer").
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from evenly.watchdog import blackbox
from evenly.watchdog.limits import Limits

PHASES = {
    "start-up": "before the first step",
    "program": "in the program's own code, outside the Trainer",
    "data": "waiting for a batch",
    "step": "computing, or exchanging gradients",
    "callback": "in a callback",
    "evaluation": "evaluating",
    "prediction": "predicting",
    "saving": "saving a checkpoint",
    "left": "has left the world",
}

NAMES = tuple(PHASES)
_NUMBERS = {name: number for number, name in enumerate(NAMES)}

EVERYBODY = -1
"""What a rank waits for that is in a collective."""

State = tuple[str, str, "int | None"]


class Activity:
    """Takes note of each move, cheaply enough for every step (benchmarks/watchdog.py)."""

    __slots__ = (
        "allowed",
        "box",
        "doing",
        "epoch",
        "folder",
        "given",
        "made",
        "moves",
        "phase",
        "position",
        "sample",
        "samples",
        "step",
        "waits",
    )

    def __init__(self) -> None:
        self.box = blackbox.private()
        """What the launcher reads of a rank that is silent."""
        self.phase = "start-up"
        self.doing = ""
        self.waits: int | None = None
        """The rank that this one waits for, or `EVERYBODY`."""
        self.epoch = self.position = self.step = 0
        """Of the step that is being made: its epoch, its place in it, and the steps before it."""
        self.made = 0
        """Steps that this process has made in this training."""
        self.moves = 0
        """A number that grows whenever something begins or ends."""
        self.allowed = 0.0
        """Seconds that what it does may take before it can be a hang, where a user said so."""
        self.given: tuple[float | None, float | None] = (None, None)
        """The limits that the program set."""
        self.folder = ""
        """Where a table of all ranks is kept."""
        self.sample = False
        """Whether the next step is to be timed."""
        self.samples: deque[tuple[float, float]] = deque(maxlen=16)
        """Of the steps that were: seconds of this rank's own, and those of them spent on data."""

    def enter(self, phase: str, doing: str = "", waits: int | None = None) -> State:
        """Take note of what begins; the state before, for `back`."""
        before = (self.phase, self.doing, self.waits)
        self.phase, self.doing, self.waits = phase, doing, waits
        self.moves += 1
        self.box[0] = _NUMBERS[phase]
        return before

    def back(self, before: State) -> None:
        """What was entered has ended."""
        self.phase, self.doing, self.waits = before
        self.moves += 1
        self.box[0] = _NUMBERS[self.phase]

    def at(self, epoch: int, position: int, step: int) -> None:
        """The step that comes next."""
        self.epoch, self.position, self.step = epoch, position, step
        box = self.box
        box[1], box[2], box[3], box[4] = epoch, position, step, self.made

    def begin(self) -> None:
        """A training begins: its first step may compile, and its pace is its own."""
        self.made = 0
        self.samples.clear()

    def record(self, path: str) -> None:
        """Keep a black box at this path from now on. A forked process has one of its own."""
        self.box = blackbox.shared(path)
        os.register_at_fork(after_in_child=self._close_box)

    def _close_box(self) -> None:
        self.box = blackbox.private()

    @contextlib.contextmanager
    def within(self, phase: str, doing: str = "", waits: int | None = None) -> Iterator[None]:
        before, around = self.enter(phase, doing, waits), self.box[5]
        self.box[5] = _NUMBERS[phase]
        try:
            yield
        finally:
            self.box[5] = around
            self.back(before)

    def limits(self, otherwise: Limits) -> Limits:
        report, timeout = self.given
        return Limits(
            otherwise.report if report is None else report,
            otherwise.timeout if timeout is None else timeout,
        )


activity = Activity()
"""Of this process."""
