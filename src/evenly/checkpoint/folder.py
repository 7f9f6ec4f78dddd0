"""The folder of checkpoints: making room for one, sealing it, finding those that are whole."""

from __future__ import annotations

import contextlib
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
from evenly.errors import EvenlyWarning, FormatError, StorageError
from evenly.storage import Entry
from evenly.together import from_first, together
from evenly.world import current_world

KIND, VERSION = "evenly checkpoint", 2
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")


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
        return sorted(found, key=_order, reverse=True)

    def about(self) -> dict[int, About]:
        """What is known of those whose manifest can be read, by step."""
        found = {}
        for path in reversed(self.all()):
            try:
                found[step_of(path)] = About.read(read_manifest(path)["about"])
            except (StorageError, KeyError, TypeError, ValueError):
                continue  # damaged, and left for `newest` to report
        return found

    def at(self, step: int) -> Path | None:
        """The checkpoint of this step; where it was saved again, the later one."""
        return next((path for path in self.all() if step_of(path) == step), None)

    def begin(self, step: int) -> Path:
        """Where the checkpoint of this step is written until it is sealed.

        A step may be saved again, after an evaluation that was owed; its folder has a number then,
        and the one before goes when it is whole.
        """
        with telling(self.folder / f"step-{step:09d}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            storage.clean(self.folder)
            before = self.at(step)
            folder = self.folder / f"step-{step:09d}"
            if before is not None and is_whole(before):
                folder = folder.with_name(f"{folder.name}-{_order(before)[1] + 1}")
            elif before is not None:
                storage.remove(before)  # damaged, and its place is needed
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
        folder = storage.final_of(partial)
        with telling(folder):
            (partial / STATE).write_text(json.dumps({"state": plain, "homes": homes}))
            files[STATE] = storage.entry_of(partial / STATE)
            storage.seal(
                partial, folder, kind=KIND, version=VERSION, files=files, about=about._asdict()
            )
        # No run should end because old checkpoints do not go.
        with contextlib.suppress(OSError):
            self._let_go(folder, about.step)

    def _let_go(self, newest: Path, step: int) -> None:
        """Remove what no rule wants. What cannot be read, and what a run that was further has left,
        is neither counted nor touched.
        """
        found = {s: one for s, one in self.about().items() if s <= step}
        stay = self.keep.stay(list(found.values())) | {step}
        for path in self.all():
            again = step_of(path) == step and path != newest
            if again or (step_of(path) in found and step_of(path) not in stay):
                storage.remove(path)

    def _newest(self) -> Path | None:
        for path in self.all():
            try:
                check(path)
                return path
            except FormatError:
                raise  # not damaged: a run must not begin anew beside it, or write over it
            except StorageError as error:
                warnings.warn(f"{error} The one before it is used.", EvenlyWarning, stacklevel=2)
        return None


def step_of(path: Path) -> int:
    return _order(path)[0]


def _order(path: Path) -> tuple[int, int]:
    """The step, and how often it was saved before."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2] or 0)


def read_manifest(path: Path) -> dict[str, Any]:
    return storage.manifest(path, kind=KIND, version=VERSION)


def check(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest."""
    storage.check(path, kind=KIND, version=VERSION)


def is_whole(path: Path) -> bool:
    try:
        check(path)
    except FormatError:
        raise
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
