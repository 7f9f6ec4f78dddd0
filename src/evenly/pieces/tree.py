"""The canonical tree: one binary tree over the pieces, which defines every sum.

A node is the run of leaves below it. The left half is the larger one, as the runs of `split` are,
so that ranks' runs of pieces fall together with nodes where the numbers allow. A leaf without
samples has no value, and a node with one value below it has that value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from evenly.plan import pieces_of

T = TypeVar("T")
Node = tuple[int, int]


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes below one that is not a leaf."""
    start, stop = node
    middle = (start + stop + 1) // 2
    return (start, middle), (middle, stop)


def fold(pieces: int, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Add up along the tree the values of nodes that lie side by side: ``add(left, right)``."""
    whole = _fold((0, pieces), values, add)
    if whole is None:
        raise ValueError("no piece has a value")
    return whole


def _fold(node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T | None:
    if node in values:
        return values[node]
    if node[1] - node[0] == 1:
        return None
    left, right = (_fold(half, values, add) for half in halves(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def cover(pieces: int, live: int, own: range) -> list[Node]:
    """The largest nodes whose leaves with samples, the first ``live``, are all in ``own``."""
    stop = min(own.stop, live)

    def walk(node: Node) -> list[Node]:
        first, last = node[0], min(node[1], live)
        if last <= own.start or first >= stop:
            return []
        if own.start <= first and last <= stop:
            return [node]
        return [found for half in halves(node) for found in walk(half)]

    return walk((0, pieces)) if own.start < stop else []


@dataclass(frozen=True)
class Route:
    """How one rank adds up a step with ``live`` pieces that have samples."""

    live: int
    merges: dict[int, int]
    """For each of its pieces: how many nodes are complete with it, smallest first. Each is the sum
    of the last two values on a stack that every piece is put on."""
    covers: list[list[Node]]
    """Which nodes every rank comes out with, in rank order."""

    @classmethod
    def of(cls, pieces: int, live: int, rank: int, size: int) -> "Route":
        covers = [cover(pieces, live, pieces_of(pieces, other, size)) for other in range(size)]
        merges: dict[int, int] = {}
        for node in covers[rank]:
            _count_merges(node, live, merges)
        return cls(live, merges, covers)


def _count_merges(node: Node, live: int, merges: dict[int, int]) -> None:
    if node[1] - node[0] == 1:
        merges[node[0]] = 0
        return
    left, right = halves(node)
    _count_merges(left, live, merges)
    if right[0] < live:
        _count_merges(right, live, merges)
        merges[max(merges)] += 1
