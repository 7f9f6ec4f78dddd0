"""Requests to stop from outside: a scheduler that wants its machine back, a signal to a rank.

Under ``evenly run`` the launcher takes the signal and publishes the request in the attempt's store,
where a thread of each rank listens. SIGTERM to a worker still means to end now; SIGUSR1 is a
request there, too. Ranks that were started otherwise take both signals themselves. Nothing but a
flag is set here; the ranks agree on the step at which to stop, save, and exit with `EXIT_CODE`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from evenly.collectives import barrier
from evenly.store import connect
from evenly.variables import read_place
from evenly.world import World

EXIT_CODE = getattr(os, "EX_TEMPFAIL", 75)
"""How a run exits that was asked to stop and has saved: 75, on which schedulers can requeue."""

STOP_KEY = "evenly/stop"
"""The request, in the attempt's store; its value is the signal's name."""
LISTENERS_KEY = "evenly/stop/listeners"
"""How many ranks listen for it."""
STOPPED_KEY = "evenly/stopped"
"""Set when the ranks have saved and will exit."""

_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK = 0.5  # seconds between looks at the store
_ECHO = 1.0  # seconds in which the same signal again is the same request


class StopRequests:
    """While entered, listens for a request to stop. ``asked`` is its signal's name, once it came.

    A second signal to a rank that takes them itself ends it at once, unless it is the same one
    within a second: a scheduler may signal all processes and their launcher pass it on. Outside
    the main thread no signal can be taken.
    """

    def __init__(self, world: World) -> None:
        self.asked = ""
        self._when = 0.0
        self._world = world
        self._previous: dict[signal.Signals, Any] = {}
        self._ears: dist.Store | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def __enter__(self) -> StopRequests:
        launched = self._world.launcher == "evenly"
        if launched:
            limit = timedelta(seconds=self._world.timeout)
            self._ears = connect(read_place(os.environ), limit)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1,) if launched else _REQUESTS:
                self._previous[number] = signal.signal(number, self._take)
        if self._ears is not None:
            self._ears.add(LISTENERS_KEY, 1)
            self._thread = threading.Thread(target=self._listen, name="evenly-stop", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._thread is not None:
            self._end.set()
            self._thread.join(timeout=5)
            with contextlib.suppress(RuntimeError):  # the store may be gone
                if self._ears is not None:  # from now on a request ends the run
                    self._ears.add(LISTENERS_KEY, -1)
                    # The launcher asks before it counts, so one that found us here is seen here.
                    self._look()

    def leave(self, step: int) -> NoReturn:
        """The run has stopped as asked, and has saved: say so, and exit; a meeting of all ranks."""
        if self._world.rank == 0:
            if self._world.launcher == "evenly":
                limit = timedelta(seconds=self._world.timeout)
                connect(read_place(os.environ), limit).set(STOPPED_KEY, self.asked or "asked")
            sys.stderr.write(f"evenly: stopped as asked at step {step}, and saved.\n")
        barrier()  # nobody ends before the launcher can know why
        raise SystemExit(EXIT_CODE)

    def _listen(self) -> None:
        assert self._ears is not None
        # Looks, because a wait that ends by its limit makes torch print a warning.
        while not self.asked and not self._end.wait(_LOOK):
            try:
                self._look()
            except RuntimeError:
                return  # the store is gone, and with it the launcher

    def _look(self) -> None:
        if self._ears is not None and not self.asked and self._ears.check([STOP_KEY]):
            self.asked = self._ears.get(STOP_KEY).decode()

    def _take(self, number: int, frame: FrameType | None) -> None:
        chosen = signal.Signals(number)
        if self._world.launcher == "evenly":  # whose launcher is the one to ask twice
            self.asked = self.asked or chosen.name
        elif not self.asked:
            self.asked, self._when = chosen.name, time.monotonic()
        elif self.asked != chosen.name or time.monotonic() - self._when > _ECHO:
            signal.signal(chosen, self._previous.get(chosen) or signal.SIG_DFL)
            os.kill(os.getpid(), chosen)
