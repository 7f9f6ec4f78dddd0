"""Without our launcher the ranks watch each other: the lowest whose thread runs looks at all.

It holds a lease in the store, which another takes over when it is not renewed. A rank that is
asked for its stack answers from its thread; one that holds Python's lock cannot, and has its stack
written to standard error by faulthandler's own timer. A run that is to end is left by every rank
that can leave; whatever started them ends the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from evenly.watchdog import stacks, words
from evenly.watchdog.judge import Standing
from evenly.watchdog.limits import Limits
from evenly.watchdog.watcher import Watcher

if TYPE_CHECKING:
    from evenly.watchdog.beats import Beats

EXIT_CODE = 124
"""How a run exits that was ended because a rank was stuck: as `timeout` does."""

_LEASE = 3  # beats
_ASKING = 2.0  # seconds that a look at the others may take, stacks included


class Peers:
    """This rank's part in it. ``beside`` comes after each of its beats, in the same thread."""

    def __init__(self, *, rank: int, size: int, attempt: str, limits: Callable[[], Limits]) -> None:
        self._rank, self._attempt, self._limits = rank, attempt, limits
        self._watcher = Watcher(
            size=size,
            attempt=attempt,
            say=lambda text: _say(text),
            stack_of=self._stack_of,
            writes=True,
        )
        self._store: dist.Store | None = None
        self._lease = ("", time.monotonic())
        self._renewals = 0
        self._timer = False

    def beside(self, store: dist.Store) -> None:
        self._store = store
        limits = self._limits()
        self._set_timer(limits.report)
        if store.check([self._key("hang")]):
            os._exit(EXIT_CODE)
        asked = self._key(f"ask/{self._rank}")
        if store.check([asked]):
            store.delete_key(asked)
            store.set(self._key(f"stack/{self._rank}"), stacks.mine())
        if limits.report and self._watches(store, min(1.0, limits.report / 4)):
            finding = self._watcher.look(store)
            if finding is not None:
                _say(f"rank {finding.stuck[0].rank} {words.ending(finding)}; the run is ended.")
                store.set(self._key("hang"), "")
                time.sleep(2.0)  # the others look once a second, and this rank may serve the store
                os._exit(EXIT_CODE)

    def stop(self) -> None:
        if self._timer:
            faulthandler.cancel_dump_traceback_later()
            self._timer = False

    def _key(self, name: str) -> str:
        return f"evenly/{self._attempt}/watch/{name}"

    def _set_timer(self, seconds: float) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
            if seconds and sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(seconds + _ASKING, file=sys.__stderr__)
                self._timer = True

    def _watches(self, store: dist.Store, beat: float) -> bool:
        """Whether this rank holds the lease, which it renews; it takes one that has run out."""
        key, now = self._key("lease"), time.monotonic()
        holder, since = self._lease
        current = store.get(key).decode() if store.check([key]) else ""
        if current != holder:
            self._lease = (current, now)
        elif current.partition(" ")[0] != str(self._rank):
            # Lower ranks first, so that there is one message, and usually rank 0's.
            lease = max(_LEASE * beat, _ASKING) if current or self._rank else 0.0
            if now - since < lease + self._rank * 0.5 * beat:
                return False
            return self._take(store, key, current)
        if current.partition(" ")[0] == str(self._rank):
            return self._take(store, key, current)
        return False

    def _take(self, store: dist.Store, key: str, current: str) -> bool:
        self._renewals += 1
        mine = f"{self._rank} {self._renewals}"
        taken = store.compare_set(key, current, mine) == mine.encode()
        if taken:
            self._lease = (mine, time.monotonic())
        return bool(taken)

    def _stack_of(self, standing: Standing) -> tuple[str, str]:
        rank = standing.rank
        if rank == self._rank:
            return stacks.mine(), ""
        if standing.beat is None or self._store is None:
            return "", ""
        answer = self._key(f"stack/{rank}")
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(answer)
            self._store.set(self._key(f"ask/{rank}"), "")
            for _ in range(15):
                time.sleep(0.1)
                if self._store.check([answer]):
                    return self._store.get(answer).decode(), ""
        return "", "it does not answer; where it can, it writes its stack to its standard error"


class StoreGuard:
    """Where rank 0 serves the store and is stopped, nobody gets an answer: this thread of the
    other ranks notices, rank 1 says so, and all leave at the limit.
    """

    def __init__(self, beats: Beats, rank: int, limits: Callable[[], Limits]) -> None:
        self._beats, self._rank, self._limits = beats, rank, limits
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenly-beats-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        told = False
        while not self._end.wait(0.25):
            since, limits = self._beats.asking_since, self._limits()
            waited = 0.0 if since is None else time.monotonic() - since
            if limits.report and waited >= limits.report and not told:
                told = True
                if self._rank == 1:
                    _say(
                        f"rank 0, which serves the store, has not answered for {waited:.0f} s: "
                        "its process is stopped, or its machine is gone. The others wait for it."
                    )
            elif waited == 0.0:
                told = False
            if limits.timeout and waited >= limits.timeout and limits.report:
                os._exit(EXIT_CODE)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sys.__stderr__.write(f"evenly: {text}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
