"""Metrics over all ranks: what torchmetrics objects, or your own, give for the whole data set.

::

    metrics = {"accuracy": MulticlassAccuracy(10), "worst": WorstError()}
    for part in loader.epoch(0):
        evenly.metrics.update(metrics, model(part.data[0]), part.data[1])
    print(evenly.compute(metrics))  # the same on every rank, and on one process
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torchmetrics.wrappers import MetricTracker

from evenly import tracing
from evenly.collectives import all_gather_object
from evenly.errors import DisagreementError, SettingError
from evenly.meeting import Group, size_of
from evenly.metrics.inventory import compare, find_holders
from evenly.metrics.merging import Order
from evenly.metrics.states import Report
from evenly.parcel import exchange
from evenly.tree import leaves, map_leaves
from evenly.world import open_world

_VERSION = 1
_HALF = (torch.float16, torch.bfloat16)


def compute(metrics: Any, *, positions: Tensor | None = None, group: Group = None) -> Any:
    """The value of each metric over all ranks, in the structure that was given.

    At most two collectives, whatever the metrics: every rank calls it, one without samples too.
    Refuses what cannot be merged, on all ranks. Each metric's own state is as before afterwards.
    ``positions`` are those of this rank's samples in the data set, in the order of updates: states
    that are lists of samples are then put in that order, else they are in rank order.
    """
    holders, problem, told = [], None, _Told("", [], None)
    try:
        several = size_of(group) > 1
        holders = find_holders(metrics, several=several)
        joined: dict[int, Any] | None = {} if several else None
        told = _Told("", [holder.report(joined) for holder in holders], positions)
    except Exception as error:
        # Told to the others, who would wait for this rank in the exchange.
        problem, told = error, _Told(f"{type(error).__name__}: {error}", [], None)
    everyone = exchange(told, "computing metrics", group=group)
    if problem is not None:
        raise problem
    for rank, other in enumerate(everyone):
        if other.problem:
            raise SettingError(f"rank {rank} cannot compute its metrics. {other.problem}")
    compare([other.reports for other in everyone])
    order = _order([other.positions for other in everyone])
    with contextlib.ExitStack() as stack:
        for place, holder in enumerate(holders):
            stack.callback(holder.restore)
            holder.borrow([other.reports[place] for other in everyone], order)
        values = map_leaves(lambda metric: metric.compute(), metrics)
    if tracing.active is not None and not tracing.active.by_trainer:
        tracing.active.metrics(values if isinstance(values, Mapping) else {"computed": values})
    return values


def update(metrics: Any, predictions: Any, target: Any) -> None:
    """Update each metric of a structure, in full precision whatever the model computes in.

    Half-precision tensors are raised to float32 and autocast is off. A tensor or list of
    no predictions changes nothing, because many metrics cannot take one. Talks to no other rank.
    """
    rows = isinstance(predictions, list) or (isinstance(predictions, Tensor) and predictions.dim())
    if rows and not len(predictions):
        return
    first = next((leaf for leaf in leaves(predictions) if isinstance(leaf, Tensor)), None)
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        predictions, target = map_leaves(_raised, predictions), map_leaves(_raised, target)
        for metric in leaves(metrics):
            metric.update(predictions, target)


def copies(metrics: Any, *, device: torch.device | None = None) -> Any:
    """Independent copies, reset, so that training, validation and test share no state; on
    ``device`` where one is given and the metric has a ``to`` method.
    """
    copied = deepcopy(metrics)
    for metric in leaves(copied):
        if not isinstance(metric, MetricTracker) or len(metric):
            metric.reset()
        if device is not None and callable(getattr(metric, "to", None)):
            metric.to(device)
    return copied


def merged_state(metrics: Any) -> dict[str, Any]:
    """As `local_state`, of what all ranks hold together; a meeting of all ranks.

    Given to one rank of any number, while the others start anew, it goes on exactly.
    """
    found = find_holders(metrics, several=True)
    ranks = all_gather_object([holder.report({}) for holder in found])
    compare(ranks)
    states = {}
    for place, holder in enumerate(found):
        try:
            holder.borrow([reports[place] for reports in ranks], None)
            states[holder.path] = holder.snapshot()
        finally:
            holder.restore()
        states[holder.path]["updates"] = sum(reports[place].updates for reports in ranks)
    return {"version": _VERSION, "metrics": states}


def local_state(metrics: Any) -> dict[str, Any]:
    """A copy of what this rank's metrics hold, as tensors and plain values, for a checkpoint.

    It belongs to this rank of this many: on another number of processes, start over. What
    `compute` refuses on several ranks is refused here too, on one as well.
    """
    found = find_holders(metrics, several=True)
    return {"version": _VERSION, "metrics": {h.path: h.snapshot() for h in found}}


def load_local_state(metrics: Any, state: Mapping[str, Any]) -> None:
    """Let metrics go on from what `local_state` gave."""
    if state.get("version") != _VERSION:
        raise SettingError(
            f"the metrics' state has version {state.get('version')!r} and this Evenly reads "
            f"{_VERSION}. Load it with the version that wrote it, or reset the metrics."
        )
    found = {holder.path: holder for holder in find_holders(metrics, several=True)}
    if found.keys() != state["metrics"].keys():
        raise SettingError(
            f"the state is of the metrics {', '.join(state['metrics'])}; these are "
            f"{', '.join(found)}. Make the same metrics, or reset them."
        )
    for path, snapshot in state["metrics"].items():
        found[path].load(snapshot)


def check_metric(
    make: Callable[[], Any], batches: Iterable[tuple[Any, ...]], *, tolerance: float = 1e-6
) -> Any:
    """Check that a metric gives on several ranks what it gives on one; returns the value.

    Run it on every rank: ``run_ranks(check_metric, 3, MyMetric, batches)``. ``make`` makes the
    metric and each batch is what its update takes. Ranks get uneven shares, with three or more
    the last one nothing. A difference, a value that changes when it is asked for again, or a
    reset that forgets something raises AssertionError on all ranks.
    """
    batches = list(batches)
    with open_world() as world:
        alone, own = make(), make()
        for batch in batches:
            alone.update(*batch)
        expected = _compute_alone(alone)
        start, stop = _uneven(len(batches), world.rank, world.size)
        for what in ("on one process", "before asking", "before the reset"):
            if what != "before asking":
                own.reset()
                for batch in batches[start:stop]:
                    own.update(*batch)
            value = compute(own)
            if not _close(value, expected, tolerance):
                raise AssertionError(
                    f"{type(own).__name__} gives {value} on {world.size} processes and {expected} "
                    f"{what}. Is each attribute that update() changes in `synced` (or declared by "
                    "add_state), with the right rule, and set anew in reset()?"
                )
    return expected


def _compute_alone(metric: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for holder in find_holders(metric, several=False):
            stack.callback(holder.restore)
            holder.borrow([holder.report(None)], None)
        return metric.compute()


def _uneven(length: int, rank: int, size: int) -> tuple[int, int]:
    """Each rank's run is shorter than that of the one before, and the last of several empty."""
    sharing = max(1, size - 1 if size > 2 else size)
    bounds = [0]
    for place in range(sharing):
        bounds.append(bounds[-1] + sharing - place)
    cuts = [length * bound // bounds[-1] for bound in bounds]
    return (cuts[rank], cuts[rank + 1]) if rank < sharing else (length, length)


def _close(value: Any, expected: Any, tolerance: float) -> bool:
    try:
        torch.testing.assert_close(
            value, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_device=False
        )
    except AssertionError:
        return False
    except (TypeError, ValueError):  # neither numbers nor tensors
        return bool(value == expected)
    return True


def _raised(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf


class _Told:
    """What a rank tells the others."""

    def __init__(self, problem: str, reports: list[Report], positions: Tensor | None) -> None:
        self.problem = problem
        self.reports = reports
        self.positions = positions


def _order(positions: list[Tensor | None]) -> Order | None:
    given = [own for own in positions if own is not None]
    if not given:
        return None
    if len(given) < len(positions):
        missing = next(rank for rank, own in enumerate(positions) if own is None)
        raise DisagreementError(
            f"rank {missing} gave compute() no positions and others did. A rank without samples "
            "gives an empty tensor."
        )
    return Order.by(given)
