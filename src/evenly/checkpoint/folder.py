"""The folder of checkpoints: saving one, finding the newest that is whole, letting old ones go."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from evenly import storage
from evenly.checkpoint.plain import put_together, taken_apart
from evenly.errors import EvenlyWarning, StorageError
from evenly.storage import Entry
from evenly.together import together
from evenly.turn import on_rank
from evenly.world import current_world

_KIND, _VERSION = "evenly checkpoint", 1
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole. Tensors are read when they are asked for, one at a time."""

    path: Path
    state: Any
    """Everything but tensors, still taken apart."""
    homes: dict[str, str]
    """Which file a tensor is in."""

    def tensor(self, name: str) -> Tensor:
        if name not in self.homes:
            raise StorageError(f"{self.path} has no tensor {name!r}.")
        with safetensors.safe_open(self.path / self.homes[name], framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def part(self, name: str) -> Any:
        """One part of the state, put together."""
        return put_together(self.state.get(name), self.tensor)


class CheckpointFolder:
    """Checkpoints by step, in a folder that all ranks see. ``keep`` newest ones stay."""

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """A new folder for this step, written by all ranks, each its share; a meeting of all.

        ``state`` is the same on every rank. If it cannot be written, all ranks raise and what was
        there before is untouched.
        """
        tensors: dict[str, Tensor] = {}
        plain = {name: taken_apart(part, name, tensors) for name, part in state.items()}
        folder = self.folder / f"step-{step:09d}"
        partial = on_rank(0)(lambda: self._begun(folder))()
        written = together(lambda: self._written(partial, tensors))
        on_rank(0)(lambda: self._sealed(partial, folder, plain, written))()
        return folder

    def newest(self) -> Checkpoint | None:
        """The newest that is whole, on every rank; a meeting of all. Damaged ones are reported."""
        path = on_rank(0)(self._newest)()
        return None if path is None else together(lambda: _opened(path))[current_world().rank]

    def all(self) -> list[Path]:
        """Every checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)

    def _newest(self) -> Path | None:
        for path in self.all():
            try:
                storage.check(path, kind=_KIND, version=_VERSION)
                return path
            except StorageError as error:
                warnings.warn(f"{error} The one before it is used.", EvenlyWarning, stacklevel=2)
        return None

    def _whole(self, path: Path) -> bool:
        try:
            storage.check(path, kind=_KIND, version=_VERSION)
        except StorageError:
            return False
        return True

    def _begun(self, folder: Path) -> Path:
        with _told(f"the checkpoint {folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            storage.clean(self.folder)
            if folder.exists() and not self._whole(folder):
                storage.remove(folder)  # its place is needed; a whole one is never written over
            partial = storage.partial_of(folder, uuid4().hex[:12])
            partial.mkdir()
            return partial

    def _written(self, partial: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's share of the tensors, in one file."""
        world = current_world()
        names = _share(tensors, world.rank, world.size)
        if not names:
            return {"files": {}, "homes": {}}
        name = f"tensors-{world.rank:05d}.safetensors"
        own = {n: tensors[n].to("cpu", copy=True).contiguous() for n in names}
        with _told(f"the checkpoint {partial}"):
            safetensors.torch.save_file(own, partial / name)
            entry = storage.entry_of(partial / name)
        return {"files": {name: entry}, "homes": dict.fromkeys(names, name)}

    def _sealed(
        self, partial: Path, folder: Path, plain: dict[str, Any], written: list[dict[str, Any]]
    ) -> None:
        files: dict[str, Entry] = {}
        homes: dict[str, str] = {}
        for one in written:
            files.update(one["files"])
            homes.update(one["homes"])
        with _told(f"the checkpoint {folder}"):
            (partial / _STATE).write_text(json.dumps({"state": plain, "homes": homes}))
            files[_STATE] = storage.entry_of(partial / _STATE)
            storage.seal(partial, folder, kind=_KIND, version=_VERSION, files=files)
        if self._keep is not None:
            for old in self.all()[self._keep :]:
                storage.remove(old)


class _told:  # noqa: N801 - reads as a block
    """Say which checkpoint an operating system's error is about, and what to do."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, OSError | safetensors.SafetensorError):
            raise StorageError(
                f"{self._what} could not be written: {error}. Earlier checkpoints are untouched. "
                "Make room, or see whether the folder is there and may be written to."
            ) from error


def _opened(path: Path) -> Checkpoint:
    try:
        content = json.loads((path / _STATE).read_bytes())
        return Checkpoint(path, content["state"], dict(content["homes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path / _STATE} cannot be read: {error!r}") from None


def _share(tensors: dict[str, Tensor], rank: int, size: int) -> list[str]:
    """The tensors that one rank writes: largest first, each to the rank with least so far."""
    loads = [0] * size
    mine = []
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        lightest = loads.index(min(loads))
        loads[lightest] += tensors[name].nbytes
        if lightest == rank:
            mine.append(name)
    return mine


def load_into(targets: dict[str, Tensor], state: Any, tensor: Callable[[str], Tensor]) -> None:
    """Copy saved tensors into those of a module, one at a time; names and shapes must fit."""
    saved = {} if state is None else dict(state)
    missing, foreign = sorted(targets.keys() - saved.keys()), sorted(saved.keys() - targets.keys())
    if missing or foreign:
        raise StorageError(
            f"the checkpoint is of another model: it lacks {missing[:4]} and has {foreign[:4]} "
            "besides. Build the model that was saved."
        )
    with torch.no_grad():
        for name, target in targets.items():
            value = put_together(saved[name], tensor)
            if value.shape != target.shape:
                raise StorageError(
                    f"{name} has shape {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(target.shape)} in the model. Build the model that was saved."
                )
            target.copy_(value)
