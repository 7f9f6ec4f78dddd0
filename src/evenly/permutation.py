"""Keyed shuffles in O(1) memory.

A generalised Feistel network over Z_a x Z_b, where a * b is the length or just above it. Results
that fall outside the length are sent through again (cycle walking), which keeps the map a
bijection. The arithmetic is our own, so no library release can change the order of a saved run.
"""

from hashlib import blake2b
from math import isqrt
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenly.errors import SettingError

VERSION = 1
"""Part of every checkpoint's meaning: it changes if, and only if, any order changes."""

LONGEST = 2**40
"""The largest length: a 64-bit product then holds 40 hash bits times a side of the domain."""

# 12 rounds are ample for large sides, but a side of 2, as lengths 3 to 8 have, mixes slowly: with
# a million seeds even 16 rounds fail a chi-square test there. A short order is one call or two, so
# more rounds cost little. benchmarks/permutation.py prints the tests by number of rounds.
_ROUNDS = 12
_SHORT = 256
_ROUNDS_SHORT = 32

# Four work arrays of this many 64-bit numbers stay in a core's second-level cache.
_BLOCK = 8192

_MIX = np.uint64(0xD6E8FEB86659FD93)
_FOLD = np.uint64(32)
_DROPPED_BITS = np.uint64(24)
_KEPT_BITS = np.uint64(40)


class Permutation:
    """A bijection of ``range(length)`` fixed by (version, length, seed, epoch) and nothing else.

    Any position can be asked for at any time; nothing is stored per sample. It is a shuffle for
    training, uniform as far as our tests can see, and not a cipher: it hides no secrets.
    ``length`` is 1 to 2**40; ``seed`` and ``epoch`` are any integers, negative or huge.
    """

    def __init__(self, length: int, seed: int, epoch: int = 0) -> None:
        try:
            length, seed, epoch = index(length), index(seed), index(epoch)
        except TypeError:
            raise SettingError(
                f"length={length!r}, seed={seed!r}, epoch={epoch!r} are not all integers, so they "
                "name no order: give integers"
            ) from None
        if not 1 <= length <= LONGEST:
            raise SettingError(
                f"length={length} has no permutation here, only 1 to 2**40 have: "
                "check the number of samples"
            )
        self.length = length
        # An even side makes odd permutations reachable: every shift of an odd cycle is an even
        # permutation, so between two odd sides half of all orders could never appear.
        side = isqrt(length - 1) + 1
        side += side % 2
        self._left_side = np.uint64(side)
        self._right_side = np.uint64(-(-length // side))
        rounds = _ROUNDS_SHORT if length < _SHORT else _ROUNDS
        self._keys = [_round_key(length, seed, epoch, number) for number in range(rounds)]

    def __call__(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return which sample stands at each position; one dimension, may be empty.

        A call has a fixed cost of about 0.1 ms (0.2 to 0.6 ms below 256 samples), so ask for
        thousands of positions at once.
        """
        positions = np.asarray(positions)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise SettingError(
                f"positions came as {positions.dtype} of shape {positions.shape}, and an order has "
                "whole places in one row: give a one-dimensional integer array"
            )
        if not positions.size:
            return np.empty(0, np.int64)
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.length:
            raise SettingError(
                f"positions from {low} to {high} leave the order of {self.length} samples: "
                f"give positions from 0 to {self.length - 1}"
            )
        numbers, length = positions.astype(np.uint64), np.uint64(self.length)
        for start in range(0, numbers.size, _BLOCK):
            self._shuffle(numbers[start : start + _BLOCK])
        outside = np.flatnonzero(numbers >= length)
        while outside.size:
            again = numbers[outside]
            self._shuffle(again)
            numbers[outside] = again
            outside = outside[again >= length]
        return numbers.view(np.int64)

    def _shuffle(self, numbers: NDArray[np.uint64]) -> None:
        """Permute the whole domain, range(a * b), in place."""
        left, right = numbers // self._right_side, numbers
        right -= left * self._right_side
        bits, spare = np.empty_like(left), np.empty_like(left)
        changed, read = left, right
        side, other = self._left_side, self._right_side
        for factor, offset in self._keys:
            np.multiply(read, factor, out=bits)
            np.add(bits, offset, out=bits)
            np.right_shift(bits, _FOLD, out=spare)
            np.bitwise_xor(bits, spare, out=bits)
            np.multiply(bits, _MIX, out=bits)
            # 40 hash bits, scaled to range(side) without a division.
            np.right_shift(bits, _DROPPED_BITS, out=bits)
            np.multiply(bits, side, out=bits)
            np.right_shift(bits, _KEPT_BITS, out=bits)
            # Addition modulo side without `%`: below side, the subtraction wraps to a huge number.
            np.add(changed, bits, out=changed)
            np.subtract(changed, side, out=spare)
            np.minimum(changed, spare, out=changed)
            changed, read, side, other = read, changed, other, side
        left *= self._right_side
        right += left


def _round_key(length: int, seed: int, epoch: int, number: int) -> tuple[np.uint64, np.uint64]:
    # Hexadecimal, because Python refuses to write huge integers in decimal.
    text = f"evenly {VERSION} {length:x} {seed:x} {epoch:x} {number:x}"
    digest = blake2b(text.encode(), digest_size=16).digest()
    factor, offset = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return np.uint64(factor | 1), np.uint64(offset)
