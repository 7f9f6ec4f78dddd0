"""Confusion matrices: the last one of each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenly.record.run import Run
from evenly.report.figures import NOTHING, Data, Figure, Mark, frame, number

_LARGEST = 100
_WITH_NUMBERS = 25
_LIMITS = (0.001, 0.05, 0.2, 0.5, 0.8)
_SHADES = ("none", "under 5%", "5 to 20%", "20 to 50%", "50 to 80%", "over 80%")


def matrices(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """One for each run that measured one: of its last evaluation, of a test if there was one."""
    found = []
    for place, run in enumerate(runs):
        last = _last(run)
        if last is not None:
            stage, name, counts = last
            of = f" of {labels[place]}" if len(runs) > 1 else ""
            found.append(_figure(place, f"{stage}/{name}{of}", counts))
    return found


def _last(run: Run) -> tuple[str, str, list[list[float]]] | None:
    tests = [entry for entry in run.evaluations if entry["stage"] == "test"]
    for entry in reversed(tests or run.evaluations):
        for name, value in entry["values"].items():
            if _square(value):
                return entry["stage"], name, value
    return None


def _square(value: Any) -> bool:
    if not isinstance(value, list) or not 2 <= len(value) <= _LARGEST:
        return False
    if not all(isinstance(row, list) and len(row) == len(value) for row in value):
        return False
    return all(isinstance(one, int | float) and one >= 0 for row in value for one in row)


def _figure(place: int, title: str, counts: list[list[float]]) -> Figure:
    size = len(counts)
    rows: list[list[object]] = []
    for true, row in enumerate(counts):
        whole = sum(row)
        for said, count in enumerate(row):
            share = count / whole if whole else 0.0
            shade = sum(share >= limit for limit in _LIMITS)
            rows.append([true, said, number(count), f"{share:.1%}", shade])
    right, whole = sum(counts[i][i] for i in range(size)), sum(map(sum, counts))
    mistakes = sorted(
        ((counts[t][s], t, s) for t in range(size) for s in range(size) if t != s), reverse=True
    )[:3]
    told = ", ".join(f"{t} taken for {s}: {number(c)}" for c, t, s in mistakes if c)
    alt = f"Confusion matrix of {size} classes: {number(right)} of {number(whole)} right."
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1},
            "encoding": {
                "color": {
                    "field": "shade",
                    "type": "ordinal",
                    "scale": {
                        "domain": list(range(len(_SHADES))),
                        "range": [f"var(--heat-{shade})" for shade in range(len(_SHADES))],
                    },
                    "legend": None,
                }
            },
        }
    ]
    if size <= _WITH_NUMBERS:
        layers.append(
            {
                "mark": {"type": "text", "fontSize": 11},
                "encoding": {
                    "text": {"field": "count"},
                    "color": {
                        "condition": {"test": "datum.shade > 3", "value": "var(--on-heat)"},
                        "value": "var(--ink)",
                    },
                },
            }
        )
    return Figure(
        name=f"confusion-{place}",
        title=f"Confusion: {title}",
        alt=f"{alt} Most frequent mistakes: {told or 'none'}.",
        caption=f"Rows: true classes; columns: predicted. Most mistaken: {told or NOTHING}.",
        spec={
            **frame(min(520, max(220, 30 * size))),
            "data": {"name": "cells"},
            "encoding": {
                "x": {
                    "field": "said",
                    "type": "ordinal",
                    "title": "predicted",
                    "axis": {"labelAngle": 0, "labelOverlap": True},
                },
                "y": {"field": "true", "type": "ordinal", "title": "true"},
                "tooltip": [
                    {"field": "true", "title": "true class"},
                    {"field": "said", "title": "predicted"},
                    {"field": "count", "title": "samples"},
                    {"field": "share", "title": "of the true class"},
                ],
            },
            "layer": layers,
        },
        data={"cells": Data(columns=["true", "said", "count", "share", "shade"], rows=rows)},
        legend=[Mark(label=text, colour=f"var(--heat-{i})") for i, text in enumerate(_SHADES)],
        header=["true \\ predicted", *map(str, range(size))],
        rows=[[str(t), *map(number, row)] for t, row in enumerate(counts)],
    )
