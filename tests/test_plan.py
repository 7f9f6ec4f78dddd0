"""The same samples form each step on any number of processes, each sample once."""

import pickle
import time
import tracemalloc
from dataclasses import FrozenInstanceError
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.errors import SettingError
from evenly.plan import Plan, microbatches, split

LENGTHS = st.integers(0, 10_000)
SIZES = st.integers(1, 64)
BATCHES = st.integers(1, 512)
PLANS = st.builds(
    Plan,
    length=LENGTHS,
    batch_size=BATCHES,
    shuffle=st.booleans(),
    seed=st.integers(),
    tail=st.sampled_from(["keep", "drop"]),
)
QUICK = settings(max_examples=150, deadline=None)


def whole(plan: Plan, epoch: int, rank: int = 0, size: int = 1, start: int = 0) -> list[list[int]]:
    return [part.tolist() for _, part in plan.walk(epoch, rank=rank, size=size, start=start)]


def some_steps(plan: Plan) -> list[int]:
    """The first, a middle and the last two steps, where mistakes would hide."""
    last = plan.steps - 1
    return sorted({0, last // 2, max(0, last - 1), last}) if plan.steps else []


@QUICK
@given(PLANS, st.integers(0, 100))
def test_an_epoch_uses_every_sample_once_but_for_a_dropped_tail(plan: Plan, epoch: int) -> None:
    samples = [sample for part in whole(plan, epoch) for sample in part]
    assert len(samples) == len(set(samples))
    dropped = plan.length % plan.batch_size if plan.tail == "drop" else 0
    assert len(samples) == plan.length - dropped
    assert set(samples) <= set(range(plan.length))
    if not plan.shuffle:
        assert samples == list(range(plan.length - dropped))


@QUICK
@given(PLANS, st.integers(0, 100), SIZES)
def test_a_step_is_the_same_on_any_number_of_ranks(plan: Plan, epoch: int, size: int) -> None:
    for step in some_steps(plan):
        parts = [plan.indices(epoch, step, rank, size) for rank in range(size)]
        assert np.array_equal(np.concatenate(parts), plan.indices(epoch, step))


@QUICK
@given(PLANS, SIZES)
def test_counts_known_everywhere_are_what_the_ranks_get(plan: Plan, size: int) -> None:
    for step in some_steps(plan):
        counts = plan.counts(step, size)
        assert counts == [plan.count_of(step, rank, size) for rank in range(size)]
        assert counts == [len(plan.indices(0, step, rank, size)) for rank in range(size)]
        assert sum(counts) == plan.count(step)
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)


@QUICK
@given(PLANS, st.integers(0, 100), SIZES, st.data())
def test_walking_gives_what_seeking_gives(
    plan: Plan, epoch: int, size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    walked = list(plan.walk(epoch, rank=rank, size=size))
    assert [step for step, _ in walked] == list(range(plan.steps))
    for step in some_steps(plan):
        assert walked[step][1].dtype == np.int64
        assert np.array_equal(walked[step][1], plan.indices(epoch, step, rank, size))


@QUICK
@given(PLANS, SIZES, st.data())
def test_a_walk_from_a_later_step_is_the_rest_of_the_walk(
    plan: Plan, size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    start = data.draw(st.integers(0, plan.steps))
    assert whole(plan, 3, rank, size, start) == whole(plan, 3, rank, size)[start:]


@QUICK
@given(PLANS)
def test_steps_follow_each_other_without_gaps(plan: Plan) -> None:
    bounds = [plan.bounds(step) for step in range(plan.steps)]
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(plan.count(step) == plan.batch_size for step in range(plan.steps - 1))
    if bounds:
        assert bounds[0][0] == 0
        assert 1 <= plan.count(plan.steps - 1) <= plan.batch_size


@given(st.integers(0, 10_000), SIZES)
def test_a_split_is_contiguous_and_balanced(count: int, size: int) -> None:
    runs = [split(count, rank, size) for rank in range(size)]
    assert runs[0][0] == 0
    assert runs[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert {stop - start for start, stop in runs} <= {count // size, count // size + 1}


@given(st.integers(0, 10_000), st.integers(1, 600))
def test_microbatches_are_the_fewest_balanced_ones_within_the_limit(count: int, limit: int) -> None:
    runs = microbatches(count, limit)
    assert [sample for run in runs for sample in range(*run)] == list(range(count))
    lengths = [stop - start for start, stop in runs]
    assert len(runs) == -(-count // limit)
    if runs:
        assert min(lengths) >= 1
        assert max(lengths) <= min(limit, min(lengths) + 1)


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_batch_size() -> None:
    def samples(batch_size: int, seed: int, epoch: int) -> list[int]:
        plan = Plan(length=500, batch_size=batch_size, shuffle=True, seed=seed)
        return [sample for part in whole(plan, epoch) for sample in part]

    assert samples(7, 0, 0) == samples(64, 0, 0)
    assert len({tuple(samples(7, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_an_epoch_may_have_no_steps() -> None:
    empty = Plan(length=0, batch_size=4, shuffle=True)
    short = Plan(length=3, batch_size=4, tail="drop")
    for plan in (empty, short):
        assert plan.steps == 0
        assert whole(plan, 0) == []
        with pytest.raises(SettingError, match="step=0 is not in this epoch of 0 steps"):
            plan.indices(0, 0)


def test_a_rank_without_samples_still_walks_every_step() -> None:
    plan = Plan(length=10, batch_size=3, shuffle=True)
    assert whole(plan, 0, rank=6, size=7) == [[], [], [], []]
    assert plan.counts(3, 7) == [1, 0, 0, 0, 0, 0, 0]


def test_a_batch_larger_than_the_data_set_is_one_step() -> None:
    plan = Plan(length=10, batch_size=2**70)
    assert plan.steps == 1
    assert whole(plan, 0, rank=1, size=3) == [[4, 5, 6]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_trillion_samples_on_a_hundred_thousand_ranks_need_arithmetic_alone(
    shuffle: bool,
) -> None:
    length, size, batch_size = 10**12, 100_000, 1_234_567
    plan = Plan(length=length, batch_size=batch_size, shuffle=shuffle, seed=1)
    began = time.perf_counter()
    middle, last = plan.steps // 2, plan.steps - 1
    assert plan.steps == 810_001
    assert plan.count(last) == length - batch_size * last
    assert sum(plan.counts(last, size)) == plan.count(last)
    for rank in (0, 34_566, 34_567, size - 1):
        step, part = next(plan.walk(5, rank=rank, size=size, start=middle))
        assert step == middle
        assert len(part) == plan.count_of(middle, rank, size) == (13 if rank < 34_567 else 12)
        assert np.array_equal(part, plan.indices(5, middle, rank, size))
    assert time.perf_counter() - began < 1


def test_a_shuffled_epoch_of_a_billion_samples_starts_at_once() -> None:
    plan = Plan(length=10**9, batch_size=64, shuffle=True)
    times = []
    for epoch in range(5):
        began = time.perf_counter()
        next(plan.walk(epoch))
        times.append(time.perf_counter() - began)
    assert min(times) < 0.01
    tracemalloc.start()
    try:
        next(plan.walk(5))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20


def test_walking_holds_no_more_than_a_block_or_a_step() -> None:
    plan = Plan(length=10**9, batch_size=100, shuffle=True)
    for step, part in islice(plan.walk(0), 2000):
        assert part.base is not None
        # The first block is small, so that the first step comes at once.
        assert part.base.nbytes <= (8 * 2048 if step < 20 else 8 * 16384)
    large = Plan(length=10**9, batch_size=50_000)
    assert all(
        part.base is not None and part.base.nbytes == 8 * 50_000
        for _, part in islice(large.walk(0), 3)
    )


def test_a_part_can_be_changed_without_touching_the_next() -> None:
    plan = Plan(length=20, batch_size=5)
    walk = plan.walk(0)
    _, first = next(walk)
    first[:] = -1
    assert [part.tolist() for _, part in walk] == whole(plan, 0, start=1)


def test_a_plan_is_a_value() -> None:
    plan = Plan(length=10, batch_size=3, shuffle=True, seed=-4)
    numpy_ten: Any = np.int32(10)
    assert plan == Plan(length=numpy_ten, batch_size=3, shuffle=True, seed=-4)
    assert type(Plan(length=numpy_ten, batch_size=3).length) is int
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len({plan, plan}) == 1
    with pytest.raises(FrozenInstanceError):
        plan.length = 11  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": -1}, "length=-1 is below 0"),
        ({"length": 2**40 + 1}, r"length=\d+ is beyond 2\*\*40"),
        ({"length": 10.0}, "length=10.0 is of type float"),
        ({"length": True}, "length=True is of type bool"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"batch_size": "4"}, "batch_size='4' is of type str"),
        ({"seed": None}, "seed=None is of type NoneType"),
        ({"seed": False}, "seed=False is of type bool"),
        ({"shuffle": "no"}, "shuffle='no' is neither True nor False"),
        ({"tail": "pad"}, 'tail=\'pad\' .* "keep" .* "drop"'),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Plan(**{"length": 10, "batch_size": 4, **wrong})


def test_a_step_rank_or_epoch_that_does_not_exist_is_refused() -> None:
    plan = Plan(length=10, batch_size=4, shuffle=True)
    with pytest.raises(SettingError, match="step=3 is not in this epoch of 3 steps"):
        plan.count(3)
    with pytest.raises(SettingError, match="step=-1 is not in this epoch"):
        plan.indices(0, -1)
    with pytest.raises(SettingError, match="rank=2 does not exist among size=2 ranks"):
        plan.indices(0, 0, 2, 2)
    with pytest.raises(SettingError, match="size=0 is below 1"):
        plan.counts(0, 0)
    with pytest.raises(SettingError, match="epoch=-1 is below 0"):
        plan.indices(-1, 0)
    with pytest.raises(SettingError, match="limit=0 is below 1"):
        microbatches(4, 0)
    # A walk refuses at the call, before its first step.
    with pytest.raises(SettingError, match="rank=-1 is below 0"):
        plan.walk(0, rank=-1, size=2)
    with pytest.raises(SettingError, match="start=4 lies behind this epoch of 3 steps"):
        plan.walk(0, start=4)
