"""Numbers over the steps: the loss, metrics, the learning rate, speeds; several runs in one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenly.record.run import Run
from evenly.record.sampling import downsampled
from evenly.record.series import Series
from evenly.report.figures import NOTHING, Data, Figure, Mark, Spec, colour, frame, number

# Points of one line, of which a screen shows about a third; the rest is for zooming in.
_POINTS = 3000
_HOVERS = 400
_FIGURES = 24
_TABLE = 12
_LABELS = 3
_FEW = 40
"""Up to so many, the points of a line are shown."""

_SPEEDS = ("samples_per_second", "step_seconds", "data_wait_seconds")


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    run: int
    stage: str
    """"" for what has none; "step" for the loss of each step."""
    series: Series


def curves(runs: Sequence[Run], labels: Sequence[str]) -> tuple[list[Figure], list[str]]:
    """A figure for each number, the loss first, with training and evaluation in one; and the names
    of those that were left out where there are too many.
    """
    groups: dict[str, list[Line]] = {}
    for place, run in enumerate(runs):
        for name, series in run.series.items():
            stage, _, base = name.rpartition("/") if "/" in name else ("", "", name)
            if base in _SPEEDS or name.startswith("learning_rate") or not len(series):
                continue
            if name.startswith("gradient_norm/"):
                stage, base = "", name
            groups.setdefault(base, []).append(Line(place, stage or "step", series))
    if len(runs) > 1 and "loss" in groups:
        # Of several runs, steps and epochs in one chart would be a tangle.
        each = [line for line in groups["loss"] if line.stage == "step"]
        rest = [line for line in groups["loss"] if line.stage != "step"]
        groups |= {"loss of each step": each, "loss": rest}
    order = sorted(groups, key=lambda base: (not base.startswith("loss"), base))
    kept = [base for base in order if any(len(line.series) > 1 for line in groups[base])]
    figures = [
        _figure(f"curve-{place}", base, groups[base], runs, labels)
        for place, base in enumerate(kept[:_FIGURES])
    ]
    return figures, kept[_FIGURES:]


def speeds(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """The learning rate, samples per second, and the share of time that steps waited for data."""
    rates = _named(runs, lambda name: name.startswith("learning_rate"))
    through = _named(runs, lambda name: name == "samples_per_second")
    waits = [
        Line(place, "", _ratio(run.series["data_wait_seconds"], run.series["step_seconds"]))
        for place, run in enumerate(runs)
        if "data_wait_seconds" in run.series and "step_seconds" in run.series
    ]
    found = []
    for name, title, lines, caption in (
        ("rate", "Learning rate", rates, ""),
        (
            "throughput",
            "Samples per second",
            through,
            "Over all ranks, evaluation and checkpoints left out.",
        ),
        (
            "wait",
            "Waiting for data, % of the step",
            waits,
            "Of rank 0. Much of it: more workers, or data nearer by.",
        ),
    ):
        lines = [line for line in lines if len(line.series)]
        if lines:
            found.append(_figure(name, title, lines, runs, labels, caption, after=name == "rate"))
    return found


def difference(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    """How far the losses of the steps are from the first run's, if there are several."""
    if len(runs) < 2 or "loss" not in runs[0].series:
        return None
    lines, most = [], []
    for place, run in enumerate(runs[1:], 1):
        gaps = _gaps(runs[0].series["loss"], run.series.get("loss", Series()))
        if len(gaps):
            lines.append(Line(place, "", gaps))
            most.append(f"{labels[place]}: at most {max(gaps.values):.1e}")
    if not lines:
        return None
    figure = _figure(
        "difference",
        f"Loss of each step: difference from {labels[0]}",
        [Line(line.run, line.stage, _positive(line.series)) for line in lines],
        runs,
        labels,
        "Where it is zero there is no line. " + "; ".join(most) + ".",
        log=True,
    )
    return figure if figure.data["lines"].rows else None


def marked(runs: Sequence[Run], labels: Sequence[str]) -> list[tuple[int, int, str]]:
    """Where runs went on: (run, step, what happened)."""
    found = []
    for place, run in enumerate(runs):
        for before, start in zip(run.starts, run.starts[1:], strict=False):
            if start["launch"] == before["launch"]:
                continue
            was, now = before["processes"], start["processes"]
            text = "restart" if was == now else f"{was} to {now} processes"
            where = f"{labels[place]}: " if len(runs) > 1 else ""
            found.append((place, start["step"], where + text))
    return found


