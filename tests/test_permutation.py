"""Every order is a true shuffle, is the same on every machine, and costs no memory."""

import itertools
import math
import tracemalloc
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from evenly.errors import SettingError
from evenly.permutation import LONGEST, VERSION, Permutation

Orders = NDArray[np.int64]

# All draws below are fixed, so a test passes always or never; a true shuffle would fall under
# this bound once in 10,000 tests.
UNLIKELY = 1e-4


def order(length: int, seed: int = 0, epoch: int = 0) -> Orders:
    return Permutation(length, seed, epoch)(np.arange(length))


@cache
def orders_by_seed(length: int) -> Orders:
    return np.stack([order(length, seed=seed) for seed in range(600)])


@cache
def orders_by_epoch(length: int) -> Orders:
    return np.stack([order(length, seed=7, epoch=epoch) for epoch in range(600)])


@cache
def orders_by_key(length: int) -> Orders:
    """Orders of 100,000 random keys, side by side: one by one they would take a minute."""
    permutation, random = Permutation(length, 0), np.random.default_rng(length)
    keys = random.integers(2**64, size=(len(permutation._keys), 2, 100_000), dtype=np.uint64)
    keys[:, 0] |= np.uint64(1)
    vars(permutation)["_keys"] = list(keys)
    numbers = np.tile(np.arange(length, dtype=np.uint64)[:, None], 100_000)
    permutation._shuffle(numbers)
    while (numbers >= length).any():
        again = numbers.copy()
        permutation._shuffle(again)
        numbers = np.where(numbers >= length, again, numbers)
    return numbers.T.astype(np.int64)


SHORT = [2, 3, 4, 5, 6, 7, 16, 100]
DRAWS = [
    *itertools.product([orders_by_seed, orders_by_epoch], SHORT),
    *itertools.product([orders_by_key], [2, 3, 4, 5, 6, 7, 8, 9, 16]),
]
FEW = [(draw, length) for draw, length in DRAWS if length <= 5]


def chance(observed: NDArray[np.int64], expected: NDArray[np.float64] | float, free: int) -> float:
    """The chance that a true shuffle strays at least this far (chi-square)."""
    return float(chi2.sf(np.sum((observed - expected) ** 2 / expected), free))


def joint(left: Orders, right: Orders, length: int, groups: int) -> NDArray[np.int64]:
    cells = left * groups // length * groups + right * groups // length
    return np.bincount(cells, minlength=groups * groups).reshape(groups, groups)


def reference(length: int, seed: int, epoch: int, position: int) -> int:
    """Version 1 in plain Python integers, with the `%` and `divmod` that the code avoids."""
    a = math.isqrt(length - 1) + 1
    a += a % 2
    b = math.ceil(length / a)
    keys = []
    for number in range(32 if length < 256 else 12):
        text = f"evenly 1 {length:x} {seed:x} {epoch:x} {number:x}".encode()
        digest = blake2b(text, digest_size=16).digest()
        keys.append([int.from_bytes(half, "little") for half in (digest[:8], digest[8:])])
    while True:
        left, right = divmod(position, b)
        for number, (factor, offset) in enumerate(keys):
            bits = ((right if number % 2 == 0 else left) * (factor | 1) + offset) % 2**64
            bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93 % 2**64 >> 24
            if number % 2 == 0:
                left = (left + (bits * a >> 40)) % a
            else:
                right = (right + (bits * b >> 40)) % b
        position = left * b + right
        if position < length:
            return position


@pytest.mark.parametrize("lengths", [range(1, 301), [1000, 1023, 1024, 4097, 8192, 8193, 65537]])
def test_every_sample_appears_exactly_once(lengths: list[int]) -> None:
    for length in lengths:
        for epoch in range(2):
            assert sorted(order(length, 3, epoch)) == list(range(length)), length


@pytest.mark.parametrize("length", [2**20 + 1, 10**9, 2**33 - 1, 2**40 - 1, 2**40])
def test_no_sample_appears_twice_in_a_long_order(length: int) -> None:
    ends = np.concatenate([np.arange(100_000), np.arange(length - 100_000, length)])
    spread = np.random.default_rng(0).integers(length, size=100_000)
    positions = np.unique(np.concatenate([ends, spread]))
    samples = Permutation(length, 1)(positions)
    assert samples.min() >= 0
    assert samples.max() < length
    assert np.unique(samples).size == positions.size


