"""A trace as it was written: the ranks of one run, their steps and their numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from evenly.errors import LaunchError, StorageError
from evenly.tracing.journal import INDEX, VERSION
from evenly.tracing.prints import sampled

Key = tuple[int, int]
"""Which optimizer, and which of its steps, from 1 on."""


@dataclass(frozen=True)
class Tensors:
    """Tensors by name that a rank had at one point, read when they are asked for."""

    file: Path | None
    whole: bool
    digests: dict[str, str]
    group: str

    @property
    def names(self) -> list[str]:
        return list(self.digests)

    def read(self, name: str, *, sample: bool) -> Tensor:
        """The tensor, or the elements of it that a sample holds."""
        assert self.file is not None
        with safe_open(self.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(f"{self.group}:{name}")
        return sampled(tensor) if sample and self.whole else tensor


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank."""

    record: dict[str, Any]
    gradient: Tensors
    parameters: Tensors
    buffers: Tensors

    @property
    def samples(self) -> list[int] | None:
        found: list[int] | None = self.record["samples"]
        return found

    @property
    def weight(self) -> int:
        """How many samples this rank had, as far as is known."""
        return len(self.samples) if self.samples is not None else int(self.record["rows"])


@dataclass(frozen=True)
class Value:
    """A metric or predictions, as one rank has them."""

    number: float | None = None
    file: Path | None = None
    whole: bool = True
    digest: str = ""
    shape: tuple[int, ...] = ()

    def read(self) -> Tensor:
        assert self.file is not None
        with safe_open(self.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor("value")
        return tensor


@dataclass
class Rank:
    """What one rank wrote down."""

    initial: dict[int, dict[str, Any]] = field(default_factory=dict)
    start: dict[int, Tensors] = field(default_factory=dict)
    steps: dict[Key, Step] = field(default_factory=dict)
    losses: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    values: dict[tuple[str, str, int], Value] = field(default_factory=dict)


class Run:
    """All ranks of one run of the program."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.ranks = [read_rank(folder / f"rank{rank}") for rank in range(size)]

    def check(self) -> None:
        """Raise LaunchError if no step was recorded."""
        if not self.keys:
            raise LaunchError(
                f"on {self.size} process{'es' if self.size > 1 else ''} the program made no step "
                "that could be recorded. A loop that uses neither the Trainer nor evenly.replicate "
                "or evenly.Loader needs two lines: `import evenly` and, when model and optimizer "
                "are made, `evenly.trace(model, optimizer)`."
            )

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @cached_property
    def keys(self) -> list[Key]:
        """The steps that every rank made, in the order in which rank 0 made them."""
        return [key for key in self.first.steps if all(key in rank.steps for rank in self.ranks)]

    def steps(self, key: Key) -> list[Step]:
        return [rank.steps[key] for rank in self.ranks]

    def samples(self, key: Key) -> list[int] | None:
        """The samples of a step over all ranks, in rank order; None where nobody told."""
        told = [step.samples for step in self.steps(key)]
        if any(samples is None for samples in told):
            return None
        return [index for samples in told for index in samples or ()]

    def prints(self, key: Key) -> list[int]:
        return [p for step in self.steps(key) for p in step.record["prints"]]

    def weights(self, key: Key) -> list[int]:
        return [step.weight for step in self.steps(key)]

    def loss(self, number: int) -> float | None:
        """Of a step over all ranks: what they agree on, else their mean by weight."""
        told = [rank.losses[number] for rank in self.ranks if number in rank.losses]
        if not told:
            return None
        if all(value == told[0][0] for value, _ in told):
            return told[0][0]
        known = [weight for _, weight in told if weight is not None]
        if len(known) < len(told):
            steps = self.steps((0, number)) if (0, number) in self.keys else []
            known = [float(step.weight) for step in steps]
            if len(known) != len(told) or not any(known):
                known = [1.0] * len(told)
        pairs = [(value, w) for (value, _), w in zip(told, known, strict=True) if w]
        return sum(value * weight for value, weight in pairs) / sum(w for _, w in pairs)


def read_rank(folder: Path) -> Rank:
    """What the rank of this folder wrote down; nothing of it is run."""
    rank = Rank()
    file = folder / INDEX
    if not file.is_file():
        return rank
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            _take(rank, record, folder)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"line {number} of {file} cannot be read: {error!r}") from None
    return rank


def _take(rank: Rank, record: dict[str, Any], folder: Path) -> None:
    kind = record["kind"]
    if kind == "start" and record["version"] != VERSION:
        raise StorageError(f"{folder} has version {record['version']} and this reads {VERSION}.")
    if kind == "initial":
        rank.initial[record["optimizer"]] = record
        rank.start[record["optimizer"]] = _tensors(record, folder, "parameter")
    elif kind == "step":
        key = (record["optimizer"], record["step"])
        groups = (_tensors(record, folder, g) for g in ("gradient", "parameter", "buffer"))
        rank.steps[key] = Step(record, *groups)
        if record["losses"] and key[1] not in rank.losses:
            rank.losses[key[1]] = _mean(record["losses"])
    elif kind == "loss":
        rank.losses[record["step"]] = (record["value"], record["weight"])
    elif kind == "value":
        number, name = record.get("value"), record.get("file")
        rank.values[record["quantity"], record["name"], record["number"]] = Value(
            number=number,
            file=None if name is None else folder / name,
            whole=record.get("whole", True),
            digest=record.get("digest", ""),
            shape=tuple(record.get("shape", ())),
        )


def _tensors(record: dict[str, Any], folder: Path, group: str) -> Tensors:
    prefix = f"{group}:"
    digests = {
        name.removeprefix(prefix): digest
        for name, digest in record["digests"].items()
        if name.startswith(prefix)
    }
    file = None if record["file"] is None else folder / record["file"]
    return Tensors(file, record["whole"], digests, group)


def _mean(losses: list[list[float]]) -> tuple[float, float | None]:
    """Of the runs of a step; a weight below 0 was not told."""
    if any(weight < 0 for _, weight in losses):
        return sum(value for value, _ in losses) / len(losses), None
    weight = sum(weight for _, weight in losses)
    if len(losses) == 1:
        return losses[0][0], weight
    return sum(value * w for value, w in losses) / weight, weight