def _figure(
    name: str,
    title: str,
    lines: list[Line],
    runs: Sequence[Run],
    labels: Sequence[str],
    caption: str = "",
    *,
    log: bool = False,
    after: bool = False,
) -> Figure:
    stages = list(dict.fromkeys(line.stage for line in lines))
    rows = []
    for line in lines:
        steps, values = downsampled(line.series.steps, line.series.values, _POINTS)
        key = f"{line.run}:{line.stage}"
        few = len(steps) <= _FEW
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            rows.append([step, _json(value), line.run, line.stage, key, few])
    hover, names = _hover(lines, labels, len(runs) > 1, len(stages) > 1)
    events = [[step, text] for _, step, text in marked(runs, labels)]
    several = len(runs) > 1
    drawn = sorted({line.run for line in lines})
    legend = [Mark(label=labels[place], colour=colour(place)) for place in drawn]
    styles = [
        Mark(
            label="each step" if stage == "step" else stage,
            kind=_kind(stage, lines),
            colour="var(--ink)" if several else colour(0),
        )
        for stage in stages
    ]
    header, table = _table(hover, names)
    return Figure(
        name=name,
        title=title,
        alt=_alt(title, lines, labels),
        caption=caption,
        spec=_spec(
            stages,
            len(runs),
            last=max(run.step for run in runs),
            powers=_powers(lines) if log else None,
            room=_room(lines),
            after=after,
            events=bool(events),
        ),
        data={
            "lines": Data(columns=["step", "value", "run", "stage", "key", "few"], rows=rows),
            "hover": hover,
            "events": Data(columns=["step", "event"], rows=events),
        },
        legend=[
            *(legend if several else []),
            *(styles if len(stages) > 1 else []),
            *_event_marks(events),
        ],
        header=header,
        rows=table,
        zooms=True,
    )


def _spec(
    stages: list[str],
    count: int,
    *,
    last: int,
    powers: list[float] | None,
    room: list[float] | None,
    after: bool,
    events: bool,
) -> Spec:
    scale: Spec = {"type": "log"} if powers else {"zero": False, "nice": True}
    if room and not powers:
        scale["domain"] = room
    places = list(range(count))
    dashes = {"step": [1, 0], "train": [1, 0], "": [1, 0]}
    # Equal runs lie on each other: the first are drawn wide, so that all of them are seen.
    widths = [min(9.0, 1.6 + 2.2 * (count - 1 - place)) for place in places]
    hues = {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": places, "range": [colour(place) for place in places]},
        "legend": None,
    }
    y = {
        "field": "value",
        "type": "quantitative",
        "title": None,
        "scale": scale,
        "axis": {"format": ".0e", "values": powers} if powers else {"tickCount": 6},
    }
    line = {
        "params": [
            {
                "name": "zoom",
                "bind": "scales",
                "select": {
                    "type": "interval",
                    "encodings": ["x"],
                    # A wheel or a finger alone moves the page.
                    "zoom": "wheel![event.shiftKey]",
                    "translate": (
                        "[pointerdown[event.pointerType === 'mouse'], window:pointerup] "
                        "> window:pointermove!"
                    ),
                },
            }
        ],
        "mark": {
            "type": "line",
            "clip": True,
            "strokeJoin": "round",
            "interpolate": "step-after" if after else "linear",
        },
        "encoding": {
            "y": y,
            "color": hues,
            "detail": {"field": "key"},
            "strokeDash": {
                "field": "stage",
                "scale": {
                    "domain": stages,
                    "range": [dashes.get(stage, [7, 4]) for stage in stages],
                },
                "legend": None,
            },
            "strokeWidth": {
                "field": "run",
                "type": "ordinal",
                "scale": {"type": "ordinal", "domain": places, "range": widths},
                "legend": None,
            },
            "opacity": {
                "condition": {
                    "test": f"datum.stage === 'step' && {str(len(stages) > 1).lower()}",
                    "value": 0.4,
                },
                "value": 1,
            },
        },
    }
    points = {
        "transform": [{"filter": "datum.few"}],
        "mark": {"type": "point", "filled": True, "size": 32, "clip": True},
        "encoding": {"y": y, "color": hues},
    }
    chosen = {
        "transform": [{"filter": {"param": "hover", "empty": False}}],
        "mark": {"type": "point", "filled": True, "size": 60, "clip": True},
        "encoding": {"y": y, "color": hues},
    }
    rule = {
        "data": {"name": "hover"},
        "params": [
            {
                "name": "hover",
                "select": {
                    "type": "point",
                    "fields": ["step"],
                    "nearest": True,
                    "on": "pointermove",
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "rule", "clip": True, "tooltip": {"content": "data"}},
        "encoding": {
            "opacity": {
                "condition": {"param": "hover", "empty": False, "value": 0.45},
                "value": 0,
            },
        },
    }
    layers = [line, points, chosen, rule]
    if events:
        layers = [_events(), *layers]
    return {
        **frame(250),
        "data": {"name": "lines"},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "title": "step",
                "axis": {"format": ",d", "tickMinStep": 1, "grid": False, "labelFlush": True},
                # The same for all charts, which are zoomed together.
                "scale": {"nice": False, "domain": [0, max(1, last) * 1.012]},
            }
        },
        "layer": layers,
    }


def _event_marks(events: list[list[Any]]) -> list[Mark]:
    texts = [f"step {step:,}: {text}" for step, text in events]
    if len(texts) > _LABELS:
        texts = [f"{len(texts)} restarts and resizes"]
    return [Mark(label=text, kind="event", colour="var(--warn)") for text in texts]


