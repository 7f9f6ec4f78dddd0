"""The error board: a rank that fails says so, and the others stop instead of waiting for it.

One place in the store serves sections that run on one rank, the loader, callbacks and whatever
else can fail on a single rank. The board needs no collective, so it is readable while ranks wait
in one: a thread of each rank sleeps on the store until someone posts, then aborts what it can
(nccl; gloo's waits end by themselves when the failed rank closes its connections).
"""

import contextlib
import json
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from evenly.blame import summary_of
from evenly.errors import LateError, RankFailedError

# A wait that ends by its limit makes torch print a warning, so the listening thread has none to
# speak of (this is about the longest that torch can count) and is woken to end.
_FOR_EVER = timedelta(days=20)


class Board:
    """One rank's view of the board. ``ears`` is a store client for the waiting thread alone."""

    def __init__(
        self,
        store: dist.Store,
        ears: dist.Store | None,
        *,
        rank: int,
        size: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._ears = ears
        self._rank = rank
        self._size = size
        self._wake = wake
        self._failure: RankFailedError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if ears is not None:
            self._thread = threading.Thread(
                target=self._listen, args=(ears,), name="evenly-board", daemon=True
            )
            self._thread.start()

    def post(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. The first to post is the one they report."""
        entry = json.dumps(
            {
                "rank": self._rank,
                "summary": summary_of(error),
                "traceback": _shortened("".join(traceback.format_exception(error))),
            }
        )
        # The store may be gone with its server; then the others see a lost connection instead.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", entry)
            others = [f"wake/{rank}" for rank in range(self._size) if rank != self._rank]
            self._store.multi_set(others, ["failed"] * len(others))  # type: ignore[attr-defined]

    def failure(self, wait: float = 0.0) -> RankFailedError | None:
        """What another rank posted, if any; looks for up to ``wait`` seconds."""
        deadline = time.monotonic() + wait
        while self._failure is None and not self._closed:
            with contextlib.suppress(RuntimeError):
                if self._store.check(["failure"]):
                    self._read(self._store)
            if self._failure is not None or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return self._failure

    def check(self) -> None:
        """Raise if another rank has failed. Costs a look at one attribute."""
        if self._failure is not None:
            raise self._failure

    def wait(
        self, key: str, *, limit: float, late: Callable[[bool], LateError], left: str | None = None
    ) -> None:
        """Wait for a key, until ``limit`` seconds have passed, some rank has failed, or the key
        ``left`` says that the one waited for has gone; ``late`` makes the error of that.
        """
        deadline = time.monotonic() + limit
        nap = 0.001
        while not self._store.check([key]):
            self.check()
            gone = left is not None and self._store.check([left]) and not self._store.check([key])
            if gone or time.monotonic() >= deadline:
                raise late(gone)
            time.sleep(nap)
            nap = min(1.5 * nap, 0.25)

    def close(self) -> None:
        """Stop listening. The thread is gone when this returns."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"wake/{self._rank}", "closed")
            self._thread.join(timeout=5)

    def _listen(self, ears: dist.Store) -> None:
        while not self._closed:
            try:
                ears.wait([f"wake/{self._rank}"], _FOR_EVER)
                if ears.get(f"wake/{self._rank}") == b"failed":
                    self._read(ears)
                    self._wake()
                return
            except dist.DistStoreError:
                continue  # nothing happened for ever so long
            except RuntimeError:
                return  # the store is gone: its server ends this process too, or already has

    def _read(self, store: dist.Store) -> None:
        entry = json.loads(store.get("failure"))
        if entry["rank"] != self._rank:
            self._failure = RankFailedError(**entry)


def _shortened(text: str, limit: int = 100_000) -> str:
    """Head and tail: the store refuses large values."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... cut ...]\n{text[-limit // 2 :]}"
