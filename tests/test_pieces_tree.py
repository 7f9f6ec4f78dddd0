"""The canonical tree: whoever adds up which part of it, the sum is the same sum."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.errors import SettingError
from evenly.pieces.tree import Node, Route, cover, fold, halves
from evenly.plan import Plan, pieces_of, share, split

counts = st.integers(1, 70)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int]:
    """(pieces, how many of them have samples, processes)"""
    pieces = draw(counts)
    return pieces, draw(st.integers(1, pieces)), draw(st.integers(1, pieces))


def text(pieces: int, values: dict[Node, str]) -> str:
    """A sum written out, brackets and all: equal texts are equal sums to the bit."""
    return fold(pieces, values, lambda left, right: f"({left}+{right})")


def run(pieces: int, route: Route, rank: int) -> tuple[list[str], int]:
    """What a rank does with the stack; and how many values it held at a time."""
    stack: list[str] = []
    most = 0
    for piece, merges in route.merges.items():
        stack.append(str(piece))
        most = max(most, len(stack))
        for _ in range(merges):
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left}+{right})")
    return stack, most


@given(worlds())
def test_every_number_of_processes_computes_the_sum_of_one(world: tuple[int, int, int]) -> None:
    pieces, live, size = world
    alone = text(pieces, {(piece, piece + 1): str(piece) for piece in range(live)})
    found: dict[Node, str] = {}
    for rank in range(size):
        route = Route.of(pieces, live, rank, size)
        values, _ = run(pieces, route, rank)
        assert list(route.merges) == [p for p in pieces_of(pieces, rank, size) if p < live]
        found |= dict(zip(route.covers[rank], values, strict=True))
    assert text(pieces, found) == alone


@given(worlds())
def test_a_rank_holds_few_gradients_however_many_pieces_it_runs(
    world: tuple[int, int, int],
) -> None:
    pieces, live, size = world
    height = math.ceil(math.log2(pieces)) if pieces > 1 else 0
    for rank in range(size):
        _, most = run(pieces, Route.of(pieces, live, rank, size), rank)
        assert most <= 2 * height + 1
    _, alone = run(pieces, Route.of(pieces, live, 0, 1), 0)
    assert alone <= height + 1


@given(worlds())
def test_ranks_send_only_what_they_cannot_add_up_themselves(world: tuple[int, int, int]) -> None:
    pieces, live, size = world
    for rank in range(size):
        own = pieces_of(pieces, rank, size)
        nodes = cover(pieces, live, own)
        below = [p for start, stop in nodes for p in range(start, min(stop, live))]
        assert below == [p for p in own if p < live]
        for left, right in pairwise(nodes):  # else they were one node
            assert all(halves(node) != (left, right) for node in _nodes((0, pieces)))


def _nodes(node: Node) -> list[Node]:
    if node[1] - node[0] == 1:
        return [node]
    return [node, *(below for half in halves(node) for below in _nodes(half))]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_powers_of_two_need_one_value_of_each_rank(size: int) -> None:
    assert [len(nodes) for nodes in Route.of(8, 8, 0, size).covers] == [1] * size


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 200), st.integers(0, 5))
def test_pieces_are_the_same_samples_at_any_process_count(
    pieces: int, batch: int, length: int, seed: int
) -> None:
    plan = Plan(length=length, batch_size=batch, shuffle=True, seed=seed)
    alone = dict(plan.walk(1, pieces=pieces))
    for size in {1, 2, 3, pieces} & set(range(1, pieces + 1)):
        ranks = [dict(plan.walk(1, rank=r, size=size, pieces=pieces)) for r in range(size)]
        for step, whole in alone.items():
            joined = [i for rank in ranks for i in rank[step].tolist()]
            assert joined == whole.tolist()
            for rank in range(size):
                first, stop = share(len(whole), rank, size, pieces)
                own = pieces_of(pieces, rank, size)
                bounds = [split(len(whole), piece, pieces) for piece in own]
                assert (bounds[0][0], bounds[-1][1]) == (first, stop)
                assert ranks[rank][step].tolist() == whole.tolist()[first:stop]


def test_more_processes_than_pieces_are_refused_with_what_to_do() -> None:
    with pytest.raises(SettingError, match=r"pieces=3 cannot be given to 4 processes.*at most 3"):
        pieces_of(3, 0, 4)
    with pytest.raises(SettingError, match="at most 3"):
        Plan(length=9, batch_size=3).walk(0, rank=0, size=4, pieces=3)
