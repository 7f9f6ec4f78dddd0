"""The proof that an epoch used the samples of its plan: two digests that must be equal.

A digest is the sum, modulo 2**64, of a hash of each (step, sample). It does not depend on the order
in which they are added, so ranks add up what they loaded, and a reader adds up what the plan says,
years later and on another machine. One sample too many, too few, or in another step changes it,
except with a chance of about 2**-64. It shows mistakes; it is no defence against forgers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenly.permutation import VERSION
from evenly.plan import Plan

Numbers = NDArray[np.int64]

_BLOCK = 2**16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31))
_MODULUS = 2**64


def digest(steps: Numbers, samples: Numbers) -> int:
    """Of samples, each with the step of the epoch that it was used in."""
    keys = _mixed(steps.astype(np.uint64)) + samples.astype(np.uint64)
    return int(_mixed(keys).sum(dtype=np.uint64))


def added(*digests: int) -> int:
    """The digest of all of them together."""
    return sum(digests) % _MODULUS


def written(number: int) -> str:
    """As it stands in the record: 16 hexadecimal digits, which no JSON reader rounds."""
    return f"{number:016x}"


def plan_of(entry: Mapping[str, Any]) -> Plan | None:
    """The plan that a record holds; None if its orders are those of another release."""
    if entry.get("permutation") != VERSION:
        return None
    names = ("length", "batch_size", "shuffle", "seed", "tail")
    return Plan(**{name: entry[name] for name in names})


def planned(plan: Plan, epoch: int) -> tuple[int, int]:
    """How many samples an epoch is to use, and their digest. It makes the whole order: about 10 s
    for 10**8 samples.
    """
    count = min(plan.length, plan.steps * plan.batch_size)
    whole = replace(plan, batch_size=_BLOCK, tail="keep")  # the order does not depend on it
    total = start = 0
    for _, samples in whole.walk(epoch):
        kept = samples[: max(0, count - start)]
        places = np.arange(start, start + len(kept), dtype=np.int64)
        total += digest(places // plan.batch_size, kept)
        start += len(samples)
    return count, total % _MODULUS


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of 64 bits, with a good mix of all bits of each number."""
    bits = numbers + _GOLDEN
    bits ^= bits >> _SHIFTS[0]
    bits *= _ONE
    bits ^= bits >> _SHIFTS[1]
    bits *= _TWO
    bits ^= bits >> _SHIFTS[2]
    return bits
