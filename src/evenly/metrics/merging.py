"""Merging: one value of each rank made into the value that one process would have."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenly.errors import SettingError
from evenly.objective import Total

Rule = str | Callable[[list[Any]], Any]
"""``"sum"``, ``"min"``, ``"max"``, ``"cat"``, or a function of the list of all ranks' values."""

RULES = ("sum", "min", "max", "cat")


def merge_values(rule: Rule, values: Sequence[Any]) -> Any:
    """Merge numbers, tensors, Totals, lists or counters, one for each rank, in rank order.

    A rank without samples may hold None, which counts for nothing. A function gets the values as
    they are, None included.
    """
    if not isinstance(rule, str):
        return rule(list(values))
    held = [value for value in values if value is not None]
    if not held:
        return None
    if rule == "sum":
        return functools.reduce(_add, held)
    if rule == "cat":
        if isinstance(held[0], Tensor):
            return torch.cat([row.reshape(1) if row.dim() == 0 else row for row in held])
        return type(held[0])(itertools.chain.from_iterable(held))
    if rule == "min":
        return functools.reduce(torch.minimum if isinstance(held[0], Tensor) else min, held)
    if rule == "max":
        return functools.reduce(torch.maximum if isinstance(held[0], Tensor) else max, held)
    raise SettingError(f"the sync rule {rule!r} is none of {', '.join(RULES)} or a function.")


def merge_tensors(
    rule: str,
    values: Sequence[Tensor],
    *,
    default: Any,
    weights: Sequence[int],
    function: Callable[..., Any] | None,
) -> Tensor:
    """Merge tensors as torchmetrics' ``dist_reduce_fx`` says, without its slips.

    A sum counts a default that is not zero once and not once per rank, and a mean weighs each
    rank by its number of updates. Types are kept: torch would make int64 of smaller ones.
    """
    if rule == "cat":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(list(values))
    if rule == "none":
        return stacked
    if rule == "sum":
        total = stacked.sum(0)
        if isinstance(default, Tensor) and stacked.dtype != torch.bool and bool(default.any()):
            total = total - (len(values) - 1) * default.to(total.device)
        return total.to(stacked.dtype)
    if rule == "mean":
        return _mean(stacked, weights)
    if rule == "min":
        return stacked.amin(0)
    if rule == "max":
        return stacked.amax(0)
    if function is None:
        raise SettingError(f"the reduction {rule} is not known here.")
    reduced: Tensor = function(stacked)
    return reduced


def _mean(stacked: Tensor, weights: Sequence[int]) -> Tensor:
    if bool((stacked == stacked[0]).all()):
        return stacked[0]  # to the bit: it is a constant
    shares = torch.tensor(weights if any(weights) else [1] * len(weights), dtype=torch.float64)
    shares = (shares / shares.sum()).reshape(-1, *[1] * (stacked.dim() - 1)).to(stacked.device)
    kind = stacked.dtype if stacked.is_floating_point() or stacked.is_complex() else torch.float32
    return (stacked * shares).sum(0).to(kind)


def join(entries: list[Any]) -> list[Any]:
    """The entries of a "cat" state in one tensor, because many small ones travel slowly.

    Only if they fit together, and not if they are single numbers: of these, some metrics make more
    than their concatenation.
    """
    if len(entries) < 2 or any(not isinstance(e, Tensor) or e.dim() == 0 for e in entries):
        return entries
    if len({(entry.dtype, entry.device, entry.shape[1:]) for entry in entries}) > 1:
        return entries
    return [torch.cat(entries)]


class Order(NamedTuple):
    """Where samples belong in the data set: how many each rank has, and the order of them all."""

    counts: list[int]
    places: Tensor

    @classmethod
    def by(cls, positions: Sequence[Tensor]) -> Order:
        """``positions`` are those of each rank's samples in the data set."""
        places = torch.cat([own.reshape(-1).cpu() for own in positions]).argsort(stable=True)
        return cls([own.numel() for own in positions], places)

    def apply(self, rule: str, values: Sequence[list[Any]]) -> list[Any]:
        """All ranks' lists as one, in this order where each rank holds one entry (or, in a "cat"
        state, equally many rows) for each of its samples; else one rank after the other.
        """
        entries = list(itertools.chain.from_iterable(values))
        if [len(own) for own in values] == self.counts:
            return [entries[place] for place in self.places.tolist()]
        if rule != "cat" or not len(self.places):
            return entries
        rows = [sum(map(_rows, own)) for own in values]
        each = max(1, sum(rows) // len(self.places))
        joined = join(entries)
        if len(joined) > 1 or rows != [each * count for count in self.counts]:
            return entries
        samples = joined[0].reshape(len(self.places), -1)
        return [samples[self.places.to(samples.device)].reshape(joined[0].shape)]


def _rows(entry: Any) -> int:
    return len(entry) if isinstance(entry, Tensor) and entry.dim() else 1


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Total) and isinstance(other, Total):
        return Total(one.sum + other.sum, one.weight + other.weight)
    if isinstance(one, dict) and not hasattr(one, "subtract"):  # a Counter adds up by itself
        keys = [*one, *(key for key in other if key not in one)]
        return {key: merge_values("sum", [one.get(key), other.get(key)]) for key in keys}
    return operator.add(one, other)
