"""Which rank is slow, and whether by data or by computing.

In synchronous training all ranks' steps take equally long, because the fast wait for the slow. So
each times what a step takes by itself, without the wait in the exchange of gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from evenly.watchdog.beats import Beat

SLOWER = 1.5
"""How many times the others' time makes a straggler."""
_SAMPLES = 5
_DIFFERENCE = 0.005  # seconds; less is noise, and costs nobody much


class Straggler(NamedTuple):
    rank: int
    own: float
    others: float
    data: float


def stragglers(beats: Mapping[int, Beat]) -> list[Straggler]:
    """Ranks that take longer than the median of the others by a half or more."""
    timed = {
        rank: (beat.own, beat.data or 0.0)
        for rank, beat in beats.items()
        if beat.own is not None and beat.samples >= _SAMPLES and beat.phase != "left"
    }
    found = []
    for rank, (own, data) in timed.items():
        rest = [other for member, (other, _) in timed.items() if member != rank]
        if not rest:
            continue
        others = statistics.median(rest)
        if own >= SLOWER * others and own - others >= _DIFFERENCE:
            found.append(Straggler(rank, own, others, data))
    return found


class Patience:
    """Says a straggler once it has been one for a while, and again much later."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._told: dict[int, float] = {}

    def due(self, found: list[Straggler], now: float, wait: float) -> list[Straggler]:
        """Those that have been slow for ``wait`` seconds and were not told in ten times that."""
        self._since = {s.rank: self._since.get(s.rank, now) for s in found}
        due = [
            s
            for s in found
            if now - self._since[s.rank] >= wait
            and now - self._told.get(s.rank, float("-inf")) >= 10 * wait
        ]
        self._told.update({s.rank: now for s in due})
        return due
