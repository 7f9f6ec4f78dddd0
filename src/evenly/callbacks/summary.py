"""What is shown when a run or an evaluation has ended: a small table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenly.training.history import History

if TYPE_CHECKING:
    from rich.table import Table


def run_line(steps: int, seconds: float, processes: int, *, speed: float, waiting: float) -> str:
    """In one line, what was done and how fast."""
    return (
        f"{steps:,} steps in {_time(seconds)} on {_processes(processes)}: {speed:,.0f} samples/s, "
        f"{waiting:.0%} of the time waiting for data"
    )


def evaluation_line(stage: str, seconds: float, processes: int) -> str:
    return f"{stage} in {_time(seconds)} on {_processes(processes)}"


def run_table(history: History) -> Table:
    """Each number's last, lowest and highest value, with the steps where it was so."""
    table = _table()
    for column in ("last", "lowest", "at step", "highest", "at step"):
        table.add_column(column, justify="right")
    for name, series in history.items():
        known = [(v, s) for v, s in zip(series.values, series.steps, strict=True) if v == v]
        if known:
            (low, low_at), (high, high_at) = (
                min(known),
                max(known, key=lambda one: (one[0], -one[1])),
            )
            last = series.values[-1]
            table.add_row(
                name, _number(last), _number(low), f"{low_at}", _number(high), f"{high_at}"
            )
    return table


def evaluation_table(values: Mapping[str, Any]) -> Table:
    """The numbers of an evaluation. What is not one number is only named."""
    table = _table()
    table.add_column("value", justify="right")
    for name, value in values.items():
        shape = getattr(value, "shape", None)
        table.add_row(name, f"{tuple(shape)}" if shape is not None else _number(value))
    return table


def _table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("")
    return table


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"
