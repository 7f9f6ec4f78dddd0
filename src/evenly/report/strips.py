"""Where the ranks' time went: a row for each rank, which shows one that holds up the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from evenly.record.reading import Entry
from evenly.record.run import Run
from evenly.report.figures import Data, Figure, Mark, frame

_COLUMNS = 120
_RANKS = 128

# How much of a step the others wait for a rank: the upper limits of the shades.
_LIMITS = (0.05, 0.10, 0.20, 0.40)
_SHADES = ("under 5%", "5 to 10%", "10 to 20%", "20 to 40%", "over 40%")


def strips(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """One for each run that had several ranks."""
    found = []
    for place, run in enumerate(runs):
        entries = [entry for entry in run.ranks if len(entry["alone_seconds"]) > 1]
        if entries:
            found.append(_strip(place, entries, labels[place] if len(runs) > 1 else ""))
    return found


def held_up(entry: Entry) -> list[float]:
    """Of each rank: how much of a step the median rank waits for it, 0 to 1."""
    alone = entry["alone_seconds"]
    middle = statistics.median(alone)
    whole = max(statistics.median(entry["step_seconds"]), 1e-9)
    return [min(1.0, max(0.0, (own - middle) / whole)) for own in alone]


def _strip(place: int, entries: list[Entry], label: str) -> Figure:
    merged = _merged(entries)
    ranks = min(_RANKS, max(len(entry["alone_seconds"]) for entry in merged))
    rows: list[list[object]] = []
    worst, total = [0.0] * ranks, [0.0] * ranks
    for entry in merged:
        excess = held_up(entry)
        for rank, share in enumerate(excess[:ranks]):
            worst[rank] = max(worst[rank], share)
            total[rank] += share * entry["steps"]
            rows.append(
                [
                    entry["step"] - entry["steps"],
                    entry["step"],
                    f"{rank}",
                    sum(share >= limit for limit in _LIMITS),
                    f"{share:.0%}",
                    _milliseconds(entry["alone_seconds"][rank]),
                    _milliseconds(entry["alone_longest"][rank]),
                    _milliseconds(entry["data_wait_seconds"][rank]),
                    _milliseconds(entry["step_seconds"][rank]),
                ]
            )
    steps = sum(entry["steps"] for entry in merged)
    slowest = max(range(ranks), key=lambda rank: total[rank])
    share = total[slowest] / max(1, steps)
    said = (
        f"Rank {slowest} held up the others most: {share:.1%} of the time."
        if share >= _LIMITS[0]
        else "No rank held up the others for 5% of the time or more."
    )
    columns = ["from", "to", "rank", "shade", "share", "alone", "longest", "wait", "step"]
    titles = {
        "to": "up to step",
        "rank": "rank",
        "share": "of a step, the others wait",
        "alone": "on its own, mean",
        "longest": "on its own, longest",
        "wait": "waiting for data",
        "step": "whole step",
    }
    return Figure(
        name=f"ranks-{place}",
        title=f"Ranks{f': {label}' if label else ''}",
        alt=f"A row of cells for each of {ranks} ranks, coloured where the others wait. {said}",
        caption=(
            f"{said} The colour is how much of a step the others wait for a rank, because it comes "
            "later to their exchange: it waited for data, or computed longer."
        ),
        spec={
            **frame(max(60, 22 * ranks) if ranks <= 16 else 6 * ranks),
            "data": {"name": "cells"},
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 0.5},
            "encoding": {
                "x": {
                    "field": "from",
                    "type": "quantitative",
                    "title": "step",
                    "axis": {"format": ",d", "grid": False, "labelFlush": True},
                    "scale": {"nice": False, "zero": False},
                },
                "x2": {"field": "to"},
                "y": {
                    "field": "rank",
                    "type": "ordinal",
                    "title": "rank",
                    "sort": None,
                    "axis": {"labelOverlap": True},
                },
                "color": {
                    "field": "shade",
                    "type": "ordinal",
                    "scale": {
                        "domain": list(range(len(_SHADES))),
                        "range": [f"var(--wait-{shade})" for shade in range(len(_SHADES))],
                    },
                    "legend": None,
                },
                "tooltip": [{"field": name, "title": text} for name, text in titles.items()],
            },
        },
        data={"cells": Data(columns=columns, rows=rows)},
        legend=[
            Mark(label=text, colour=f"var(--wait-{shade})") for shade, text in enumerate(_SHADES)
        ],
        wide=True,
        header=["rank", "the others waited, mean", "at most"],
        rows=[
            [f"{rank}", f"{total[rank] / max(1, steps):.1%}", f"{worst[rank]:.1%}"]
            for rank in range(ranks)
        ],
    )


def _merged(entries: list[Entry]) -> list[Entry]:
    """Neighbours of as many ranks as one, until a screen has room for them."""
    wanted = max(1, sum(entry["steps"] for entry in entries) // _COLUMNS)
    found: list[Entry] = []
    for entry in entries:
        last = found[-1] if found else None
        fits = last is not None and len(last["alone_seconds"]) == len(entry["alone_seconds"])
        if last is None or not fits or last["steps"] >= wanted:
            found.append(dict(entry))
            continue
        both = last["steps"] + entry["steps"]
        for name in ("alone_seconds", "step_seconds", "data_wait_seconds"):
            pairs = zip(last[name], entry[name], strict=True)
            last[name] = [(a * last["steps"] + b * entry["steps"]) / both for a, b in pairs]
        pairs = zip(last["alone_longest"], entry["alone_longest"], strict=True)
        last["alone_longest"] = [max(a, b) for a, b in pairs]
        last["step"], last["steps"] = entry["step"], both
    return found


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
