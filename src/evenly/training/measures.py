"""The metrics of the training batches, over the epoch that is going on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenly import metrics as measured
from evenly.errors import SettingError
from evenly.metrics.piecewise import PieceMetrics
from evenly.objective import Output
from evenly.part import Part
from evenly.tree import leaves


class TrainMeasures:
    """This rank's; brought together at the end of the epoch, in the order of the data set."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        # Which samples they have seen; not known of an epoch that was resumed.
        self._positions: list[Tensor] | None = []

    def update(self, part: Part, output: Output) -> None:
        if not self._metrics:
            return
        check_predictions(output)
        measured.update(self._metrics, output.predictions, output.target)
        if self._positions is not None:
            self._positions.append(part.indices)

    def compute(self) -> Any:
        """The values of the epoch, and a new start; a meeting of all ranks."""
        if not self._metrics:
            return {}
        positions = None
        if self._positions is not None:
            positions = torch.cat([torch.empty(0, dtype=torch.int64), *self._positions])
        values = measured.compute(self._metrics, positions=positions)
        self.reset()
        return values

    def reset(self) -> None:
        self._positions = []
        for metric in leaves(self._metrics):
            metric.reset()

    def merged_state(self) -> Any:
        """What all ranks hold together, for a checkpoint; a meeting of all."""
        return measured.merged_state(self._metrics) if self._metrics else None

    def load(self, state: Any, *, mine: bool) -> None:
        """Go on from what was saved, on the one rank it is given to."""
        if self._metrics and state is not None:
            self._positions = None
            if mine:
                measured.load_local_state(self._metrics, state)


class PieceMeasures(TrainMeasures):
    """The same with each piece's metrics apart, so that their sums are those of one process to the
    bit; merged in the order of the pieces.
    """

    def __init__(self, metrics: Any, pieces: int, own: range) -> None:
        self._pieces = PieceMetrics(metrics, pieces, own) if metrics else None

    def update(self, part: Part, output: Output) -> None:
        if self._pieces is None:
            return
        check_predictions(output)
        assert part.piece is not None
        self._pieces.update(part.piece, output.predictions, output.target, part.indices)

    def compute(self) -> Any:
        if self._pieces is None:
            return {}
        values = self._pieces.compute()
        self._pieces.reset()
        return values

    def reset(self) -> None:
        if self._pieces is not None:
            self._pieces.reset()

    def merged_state(self) -> Any:
        return None if self._pieces is None else self._pieces.merged_state()

    def load(self, state: Any, *, mine: bool) -> None:
        if self._pieces is not None and state is not None:
            self._pieces.load(state)


def check_predictions(output: Output) -> None:
    if output.predictions is None:
        raise SettingError(
            "there are metrics and no predictions to update them with: let step= return "
            "Output(predictions=..., target=...), or leave out the metrics."
        )