def _events() -> Spec:
    """Lines where a run went on."""
    return {
        "data": {"name": "events"},
        "mark": {
            "type": "rule",
            "clip": True,
            "strokeDash": [2, 3],
            "strokeWidth": 1.5,
            "color": "var(--warn)",
            "tooltip": {"content": "data"},
        },
    }


def _kind(stage: str, lines: list[Line]) -> str:
    if all(len(line.series) == 1 for line in lines if line.stage == stage):
        return "point"
    return {"step": "line", "train": "dot"}.get(stage, "dashed")


def _room(lines: list[Line]) -> list[float] | None:
    """Around a number that never changes, which has no extent of its own."""
    values = {value for line in lines for value in line.series.values if math.isfinite(value)}
    if len(values) != 1:
        return None
    value = values.pop()
    return sorted([0.0, 2 * value]) if value else [-1.0, 1.0]


def _powers(lines: list[Line]) -> list[float]:
    """The powers of ten around the values, few enough to be read."""
    values = [value for line in lines for value in line.series.values if 0 < value < math.inf]
    if not values:
        return [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(low, high + 1, max(1, (high - low) // 6))]


def _hover(
    lines: list[Line], labels: Sequence[str], several: bool, staged: bool
) -> tuple[Data, list[str]]:
    """What a pointer at a step shows: the value of every line that has one there."""
    chosen = sorted(set().union(*(_places(line.series.steps) for line in lines)))
    names, columns = [], []
    for line in lines:
        stage = "each step" if line.stage == "step" else line.stage
        named = [labels[line.run]] * several + [stage] * bool(staged and stage)
        names.append(" · ".join(named) or "value")
        own = line.series
        at = np.searchsorted(own.steps, chosen).tolist()
        columns.append(
            [
                number(own.values[i]) if i < len(own) and own.steps[i] == step else None
                for i, step in zip(at, chosen, strict=True)
            ]
        )
    rows = [list(row) for row in zip(chosen, *columns, strict=True)]
    return Data(columns=["step", *names], rows=rows), names


def _places(steps: Sequence[int]) -> list[int]:
    """Some of the steps: runs of one length give the same, so that they are shown together."""
    every = -(-len(steps) // _HOVERS)
    return [*steps[::every], steps[-1]] if len(steps) else []


def _table(hover: Data, names: list[str]) -> tuple[list[str], list[list[str]]]:
    """Some of the numbers, from the first to the last."""
    full = [row for row in hover.rows if None not in row] or hover.rows
    count = min(_TABLE, len(full))
    places = sorted({round(i * (len(full) - 1) / max(1, count - 1)) for i in range(count)})
    cells = [[f"{full[i][0]:,}", *(one or NOTHING for one in full[i][1:])] for i in places]
    return ["step", *names], cells


def _alt(title: str, lines: list[Line], labels: Sequence[str]) -> str:
    parts = []
    for line in lines:
        name = f"{labels[line.run]} {line.stage}".strip()
        values, steps = line.series.values, line.series.steps
        if not len(values):
            continue
        parts.append(
            f"{name}: from {number(values[0], 4)} at step {steps[0]} to "
            f"{number(values[-1], 4)} at step {steps[-1]}"
        )
    more = f"; and {len(parts) - 8} more" if len(parts) > 8 else ""
    return f"Line chart of {title} over the steps. " + "; ".join(parts[:8]) + more + "."


def _named(runs: Sequence[Run], wanted: object) -> list[Line]:
    assert callable(wanted)
    found = []
    for place, run in enumerate(runs):
        for name, series in run.series.items():
            if wanted(name) and len(series):
                stage = name.partition("/")[2]
                found.append(Line(place, f"group {stage}" if stage else "", _held(series, run)))
    return found


def _held(series: Series, run: Run) -> Series:
    """A number that is told when it changes, up to the last step."""
    if series.steps[-1] >= run.step:
        return series
    held = Series()
    held.extend(series.steps, series.values)
    held.add(run.step, series.values[-1])
    return held


def _ratio(one: Series, other: Series) -> Series:
    found = Series()
    below = dict(zip(other.steps, other.values, strict=True))
    for step, value in zip(one.steps, one.values, strict=True):
        if below.get(step, 0.0) > 0:
            found.add(step, min(100.0, 100 * value / below[step]))
    return found


def _gaps(one: Series, other: Series) -> Series:
    """How far apart two are, at the steps that both have."""
    _, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
    found = Series()
    values = np.abs(np.asarray(one.values)[here] - np.asarray(other.values)[there])
    found.extend(np.asarray(one.steps)[here].tolist(), values.tolist())
    return found


def _positive(series: Series) -> Series:
    found = Series()
    for step, value in zip(series.steps, series.values, strict=True):
        if value > 0:
            found.add(step, value)
    return found


def _json(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None
