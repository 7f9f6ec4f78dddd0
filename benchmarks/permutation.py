"""What a shuffle costs, and how many rounds it needs: ``python benchmarks/permutation.py``.

Prints four tables: speed by length, cost of a step, start of an epoch beside torch's
``DistributedSampler``, and the chi-square tests that chose the number of rounds. Takes one to two
minutes, on one core.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from evenly.permutation import Permutation
from evenly.plan import Plan

BILLION = 10**9


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """The shortest of several runs: the others were disturbed."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def speed() -> None:
    print(f"\n{'length':>18}  million indices/s   (1,048,576 positions in one call)")
    positions = np.arange(2**20)
    for length in (2**20, 2**20 + 1, 10**7, BILLION, 2**30 + 1, 2**39 + 1, 2**40):
        rate = positions.size / seconds(partial(Permutation(length, 0), positions))
        print(f"{length:>18,}  {rate / 1e6:17.2f}")


def step() -> None:
    plan = Plan(length=BILLION, batch_size=64, shuffle=True)
    wide = Plan(length=BILLION, batch_size=64 * 8, shuffle=True)
    digits = Plan(length=1437, batch_size=64, shuffle=True)
    count = 20_000

    def walk(plan: Plan, size: int) -> None:
        for _ in itertools.islice(plan.walk(0, rank=size - 1, size=size), count):
            pass

    def alone(plan: Plan) -> float:
        """The mean over epochs: how much cycle walking is needed depends on the key."""
        middle = plan.steps // 2
        return sum(seconds(partial(plan.indices, epoch, middle)) for epoch in range(100)) / 100

    rows = {
        "walk, length 1,000,000,000, 1 rank": seconds(lambda: walk(plan, 1)) / count,
        "walk, length 1,000,000,000, rank 7 of 8": seconds(lambda: walk(wide, 8)) / count,
        "walk, length 1,437, 1 rank": seconds(lambda: walk(digits, 1)) / digits.steps,
        "indices, length 1,000,000,000 (one step, sought alone)": alone(plan),
    }
    for length in (5, 9, 100, 255, 256):
        short = Plan(length=length, batch_size=64, shuffle=True)
        rows[f"indices, length {length:,}"] = alone(short)
    print("\nmicroseconds   one step of 64 indices, or of all where there are fewer")
    for name, took in rows.items():
        print(f"{took * 1e6:12.2f}   {name}")


def start_of_plan(length: int) -> Callable[[], Any]:
    plan = Plan(length=length, batch_size=64, shuffle=True)
    return lambda: next(plan.walk(0))


def start_of_sampler(length: int) -> Callable[[], Any]:
    from torch.utils.data import Dataset, DistributedSampler

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return length

    sampler: DistributedSampler[int] = DistributedSampler(
        Numbers(), num_replicas=2, rank=0, shuffle=True
    )
    return lambda: next(iter(sampler))


STARTS = {"Plan.walk": start_of_plan, "DistributedSampler": start_of_sampler}


def measure_start(name: str, length: int) -> None:
    """Time and peak of resident memory, in a process of its own. Linux only."""
    first = STARTS[name](length)
    # "5" sets the peak back to what is resident now; imports had a peak of their own.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    began = time.perf_counter()
    first()
    took = time.perf_counter() - began
    print(json.dumps([took * 1e3, (peak() - before) / 1024]))


def peak() -> int:
    """The peak of this process's resident memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def start() -> None:
    print(f"\n{'first step of a shuffled epoch':32} {'length':>18} {'ms':>10} {'peak MiB':>10}")
    for name, length in (
        ("DistributedSampler", 10**6),
        ("DistributedSampler", 10**7),
        ("Plan.walk", 10**7),
        ("Plan.walk", BILLION),
        ("Plan.walk", 2**40),
    ):
        command = [sys.executable, __file__, name, str(length)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        took, memory = json.loads(result.stdout)
        print(f"{name:32} {length:>18,} {took:10.2f} {memory:10.2f}")


def orders(length: int, rounds: int, chunk: int, keys: int) -> NDArray[np.int64]:
    """The orders of many random keys, one in each column, made side by side."""
    permutation, random = Permutation(length, 0), np.random.default_rng([length, rounds, chunk])
    drawn = random.integers(2**64, size=(rounds, 2, keys), dtype=np.uint64)
    drawn[:, 0] |= np.uint64(1)
    vars(permutation)["_keys"] = list(drawn)
    numbers = np.tile(np.arange(length, dtype=np.uint64)[:, None], keys)
    permutation._shuffle(numbers)
    while (numbers >= length).any():
        again = numbers.copy()
        permutation._shuffle(again)
        numbers = np.where(numbers >= length, again, numbers)
    return numbers.astype(np.int64)


def pair_chance(length: int, rounds: int, chunks: int = 500, keys: int = 2000) -> float:
    """The chance that true shuffles put pairs of samples as unevenly as these (chi-square).

    The smallest over all pairs of positions, times the number of pairs (Bonferroni).
    """
    pairs = list(itertools.combinations(range(length), 2))
    observed = np.zeros((len(pairs), length * length))
    for chunk in range(chunks):
        drawn = orders(length, rounds, chunk, keys)
        for row, (first, second) in enumerate(pairs):
            cells = drawn[first] * length + drawn[second]
            observed[row] += np.bincount(cells, minlength=length * length)
    possible = observed[:, ~np.eye(length, dtype=bool).ravel()]
    expected = chunks * keys / possible.shape[1]
    chances = chi2.sf(((possible - expected) ** 2 / expected).sum(1), possible.shape[1] - 1)
    return float(min(1, chances.min() * len(pairs)))


def rounds() -> None:
    tried, lengths = (4, 8, 12, 16, 24, 32), (3, 4, 5, 6, 7, 8, 9, 12, 16, 20)
    print("\nchance of a million true shuffles being as uneven (pairs); under 0.0001 is a failure")
    print(f"{'length':>8}" + "".join(f"{count:>4} rounds" for count in tried))
    for length in lengths:
        print(f"{length:>8}" + "".join(f"{pair_chance(length, count):11.1g}" for count in tried))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure_start(sys.argv[1], int(sys.argv[2]))
    else:
        speed()
        step()
        start()
        rounds()
