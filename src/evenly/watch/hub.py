"""One reader for any number of viewers: what is new is put together once, and sent to all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from evenly.watch.follow import Follower
from evenly.watch.frames import Json, change, encoded, frame, unreadable
from evenly.watch.ranks import Ranks

_PAUSE = 1.0
"""Seconds between updates, and at least ten times what one takes."""
_KEEP = 10.0
"""Seconds after which a viewer hears something, so that dead connections are noticed."""


class Hub:
    """Looks at a run once a second. A viewer that is slow misses updates and then gets the whole:
    nothing queues up, and nobody waits for it.
    """

    def __init__(self, folder: Path) -> None:
        self.follower = Follower(folder)
        self._ranks = Ranks(folder)
        self._frame: Json = {}
        self._change = b""
        self._whole: tuple[int, bytes] = (0, b"")
        self.version = 0
        self.seconds = 0.0
        """What the last update took."""
        self._news = asyncio.Event()
        self._closing = False

    async def run(self) -> None:
        """Until it is cancelled, or closed."""
        while not self._closing:
            self._publish(*await asyncio.to_thread(self._look))
            until = time.monotonic() + max(_PAUSE, 10 * self.seconds)
            while self.follower.behind and time.monotonic() < until and not self._closing:
                try:
                    await asyncio.to_thread(self.follower.look)
                except Exception:  # which the next look tells of
                    break
                if not self.follower.behind:
                    until = 0.0  # all of it is to be seen at once
            await asyncio.sleep(max(0.0, until - time.monotonic()))

    def update(self) -> bytes:
        """Look, and put together what is new."""
        self._publish(*self._look())
        return self._change

    def _look(self) -> tuple[Json, bytes]:
        begin = time.perf_counter()
        try:
            self.follower.look()
            found = frame(self.follower, self._ranks)
        except Exception as error:  # whatever a record holds, the page says so and goes on
            found = unreadable(self.follower, error)
        event = encoded(change(self._frame, found), whole=False) if self._frame else b""
        self.seconds = time.perf_counter() - begin
        return found, event

    def _publish(self, found: Json, event: bytes) -> None:
        self._frame, self._change = found, event
        self.version += 1
        self._wake()

    def whole(self) -> bytes:
        """Everything, as an event; put together once for each version that is asked for."""
        if self._whole[0] != self.version:
            self._whole = (self.version, encoded(self._frame, whole=True))
        return self._whole[1]

    async def events(self) -> AsyncIterator[bytes]:
        """For one viewer."""
        seen = 0
        while not self._closing:
            news = self._news
            if seen == self.version:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _KEEP)
                if seen == self.version:
                    yield b": still here\n\n"
                    continue
            follows = seen and seen == self.version - 1
            event, seen = (self._change if follows else self.whole()), self.version
            yield event

    def close(self) -> None:
        """End all events."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
