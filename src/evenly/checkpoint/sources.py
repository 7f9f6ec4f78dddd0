"""Where weights come from: a run's folder, a checkpoint, or files of other tools."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from evenly import storage, tracing
from evenly.checkpoint.folder import CheckpointFolder, check, is_whole, step_of
from evenly.checkpoint.reading import Checkpoint
from evenly.checkpoint.retention import Mode, check_mode, ranked
from evenly.errors import SettingError, StorageError
from evenly.wording import some

_NESTED = ("state_dict", "model_state_dict", "model", "module", "weights")
_COMPILED, _WRAPPED = "_orig_mod.", "module."


@dataclass(frozen=True)
class Weights:
    """Tensors by name, without the prefixes of wrappers, read when they are asked for."""

    where: str
    read: Mapping[str, Callable[[], Tensor]]


def plain(name: str) -> str:
    """Without what torch.compile puts between."""
    return name.replace(_COMPILED, "")


def open_weights(
    source: str | os.PathLike[str],
    *,
    step: int | None = None,
    best: str | None = None,
    mode: Mode | None = None,
    average: bool = False,
) -> Weights:
    """See `load_weights`."""
    path = tracing.found(source)
    if path.is_dir():
        return _of_checkpoint(_chosen(path, step=step, best=best, mode=mode), average)
    if step is not None or best is not None or average:
        raise SettingError(f"{path} is one file; step, best and average are for a run's folder.")
    if not path.is_file():
        raise StorageError(f"there is no file or folder {path}.")
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path)


def _chosen(path: Path, *, step: int | None, best: str | None, mode: Mode | None) -> Path:
    """The checkpoint that is meant by a run's folder, or by its own."""
    if (path / storage.MANIFEST).exists():
        if step is not None or best is not None:
            raise SettingError(f"{path} is one checkpoint; step and best are for a run's folder.")
        check(path)
        return path
    folder = CheckpointFolder(path / "checkpoints")
    there = folder.all()
    if not there:
        raise StorageError(f"there are no checkpoints in {folder.folder}.")
    if step is not None and best is not None:
        raise SettingError("give step or best, not both.")
    if step is not None:
        chosen = folder.at(step)
        if chosen is None:
            steps = some([step_of(one) for one in there])
            raise StorageError(f"there is no checkpoint of step {step}; there are {steps}.")
        there = [chosen]
    if best is not None:
        if mode is None and not best.endswith("loss"):
            raise SettingError(
                f"best={best!r}: say whether lower or higher is better, by mode 'min' or 'max' "
                "(--mode)."
            )
        mode = mode or "min"
        check_mode("best", mode)
        known = list(folder.about().values())
        found = [folder.at(one.step) for one in ranked(known, best, mode)]
        there = [path for path in found if path is not None]
        if not there:
            names = sorted({name for one in known for name in one.values})
            raise StorageError(
                f"no checkpoint in {folder.folder} was evaluated for {best!r}; there is "
                f"{some(names, 8) or 'nothing'}."
            )
    for one in there:
        if is_whole(one):
            return one
    raise StorageError(f"no checkpoint in {folder.folder} is whole.")


def _of_checkpoint(path: Path, average: bool) -> Weights:
    checkpoint = Checkpoint.open(path)
    prefixes = ["model."]
    if average:
        kinds = [one[0] for one in checkpoint.state.get("callbacks", ())]
        prefixes = [f"callbacks.{i}.1.module." for i, kind in enumerate(kinds) if kind == "EMA"]
        if not prefixes:
            raise StorageError(f"{path} has no averaged weights: its run had no callbacks.EMA().")
    prefix = prefixes[0]
    names = [name for name in checkpoint.homes if name.startswith(prefix)]
    read = {name[len(prefix) :]: _reader(checkpoint.tensor, name) for name in names}
    return Weights(str(path), read)


def _of_safetensors(path: Path) -> Weights:
    def read(name: str) -> Tensor:
        with safetensors.safe_open(path, framework="pt") as opened:
            return opened.get_tensor(name).clone()  # type: ignore[no-any-return]

    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            return _named(path, read, list(opened.keys()))
    except (OSError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None


def _of_torch(path: Path) -> Weights:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"{path} cannot be read as tensors alone ({reason}). Evenly runs no code from files: "
            "load it where you trust it, and save model.state_dict()."
        ) from None
    for name in _NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    tensors: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
    names = [name for name, value in tensors.items() if isinstance(value, Tensor)]
    if not names:
        raise StorageError(f"{path} holds no tensors by name; save model.state_dict().")
    return _named(path, tensors.__getitem__, names)


def _named(path: Path, read: Callable[[str], Tensor], names: list[str]) -> Weights:
    own = {plain(name): name for name in names}
    while own and all(name.startswith(_WRAPPED) for name in own):
        own = {short.removeprefix(_WRAPPED): name for short, name in own.items()}
    return Weights(str(path), {short: _reader(read, name) for short, name in own.items()})


def _reader(read: Callable[[Any], Tensor], name: Any) -> Callable[[], Tensor]:
    return lambda: read(name)
