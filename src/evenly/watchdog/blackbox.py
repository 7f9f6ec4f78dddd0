"""A few numbers of a process that can be read when it cannot speak: a file that it maps.

A rank that is stopped, or whose compiled code holds Python's lock, gives no signs of life; what it
wrote last is here, to the very phase. Only the launcher of the same machine can look.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections.abc import MutableSequence
from pathlib import Path
from typing import NamedTuple

_BYTES = 64


class Recorded(NamedTuple):
    """The numbers, in their order."""

    phase: int
    epoch: int
    position: int
    step: int
    made: int
    around: int
    """The phase in which data are waited for, where that is not training."""


Box = MutableSequence[int]


def private() -> Box:
    """A box that nobody else sees."""
    return array("q", bytes(_BYTES))


def shared(path: str) -> Box:
    """A box in a file; a private one where that is not possible."""
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(number, _BYTES)
            return memoryview(mmap.mmap(number, _BYTES)).cast("q")  # type: ignore[return-value]
        finally:
            os.close(number)
    return private()


def look(path: Path) -> Recorded | None:
    """What a process has left in its box."""
    numbers = array("q")
    try:
        numbers.frombytes(path.read_bytes())
        return Recorded(*numbers[: len(Recorded._fields)])
    except (OSError, ValueError, TypeError):
        return None
