"""With pieces, 1 to P processes give the same bits: weights, state, buffers, every number."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenly.testing import run_ranks
from pieces_programs import Bits, apart, train_all, train_digits


@pytest.fixture(scope="module")
def alone() -> dict[str, Bits]:
    return run_ranks(train_all, 1, timeout=120)[0]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_bit_is_that_of_one_process(alone: dict[str, Bits], count: int) -> None:
    for rank in run_ranks(train_all, count, timeout=150):
        assert {name: apart(found, alone[name]) for name, found in rank.items()} == {
            name: [] for name in alone
        }


def test_a_run_that_ends_and_goes_on_with_4_3_1_and_8_processes_has_the_bits_of_one_that_did_not(
    tmp_path: Path, alone: dict[str, Bits]
) -> None:
    for count, stop in ((4, 5), (3, 10), (1, 17)):
        assert run_ranks(train_digits, count, "cnn", 3, tmp_path, stop, timeout=100)[0] == {}
    for rank in run_ranks(train_digits, 8, "cnn", 3, tmp_path, timeout=100):
        assert apart(rank, alone["a CNN with BatchNorm and dropout"]) == []
