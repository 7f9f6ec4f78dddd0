"""One checkpoint on its way to disk: each rank writes its share, rank 0 seals the whole."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from evenly import storage
from evenly.checkpoint.folder import telling
from evenly.checkpoint.reading import Homes
from evenly.checkpoint.spread import Rows, rows_of
from evenly.errors import StorageError
from evenly.storage import Entry
from evenly.wording import ranks
from evenly.world import World

Seal = Callable[[dict[str, Entry], Homes], None]

_LOOK = 0.02  # seconds between looks at the store


class Copies:
    """Copies of a rank's rows in the processor's memory, perhaps still on their way from a GPU."""

    def __init__(self, tensors: Mapping[str, Tensor], share: Sequence[Rows]) -> None:
        self.share = share
        self._held: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        for rows in share:
            source = rows_of(tensors[rows.name].detach(), rows)
            held = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            # The next step's kernels wait behind this copy on their stream; nobody else does.
            self._held[rows.name] = held.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda and self._event is None:
                self._event = torch.cuda.Event()
        if self._event is not None:
            self._event.record()

    def ready(self) -> dict[str, Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._held


class Writing(threading.Thread):
    """Writes while training goes on. `result` waits for it, and raises what went wrong.

    No collective is used: ranks tell rank 0 through a store client of their own.
    """

    def __init__(self, world: World, partial: Path, copies: Copies, seal: Seal) -> None:
        super().__init__(name="evenly-checkpoint", daemon=True)
        self._world, self._partial, self._copies, self._seal = world, partial, copies, seal
        self._store = None if world.store is None else world.store.clone()  # type: ignore[attr-defined]
        self._error: Exception | None = None
        self._written = threading.Event()
        self.finished = threading.Event()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error
        finally:
            self._written.set()
            self.finished.set()

    def wait_for_share(self) -> None:
        """Wait until this rank has written, or failed to write, what is its own."""
        self._await(self._written)

    def wait(self, limit: float) -> None:
        """Wait, for a while, until the whole is done: where one rank ends, others are stopped, and
        rank 0 may still be at it.
        """
        deadline = time.monotonic() + limit
        self.finished.wait(limit)
        with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
            while self._store is not None and not self._store.check([self._key("done")]):
                if time.monotonic() >= deadline:
                    return
                time.sleep(_LOOK)

    def result(self) -> None:
        """Wait until this rank's part is done; on rank 0 that is the whole."""
        self._await(self.finished)
        if self._store is not None and self._world.rank == 0:
            self._store.delete_key(self._key("done"))  # all have met, so nobody waits for it
        if self._error is not None:
            raise self._error

    def _await(self, event: threading.Event) -> None:
        limit = 0.9 * self._world.timeout  # before the others, who wait in a collective, give up
        if not event.wait(limit):
            raise StorageError(
                f"the checkpoint {self._partial} is not written after {limit:g} s. "
                "See what the file system does, or give the Trainer a longer timeout."
            )

    def _write(self) -> None:
        name = f"tensors-{self._world.rank:05d}.safetensors"
        told: dict[str, Any] = {}
        try:
            tensors = self._copies.ready()
            if tensors:
                with telling(self._partial):
                    safetensors.torch.save_file(tensors, self._partial / name)
                    told = {"name": name, "entry": storage.entry_of(self._partial / name)}
                    told["rows"] = list(self._copies.share)
        except Exception as error:
            if self._world.rank:
                self._tell({"error": str(error)})
                raise
            told = {"error": str(error)}
        self._written.set()
        if self._world.rank == 0:
            try:
                self._finish([told, *self._others()])
            finally:
                with contextlib.suppress(RuntimeError):  # the store may be gone; this is not
                    if self._store is not None:
                        self._store.set(self._key("done"), "")
        else:
            self._tell(told)

    def _finish(self, told: list[dict[str, Any]]) -> None:
        try:
            for one in told:
                if "error" in one:
                    raise StorageError(one["error"])
            files: dict[str, Entry] = {}
            homes: Homes = {}
            for one in told:
                if one:
                    files[one["name"]] = one["entry"]
                for tensor, start, stop in one.get("rows", ()):
                    homes.setdefault(tensor, []).append((one["name"], start, stop))
            self._seal(files, homes)
        except Exception:
            storage.remove(self._partial)  # what could not be finished should not fill the disk
            raise

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.set(self._key(self._world.rank), json.dumps(what))

    def _others(self) -> list[dict[str, Any]]:
        """What the other ranks have told, in their order."""
        if self._store is None:
            return []
        keys = {rank: self._key(rank) for rank in range(1, self._world.size)}
        deadline = time.monotonic() + self._world.timeout
        while not self._store.check(list(keys.values())):
            if time.monotonic() >= deadline:
                late = [rank for rank, key in keys.items() if not self._store.check([key])]
                return [{"error": f"{ranks(late)} did not write to {self._partial} in time."}]
            time.sleep(_LOOK)
        told = [json.loads(self._store.get(key)) for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return told

    def _key(self, what: int | str) -> str:
        return f"{self._partial.name}/{what}"
