"""Fewer points that look the same: for the report, and for any page that shows a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Points = tuple[NDArray[np.int64], NDArray[np.float64]]


def downsampled(steps: Sequence[int], values: Sequence[float], limit: int) -> Points:
    """At most ``limit`` (4 or more) of the points, in their order.

    The first, the last, and the lowest and the highest of equally many points in between, so that
    no peak is lost. A nan is kept only where a stretch has nothing else.
    """
    x = np.asarray(steps, np.int64)
    y = np.asarray(values, np.float64)
    if len(y) <= limit:
        return x, y
    edges = np.linspace(1, len(y) - 1, limit // 2).astype(np.int64)
    nothing = np.isnan(y)
    low, high = np.where(nothing, np.inf, y), np.where(nothing, -np.inf, y)
    chosen = [0, len(y) - 1]
    for start, stop in pairwise(edges.tolist()):
        chosen += [start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())]
    kept = np.unique(np.asarray(chosen))
    return x[kept], y[kept]
