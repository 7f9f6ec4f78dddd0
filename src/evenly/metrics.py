"""Metrics over all ranks: what torchmetrics objects, or your own, give for the whole data set.

::

    metrics = {"accuracy": MulticlassAccuracy(10), "worst": WorstError()}
    for part in loader.epoch(0):
        evenly.metrics.update(metrics, model(part.data[0]), part.data[1])
    print(evenly.compute(metrics))  # the same on every rank, and on one process
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from evenly.errors import DisagreementError, SettingError
from evenly.inventory import compare, find_holders
from evenly.meeting import Group, size_of
from evenly.merging import Order
from evenly.parcel import exchange
from evenly.states import Report
from evenly.tree import map_leaves


def compute(metrics: Any, *, positions: Tensor | None = None, group: Group = None) -> Any:
    """The value of each metric over all ranks, in the structure that was given.

    Two collectives, whatever the metrics: every rank calls it, one without samples too. Each
    metric's own state is as before afterwards. ``positions`` are those of this rank's samples in
    the data set, in the order of updates: states that are lists of samples are then put in that
    order, else they are in rank order. Refuses what cannot be merged, on all ranks.
    """
    holders, problem, told = [], None, _Told("", [], None)
    try:
        holders = find_holders(metrics, several=size_of(group) > 1)
        joined: dict[int, Any] = {}
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
        return map_leaves(lambda metric: metric.compute(), metrics)


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
