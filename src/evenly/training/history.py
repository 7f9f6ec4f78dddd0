"""The history of a run: every number by name, with the step at which it was so."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping


class Series:
    """One number over the steps."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        last = f", last {self.values[-1]:.6g} at step {self.steps[-1]}" if len(self) else ""
        return f"Series({len(self)} values{last})"


class History(Mapping[str, Series]):
    """``history["loss"].values`` are the losses of all steps; the same on every rank.

    Names: "loss" (each step), "train/..." (each epoch), "validation/..." (each evaluation), and
    what was noted or logged besides.
    """

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, name: str, step: int, value: float) -> None:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Series()
        series.steps.append(step)
        series.values.append(value)

    def __getitem__(self, name: str) -> Series:
        if name not in self._series:
            raise KeyError(f"{name!r}; there is {', '.join(self._series) or 'nothing yet'}")
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        return f"History({self._series!r})"
