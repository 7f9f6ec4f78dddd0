"""Fewer points of a series that grows: each point is looked at once, however long the run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenly.record.series import Series

_MOST = 600
"""Stretches of a line; each shows its lowest and its highest point."""


class Thinned:
    """Which points of a series to show: the ends, and the lowest and the highest of each of at most
    ``most`` stretches of equally many points.

    When there are too many stretches, neighbours become one. Between two such times the points
    that were chosen stay, except for those of the last stretch, so that little changes on a page.
    The series may only grow; after a cut, begin with a new one.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._width = 1
        self._end = 0
        """Of the whole stretches."""
        self._low: NDArray[np.int64] = np.empty(0, np.int64)
        self._high: NDArray[np.int64] = np.empty(0, np.int64)

    def places(self, series: Series) -> list[int]:
        """The places of the points to show, in order."""
        count = len(series)
        self._take(series, count)
        chosen = [*self._low.tolist(), *self._high.tolist()]
        if self._end < count:
            rest = np.array(series.values[self._end : count])
            low, high = _ends(rest.reshape(1, -1))
            chosen += [self._end + int(low[0]), self._end + int(high[0])]
        return sorted({0, *chosen, count - 1}) if count else []

    def _take(self, series: Series, count: int) -> None:
        while len(self._low) + (count - self._end) // self._width > self._most:
            self._widen(series)
        new = (count - self._end) // self._width
        if not new:
            return
        end = self._end + new * self._width
        low, high = _ends(np.array(series.values[self._end : end]).reshape(new, self._width))
        starts = self._end + self._width * np.arange(new)
        self._low = np.concatenate([self._low, starts + low])
        self._high = np.concatenate([self._high, starts + high])
        self._end = end

    def _widen(self, series: Series) -> None:
        """Make one of two stretches; an odd last one is begun again."""
        if len(self._low) % 2:
            self._low, self._high = self._low[:-1], self._high[:-1]
            self._end -= self._width
        pairs = np.arange(len(self._low) // 2)
        for name, place in (("_low", 0), ("_high", 1)):
            both = getattr(self, name).reshape(-1, 2)
            values = np.array([series.values[i] for i in both.ravel().tolist()], float)
            setattr(self, name, both[pairs, _ends(values.reshape(-1, 2))[place]])
        self._width *= 2


def _ends(block: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, where its lowest and its highest value are. A nan is neither if it can be."""
    nothing = np.isnan(block)
    low = np.where(nothing, np.inf, block).argmin(axis=1)
    return low, np.where(nothing, -np.inf, block).argmax(axis=1)
