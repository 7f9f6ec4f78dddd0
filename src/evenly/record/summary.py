"""A run in one row, and the runs in a folder."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from evenly.errors import StorageError
from evenly.record.reading import FILE
from evenly.record.run import Run, read_run
from evenly.record.series import Series

# A number of such a name is better the smaller it is; any other, the larger.
_SMALLER = (
    *("loss", "error", "mae", "mse", "rmse", "perplexity", "distance", "hamming"),
    *("calibration", "divergence", "wer", "cer", "seconds"),
)


class Best(NamedTuple):
    """The best value of a series, and where it was."""

    value: float
    step: int


def smaller_is_better(name: str) -> bool:
    return any(word in name.lower().rpartition("/")[2] for word in _SMALLER)


def best(name: str, series: Series) -> Best | None:
    """By its name: the smallest loss or error, the largest of anything else. None without any."""
    points = zip(series.values, series.steps, strict=True)
    known = [(value, step) for value, step in points if not math.isnan(value)]
    if not known:
        return None
    choose = min if smaller_is_better(name) else max
    return Best(*choose(known, key=lambda point: point[0]))


def measured(run: Run) -> list[str]:
    """The names worth a column: what evaluations and epochs gave; else the loss of the steps."""
    stages = [name for name in run.series if "/" in name and not name.startswith("learning_rate")]
    hidden = ("_per_second", "_seconds")
    found = sorted(name for name in stages if not name.endswith(hidden) and "norm" not in name)
    return sorted(found, key=lambda name: name.startswith("train/")) or [
        name for name in ("loss",) if name in run.series
    ]


def summary(run: Run) -> dict[str, Any]:
    """What `evenly runs --json` prints of each."""
    numbers: dict[str, Any] = {}
    for name in measured(run):
        series = run.series[name]
        if not len(series):
            continue
        found = best(name, series)
        numbers[name] = {
            "last": _number(series.values[-1]),
            "best": None if found is None else _number(found.value),
            "best_step": None if found is None else found.step,
        }
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "started": run.launches[0]["time"],
        "seconds": round(run.seconds, 3),
        "launches": len(run.launches),
        "processes": run.processes,
        "epochs": run.epochs,
        "steps": run.step,
        "values": numbers,
    }


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs in and below these folders, the oldest first, and what is wrong with others."""
    files: dict[Path, None] = {}
    for folder in folders:
        if folder.is_file():
            files[folder] = None
        else:
            files.update(dict.fromkeys(sorted(folder.rglob(FILE))))
    runs, problems = [], []
    for file in files:
        try:
            runs.append(read_run(file))
        except StorageError as error:
            problems.append(str(error))
    return sorted(runs, key=lambda run: float(run.launches[0]["time"])), problems


def labels(runs: list[Run]) -> list[str]:
    """A name for each run that no other has: as few of its folders as it takes."""
    parts = [run.path.resolve().parent.parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
