"""The history of a run: every number by name, with the step at which it was so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from evenly.record.series import Series


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
        series.add(step, value)

    def __getitem__(self, name: str) -> Series:
        if name not in self._series:
            raise KeyError(f"{name!r}; there is {', '.join(self._series) or 'nothing yet'}")
        return self._series[name]

    def all(self) -> list[tuple[str, Series]]:
        """Every series as of now, though another thread may add one."""
        return list(self._series.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        return f"History({self._series!r})"


class Newcomers:
    """What has come into a history since it was last asked, also from another thread."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def skip(self, history: History) -> None:
        """Take what is there for known."""
        self._seen = {name: len(series) for name, series in history.items()}

    def take(self, history: History) -> dict[str, tuple[list[int], list[float]]]:
        """Steps and values by name."""
        found = {}
        for name, series in history.all():
            seen, count = self._seen.get(name, 0), len(series)
            if count > seen:
                found[name] = (
                    series.steps[seen:count].tolist(),
                    series.values[seen:count].tolist(),
                )
                self._seen[name] = count
        return found
