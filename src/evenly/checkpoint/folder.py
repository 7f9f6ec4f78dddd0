"""The folder of checkpoints: making room for one, sealing it, finding those that are whole."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import safetensors

from evenly import storage
from evenly.checkpoint.reading import STATE, Checkpoint, Homes
from evenly.checkpoint.retention import About, Retention
from evenly.errors import EvenlyWarning, StorageError
from evenly.storage import Entry
from evenly.together import from_first, together
from evenly.world import current_world

KIND, VERSION = "evenly checkpoint", 2
_NAME = re.compile(r"step-(\d{9,})")


class CheckpointFolder:
    """Checkpoints by step, in a folder that all ranks see. Only `newest` meets other ranks."""

    def __init__(self, folder: Path, keep: Retention | None = None) -> None:
        self.folder = folder
        self.keep = keep or Retention(last=None)

    def newest(self) -> Checkpoint | None:
        """The newest that is whole, on every rank; a meeting of all. Damaged ones are reported."""
        path = from_first(self._newest)
        if path is None:
            return None
        return together(lambda: Checkpoint.open(path))[current_world().rank]

    def all(self) -> list[Path]:
        """Every checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=step_of, reverse=True)

    def about(self) -> dict[int, About]:
        """What is known of those whose manifest can be read, by step."""
        found = {}
        for path in self.all():
            try:
                found[step_of(path)] = About.read(read_manifest(path)["about"])
            except (StorageError, KeyError, TypeError, ValueError):
                continue  # damaged, and left for `newest` to report
        return found

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def begin(self, step: int) -> Path:
        """Where the checkpoint of this step is written until it is sealed."""
        folder = self.at(step)
        with telling(folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            storage.clean(self.folder)
            if folder.exists() and not is_whole(folder):
                storage.remove(folder)  # its place is needed; a whole one is never written over
            partial = storage.partial_of(folder, uuid4().hex[:12])
            partial.mkdir()
            return partial

    def seal(
        self,
        partial: Path,
        about: About,
        plain: Mapping[str, Any],
        files: dict[str, Entry],
        homes: Homes,
    ) -> None:
        """Add what is not tensors, and the manifest; give it its name; let old ones go."""
        folder = self.at(about.step)
        with telling(folder):
            (partial / STATE).write_text(json.dumps({"state": plain, "homes": homes}))
            files[STATE] = storage.entry_of(partial / STATE)
            storage.seal(
                partial, folder, kind=KIND, version=VERSION, files=files, about=about._asdict()
            )
        self._let_go()

    def _let_go(self) -> None:
        """Remove what no rule wants. One that cannot be read is no one's, and goes too."""
        found = self.about()
        unread = [About(step_of(p), -1, -1, {}) for p in self.all() if step_of(p) not in found]
        stay = self.keep.stay([*found.values(), *unread])
        for path in self.all():
            if step_of(path) not in stay:
                storage.remove(path)

    def _newest(self) -> Path | None:
        for path in self.all():
            try:
                check(path)
                return path
            except StorageError as error:
                warnings.warn(f"{error} The one before it is used.", EvenlyWarning, stacklevel=2)
        return None


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def read_manifest(path: Path) -> dict[str, Any]:
    return storage.manifest(path, kind=KIND, version=VERSION)


def check(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest."""
    storage.check(path, kind=KIND, version=VERSION)


def is_whole(path: Path) -> bool:
    try:
        check(path)
    except StorageError:
        return False
    return True


class telling:  # noqa: N801 - reads as a block
    """Say which checkpoint an operating system's error is about, and what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, OSError | safetensors.SafetensorError):
            raise StorageError(
                f"the checkpoint {self._path} could not be written: {error}. Earlier checkpoints "
                "are untouched. Make room, or see whether the folder is there and may be written "
                "to."
            ) from error
