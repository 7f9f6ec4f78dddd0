"""A checkpoint that is whole, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from evenly.checkpoint.plain import put_together
from evenly.errors import StorageError

STATE = "state.json"

Homes = dict[str, list[tuple[str, int, int]]]
"""By name of a tensor: the files that hold its rows, in order, each with its first row and the one
after its last."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors are read when they are asked for, one at a time, into the processor's memory."""

    path: Path
    state: Any
    """Everything but tensors, still taken apart."""
    homes: Homes

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """One whose files were compared with its manifest."""
        try:
            content = json.loads((path / STATE).read_bytes())
            homes = {name: [(str(f), int(a), int(b)) for f, a, b in rows]
                     for name, rows in content["homes"].items()}  # fmt: skip
            return Checkpoint(path, content["state"], homes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{path / STATE} cannot be read: {error!r}") from None

    def tensor(self, name: str) -> Tensor:
        rows = self.homes.get(name)
        if not rows:
            raise StorageError(f"{self.path} has no tensor {name!r}.")
        if len(rows) == 1:
            return self._read(rows[0][0], name)
        first = self._read(rows[0][0], name)
        whole = first.new_empty((rows[-1][2], *first.shape[1:]))
        whole[: len(first)] = first
        for file, start, stop in rows[1:]:
            whole[start:stop] = self._read(file, name)
        return whole

    def part(self, name: str) -> Any:
        """One part of the state, put together."""
        return put_together(self.state.get(name), self.tensor)

    def _read(self, file: str, name: str) -> Tensor:
        if Path(file).name != file:
            raise StorageError(f"{self.path} names a file {file!r}, which is not one inside it.")
        try:
            with safetensors.safe_open(self.path / file, framework="pt") as opened:
                # A copy: what is read is a view of the file, which may be removed or cut.
                return opened.get_tensor(name).clone()  # type: ignore[no-any-return]
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(f"{self.path / file} cannot be read: {error}") from None


def load_into(targets: Mapping[str, Tensor], state: Any, tensor: Callable[[str], Tensor]) -> None:
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