@pytest.mark.parametrize(("draw", "length"), DRAWS)
def test_every_sample_is_equally_likely_at_every_position(
    draw: Callable[[int], Orders], length: int
) -> None:
    orders = draw(length)
    observed = np.stack([np.bincount(column, minlength=length) for column in orders.T])
    assert chance(observed, len(orders) / length, (length - 1) ** 2) > UNLIKELY


@pytest.mark.parametrize(("draw", "length"), DRAWS)
def test_the_sample_at_one_position_says_nothing_about_another(
    draw: Callable[[int], Orders], length: int
) -> None:
    orders, groups = draw(length), min(length, 5)
    sizes = np.bincount(np.arange(length) * groups // length).astype(np.float64)
    pairs = (np.outer(sizes, sizes) - np.diag(sizes)) / (length * (length - 1)) * len(orders)
    possible = pairs > 0
    positions = itertools.islice(itertools.combinations(range(length), 2), 40)
    chances = [
        chance(
            joint(orders[:, first], orders[:, second], length, groups)[possible],
            pairs[possible],
            int(possible.sum()) - 1,
        )
        for first, second in positions
    ]
    assert min(chances) * len(chances) > UNLIKELY


@pytest.mark.parametrize(("draw", "length"), FEW)
def test_all_orders_of_a_few_samples_are_equally_likely(
    draw: Callable[[int], Orders], length: int
) -> None:
    orders = draw(length)
    _, seen = np.unique(orders, axis=0, return_counts=True)
    observed = np.pad(seen, (0, math.factorial(length) - len(seen)))
    assert chance(observed, len(orders) / len(observed), len(observed) - 1) > UNLIKELY


@pytest.mark.parametrize("length", [4, 9])
def test_even_and_odd_orders_are_equally_likely(length: int) -> None:
    orders = orders_by_key(length)
    pairs = itertools.combinations(range(length), 2)
    inversions = sum((orders[:, i] > orders[:, j]).astype(np.int64) for i, j in pairs)
    assert chance(np.bincount(inversions % 2, minlength=2), len(orders) / 2, 1) > UNLIKELY


@pytest.mark.parametrize("length", [5000, 10_007, 2**20 + 1, 10**9, 2**40])
@pytest.mark.parametrize("distance", [1, 2, 64, 4096])
def test_neighbours_in_a_long_order_are_unrelated(length: int, distance: int) -> None:
    samples = Permutation(length, 5)(np.arange(min(length, 200_000)))
    observed = joint(samples[:-distance], samples[distance:], length, 16)
    assert chance(observed, observed.sum() / 256, 255) > UNLIKELY


@pytest.mark.parametrize("length", [100, 10_000, 10**9])
@pytest.mark.parametrize("other", [(1, 0), (0, 1), (-1, 0), (2**64, 0), (0, 2**32), (1, -1)])
def test_seeds_and_epochs_give_unrelated_orders(length: int, other: tuple[int, int]) -> None:
    positions = np.arange(min(length, 100_000))
    here, there = Permutation(length, 0)(positions), Permutation(length, *other)(positions)
    # Two unrelated orders agree at one position on average, whatever their length.
    assert np.sum(here == there) <= 8
    observed = joint(here, there, length, 10)
    assert chance(observed, observed.sum() / 100, 99) > UNLIKELY


def test_any_integer_is_a_seed() -> None:
    seeds = [0, 1, -1, 2**32, 2**64, 2**64 + 1, -(2**200), 10**5000]
    assert len({tuple(order(1000, seed)) for seed in seeds}) == len(seeds)
    from_numpy: Any = np.int64(-3)
    assert np.array_equal(order(1000, from_numpy), order(1000, -3))


@pytest.mark.parametrize("length", [1, 2, 3, 9, 255, 256, 1000, 2**20 + 1, 10**9, 2**40])
@pytest.mark.parametrize("key", [(0, 0), (-5, 3), (2**70, 10**6)])
def test_the_order_is_that_of_the_written_definition(length: int, key: tuple[int, int]) -> None:
    positions = np.unique(np.linspace(0, length - 1, 40).astype(np.int64))
    expected = [reference(length, *key, int(position)) for position in positions]
    assert Permutation(length, *key)(positions).tolist() == expected


# If one of these changes, saved runs would resume in another order: raise VERSION instead.
GOLDEN: dict[tuple[int, int, int], list[int]] = {
    (1, 0, 0): [0],
    (2, 0, 0): [1, 0],
    (3, 1, 0): [0, 1, 2],
    (7, 0, 0): [1, 5, 2, 0, 6, 3, 4],
    (10, 0, 0): [0, 3, 9, 5, 8, 4, 7, 1],
    (10, 0, 1): [3, 4, 5, 9, 1, 6, 8, 7],
    (1000, 42, 0): [512, 943, 695, 474, 712, 42, 202, 967],
    (1437, 0, 0): [1256, 554, 1206, 45, 643, 1265, 539, 83],
    (1437, 0, 1): [430, 334, 746, 1118, 1073, 428, 491, 1100],
    (1048577, -1, 7): [691670, 1035041, 631813, 1004354, 930290, 306672, 296433, 62916],
    (1000000000, 0, 0): [
        34834822,
        318672928,
        674164982,
        53930758,
        555357339,
        751879096,
        130194348,
        593298418,
    ],
    (1000000000, 1208925819614629174706176, 3): [
        217654334,
        581124161,
        987340606,
        544740933,
        807258144,
        352822706,
        309159749,
        495067710,
    ],
    (1099511627776, 0, 0): [
        760621080129,
        351892622871,
        894228360851,
        1012309872951,
        162311749590,
        468539814469,
        695563289683,
        963707778306,
    ],
}


@pytest.mark.parametrize(("key", "samples"), GOLDEN.items())
def test_the_order_never_changes_within_a_version(
    key: tuple[int, int, int], samples: list[int]
) -> None:
    assert VERSION == 1
    assert Permutation(*key)(np.arange(len(samples))).tolist() == samples


def test_positions_come_in_any_integer_type_layout_and_order() -> None:
    permutation, expected = Permutation(200, 4), order(200, 4)
    for kind in ("int16", "uint8", "int64", "uint64"):
        positions = np.arange(200).astype(kind)
        samples = permutation(positions[::-3])
        assert samples.dtype == np.int64
        assert np.array_equal(samples, expected[::-3])
        assert np.array_equal(positions, np.arange(200))
    assert permutation(np.array([], np.int64)).shape == (0,)
    empty_list: Any = []
    assert permutation(empty_list).dtype == np.int64
    assert permutation(np.array([5, 5])).tolist() == [expected[5]] * 2


def test_a_billion_samples_start_without_a_table() -> None:
    tracemalloc.start()
    try:
        Permutation(10**9, 0)(np.arange(10**9 - 50_000, 10**9))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**20


@pytest.mark.parametrize("length", [0, -1, LONGEST + 1])
def test_a_length_without_an_order_is_refused(length: int) -> None:
    with pytest.raises(SettingError, match=rf"length={length} .* 1 to 2\*\*40"):
        Permutation(length, 0)


@pytest.mark.parametrize("given", [(3.0, 0, 0), (3, "0", 0), (3, 0, None)])
def test_what_is_not_an_integer_is_refused(given: tuple[int, int, int]) -> None:
    with pytest.raises(SettingError, match="give integers"):
        Permutation(*given)


@pytest.mark.parametrize(
    "positions", [np.array([-1]), np.array([10]), np.array([0, 2**63], np.uint64)]
)
def test_a_position_outside_the_order_is_refused(positions: NDArray[np.int64]) -> None:
    with pytest.raises(SettingError, match="give positions from 0 to 9"):
        Permutation(10, 0)(positions)


@pytest.mark.parametrize("positions", [np.zeros((2, 2), int), np.array(1), np.array([0.5])])
def test_positions_of_the_wrong_form_are_refused(positions: NDArray[np.int64]) -> None:
    with pytest.raises(SettingError, match="give a one-dimensional integer array"):
        Permutation(10, 0)(positions)
