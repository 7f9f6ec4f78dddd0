"""Metrics of each piece of a step apart, merged in the order of the pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from evenly import metrics as measured
from evenly.collectives import all_gather_object
from evenly.errors import SettingError
from evenly.metrics.inventory import compare, find_holders
from evenly.metrics.merging import Order
from evenly.metrics.states import Report
from evenly.parcel import exchange
from evenly.tree import leaves, map_leaves

_NONE = torch.empty(0, dtype=torch.int64)


class PieceMetrics:
    """A copy of the metrics for each piece that this rank runs.

    Each sees its piece of every step. In the end the copies are merged as those of so many ranks
    would be, and there are as many whatever the number of processes. Costs a metric's state for
    each piece.
    """

    def __init__(self, metrics: Any, pieces: int, own: range) -> None:
        self._metrics, self._count, self._own = metrics, pieces, own
        self._copies: dict[int, Any] = {}
        self._positions: dict[int, list[Tensor]] = {}

    def update(self, piece: int, predictions: Any, target: Any, positions: Tensor) -> None:
        """``positions`` are those of the samples in the data set."""
        measured.update(self._copy(piece), predictions, target)
        self._positions.setdefault(piece, []).append(positions)

    def compute(self) -> Any:
        """The values over all pieces of all ranks; a meeting of all ranks."""
        problem, told = None, {}
        try:
            told = {piece: (self._reports(piece), self._seen(piece)) for piece in self._own}
        except Exception as error:
            # Told to the others, who would wait for this rank in the exchange.
            problem = error
        text = "" if problem is None else f"{type(problem).__name__}: {problem}"
        ranks = exchange((text, told), "computing metrics")
        if problem is not None:
            raise problem
        for rank, (failed, _) in enumerate(ranks):
            if failed:
                raise SettingError(f"rank {rank} cannot compute its metrics. {failed}")
        found = dict(sorted(entry for _, pieces in ranks for entry in pieces.items()))
        reports = [own for own, _ in found.values()]
        compare(reports)
        order = Order.by([positions for _, positions in found.values()])
        # One piece alone has nothing to merge, and is asked itself.
        base = self._metrics if self._count > 1 else self._copy(0)
        holders = find_holders(base, several=True)
        with contextlib.ExitStack() as stack:
            for place, holder in enumerate(holders):
                holder.report({})
                stack.callback(holder.restore)
                holder.borrow([own[place] for own in reports], order)
            return map_leaves(lambda metric: metric.compute(), base)

    def reset(self) -> None:
        self._positions = {}
        for copy in self._copies.values():
            for metric in leaves(copy):
                metric.reset()

    def merged_state(self) -> dict[str, Any]:
        """Every piece's state, for a checkpoint; a meeting of all ranks."""
        held = {
            str(piece): [measured.local_state(copy), self._seen(piece)]
            for piece, copy in self._copies.items()
        }
        return {piece: state for rank in all_gather_object(held) for piece, state in rank.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the pieces that are this rank's now."""
        for piece in self._own:
            if str(piece) in state:
                held, positions = state[str(piece)]
                measured.load_local_state(self._copy(piece), held)
                self._positions[piece] = [positions]

    def _copy(self, piece: int) -> Any:
        if piece not in self._copies:
            self._copies[piece] = made = measured.copies(self._metrics)
            for metric in leaves(made):
                if isinstance(metric, MetricCollection):
                    # By a piece's first batch, metrics would seem to share states that do not.
                    metric._enable_compute_groups = False
        return self._copies[piece]

    def _reports(self, piece: int) -> list[Report]:
        metrics = self._copies.get(piece, self._metrics)
        return [holder.report({}) for holder in find_holders(metrics, several=True)]

    def _seen(self, piece: int) -> Tensor:
        return torch.cat([_NONE, *self._positions.get(piece, [])])
