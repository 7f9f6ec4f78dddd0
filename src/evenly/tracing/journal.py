"""The journal of one rank: JSON lines, and safetensors beside them. No pickle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from evenly.tracing.prints import digest, sampled

VERSION = 1
INDEX = "index.jsonl"
BUDGET = 512 << 20
"""Bytes of whole tensors of steps that one run may write, and as much again of predictions and
metrics; beyond it tensors are kept as samples."""

Named = dict[str, Tensor]


class Journal:
    """Rank 0 keeps the tensors of steps whole until its budget is spent, then evenly spaced
    elements of them, as the other ranks do from the start; all keep digests of the whole.
    """

    def __init__(self, folder: Path, *, rank: int, size: int) -> None:
        self._folder, self._rank = folder, rank
        self._index = (folder / INDEX).open("x")
        self._budget = BUDGET
        self._shared_budget = BUDGET // size
        self._counts: Counter[tuple[str, str]] = Counter()
        self.write({"kind": "start", "version": VERSION, "rank": rank, "size": size})

    def close(self) -> None:
        self._index.close()

    def write(self, record: dict[str, Any]) -> None:
        """One line, on disk at once: the program may be killed."""
        self._index.write(json.dumps(record) + "\n")
        self._index.flush()

    def keep(self, name: str, groups: dict[str, Named]) -> dict[str, Any]:
        """Write the tensors to a file, whole if they may be; what a line says of them."""
        size = sum(t.nbytes for named in groups.values() for t in named.values())
        whole = self._rank == 0 and size <= self._budget
        if whole:
            self._budget -= size
        file, digests = f"{name}.safetensors", {}
        tensors: Named = {}
        for group, named in groups.items():
            for label, tensor in named.items():
                key = f"{group}:{label}"
                digests[key] = digest(tensor)
                tensors[key] = (tensor if whole else sampled(tensor)).cpu().clone().contiguous()
        if tensors:
            save_file(tensors, self._folder / file)
        return {"file": file if tensors else None, "whole": whole, "digests": digests}

    def number(self, quantity: str, name: str, value: float) -> None:
        """A metric that is one number."""
        self._value(quantity, name, value=value)

    def tensor(self, quantity: str, name: str, value: Tensor) -> None:
        """Predictions, or a metric of several numbers."""
        tensor = value.detach().cpu().contiguous()
        if tensor.numel() == 1 and quantity == "metric":
            self.number(quantity, name, float(tensor))
            return
        whole = tensor.nbytes <= self._shared_budget
        if whole:
            self._shared_budget -= tensor.nbytes
        file = f"value-{sum(self._counts.values()):06d}.safetensors"
        save_file({"value": (tensor if whole else sampled(tensor)).clone()}, self._folder / file)
        about = {"file": file, "whole": whole, "digest": digest(tensor)}
        self._value(quantity, name, shape=list(tensor.shape), **about)

    def _value(self, quantity: str, name: str, **rest: Any) -> None:
        self._counts[quantity, name] += 1
        number = self._counts[quantity, name]
        self.write({"kind": "value", "quantity": quantity, "name": name, "number": number, **rest})
