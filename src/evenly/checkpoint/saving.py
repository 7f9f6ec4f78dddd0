"""Saving while training goes on: one at a time, and no error is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.plain import taken_apart
from evenly.checkpoint.reading import Homes
from evenly.checkpoint.retention import About
from evenly.checkpoint.spread import spread
from evenly.checkpoint.writing import Copies, Writing
from evenly.errors import EvenlyWarning, SettingError, StorageError
from evenly.storage import Entry
from evenly.together import from_first, together
from evenly.world import World

OnSaveError = Literal["raise", "warn"]

_PATIENCE = 30.0  # seconds that a run which failed waits for the checkpoint that it was writing


class Saver:
    """Puts checkpoints into a folder, in the background or not.

    The state is copied, then written by a thread of each rank; the next save waits for the last.
    What went wrong is raised, or warned of, at the next meeting.
    """

    def __init__(
        self, folder: CheckpointFolder, world: World, *, background: bool, on_error: OnSaveError
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise SettingError(f"on_save_error={on_error!r}: give 'raise' or 'warn'.")
        self.folder = folder
        self._world, self._background, self._on_error = world, background, on_error
        self._writing: Writing | None = None
        self.on_sealed: Callable[[int], None] = lambda step: None
        """Told of each checkpoint that is whole; on rank 0, by the thread that writes."""

    @property
    def failed(self) -> bool:
        """Whether the save that is going on has failed, as far as this rank knows."""
        return self._writing is not None and self._writing.failed

    def save(self, about: About, state: Mapping[str, Any]) -> None:
        """A checkpoint of ``state``, which is the same on every rank; a meeting of all."""
        self.settle()
        tensors: dict[str, Tensor] = {}
        plain = {name: taken_apart(part, name, tensors) for name, part in state.items()}
        try:
            partial = from_first(lambda: self.folder.begin(about.step))
        except StorageError as error:
            self._take(error)
            return
        share = spread(tensors, self._world.size)[self._world.rank]
        self._writing = Writing(
            self._world,
            partial,
            Copies(tensors, share),
            lambda files, homes: self._seal(partial, about, plain, files, homes),
        )
        if self._background:
            self._writing.start()
        else:
            self._writing.run()
            self.settle()

    def settle(self) -> bool:
        """Wait for the last save; a meeting of all. What went wrong is raised on all ranks, or
        warned of; whether nothing did.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return True
        try:
            # First all shares: a rank that died will not write its own, and is noticed here.
            together(writing.wait_for_share)
            together(writing.result)
        except StorageError as error:
            self._take(error)
            return False
        return True

    def close(self) -> None:
        """After a failure, where ranks do not meet any more: give the last save some time."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait(_PATIENCE)

    def _seal(
        self,
        partial: Path,
        about: About,
        plain: Mapping[str, Any],
        files: dict[str, Entry],
        homes: Homes,
    ) -> None:
        self.folder.seal(partial, about, plain, files, homes)
        self.on_sealed(about.step)

    def _take(self, error: StorageError) -> None:
        if self._on_error == "raise":
            raise error
        if self._world.rank == 0:
            warnings.warn(
                f"{error} Training goes on; the next checkpoint is tried when it is due.",
                EvenlyWarning,
                stacklevel=3,
            )
