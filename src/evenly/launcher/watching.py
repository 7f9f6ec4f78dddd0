"""The launcher's watch over one attempt: who is stuck, who is slow, and when to end it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from evenly.launcher import failures
from evenly.launcher.failures import Ending
from evenly.launcher.rendezvous import Meeting
from evenly.watchdog import stacks
from evenly.watchdog.blackbox import Recorded, look
from evenly.watchdog.files import box_file, stack_file
from evenly.watchdog.judge import Finding, Standing
from evenly.watchdog.watcher import Watcher

_LOOK = 0.5  # seconds between looks
_ELSEWHERE = 5.0  # seconds that another machine's launcher may take to give a stack


class Watch:
    """A thread beside the agent. ``hung`` is what is to end the run, once there is something."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        size: int,
        workers: Mapping[int, int],
        files: Mapping[int, Path],
        say: Callable[[str], None],
    ) -> None:
        """``workers`` are the processes of this machine's ranks, ``files`` where they leave stacks
        and black boxes.
        """
        self._meeting, self._workers, self._files = meeting, workers, files
        self._store: dist.Store | None = None
        self._watcher = Watcher(
            size=size,
            attempt=meeting.token,
            say=say,
            stack_of=self._stack_of,
            box_of=self._box_of,
            writes=0 in workers,
        )
        self._alone = len(workers) == size
        self.hung: Finding | None = None
        self.elsewhere: Ending | None = None
        """A hang for which another machine's launcher ends the run."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenly-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(timeout=0.2)  # it may wait for a store that is gone, and is a daemon

    def last_places(self) -> str:
        """Where the ranks were when they were last heard of."""
        self.stop()
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._watcher.update(self._store)
        return self._watcher.places()

    def failed(self, rank: int, state: str, text: str) -> None:
        """The attempt has failed, by this rank: those who look at the table should know."""
        self._watcher.failed(rank, state, text)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: on another machine, with it
            self._store = self._meeting.connect()
            while not self._end.wait(_LOOK):
                told = None if self._alone else failures.published(self._store)
                if told is not None and told.kind == "hang":
                    self.elsewhere = told
                    return
                self.hung = self._watcher.look(self._store)
                if self.hung is not None:
                    return

    def _box_of(self, rank: int) -> Recorded | None:
        return look(box_file(self._files[rank])) if rank in self._files else None

    def _stack_of(self, standing: Standing) -> tuple[str, str]:
        rank = standing.rank
        key = f"evenly/{self._meeting.token}/watch/stack/{rank}"
        if rank in self._workers:
            pid, file = self._workers[rank], stack_file(self._files[rank])
            note = stacks.state_of(pid, silent=standing.is_silent)
            stack = "" if stacks.cannot_answer(pid) else stacks.ask(pid, file)
            if self._store is not None and not self._alone:
                self._store.set(key, f"{note}\n{stack}")
            return stack, note
        deadline = time.monotonic() + _ELSEWHERE
        while self._store is not None and time.monotonic() < deadline:
            if self._store.check([key]):
                note, _, stack = self._store.get(key).decode().partition("\n")
                return stack, note
            time.sleep(0.1)
        return "", ""
