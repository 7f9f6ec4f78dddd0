"""One number over the steps."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable


class Series:
    """Steps and the values at them, in the order in which they came."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        last = f", last {self.values[-1]:.6g} at step {self.steps[-1]}" if len(self) else ""
        return f"Series({len(self)} values{last})"

    def add(self, step: int, value: float) -> None:
        # The values last: another thread takes their number for that of whole pairs.
        self.steps.append(step)
        self.values.append(value)

    def extend(self, steps: Iterable[int], values: Iterable[float]) -> None:
        self.steps.extend(steps)
        self.values.extend(values)

    def cut(self, step: int) -> int:
        """Forget what came after ``step``; how many that were."""
        kept = bisect_right(self.steps, step)
        gone = len(self) - kept
        del self.steps[kept:], self.values[kept:]
        return gone
