"""Everything on the page that is no chart: what the runs are, their numbers, the proof, events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evenly.record.coverage import plan_of, planned, written
from evenly.record.run import Run
from evenly.record.summary import best, measured
from evenly.report.figures import NOTHING, number

# Making the order of so many samples again takes some seconds; what is beyond is not checked.
_CHECKED = 20_000_000
_EPOCHS = 60
_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain cells; page.py escapes them."""

    header: list[str]
    rows: list[list[str]]
    caption: str
    marked: set[int] = field(default_factory=set)
    """Rows that want a look."""
    numeric: bool = True
    """Whether all but the first column hold numbers."""


def overview(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    return Table(
        caption="The runs",
        header=["run", "state", "processes", "epochs", "steps", "took", "launches", "began"],
        rows=[
            [
                label,
                run.state,
                " → ".join(map(str, run.processes)),
                f"{run.epochs:,}",
                f"{run.step:,}",
                duration(run.seconds),
                f"{len(run.launches)}",
                moment(run.launches[0]["time"]),
            ]
            for run, label in zip(runs, labels, strict=True)
        ],
    )


def metrics(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """The last and the best of each number; of several runs, how far they are apart."""
    names = list(dict.fromkeys(name for run in runs for name in measured(run)))
    names.sort(key=lambda name: (name.startswith("train/"), name))
    rows: list[list[str]] = []
    for name in names:
        found = [run.series.get(name) for run in runs]
        lasts = [one.values[-1] if one is not None and len(one) else None for one in found]
        bests = [None if one is None else best(name, one) for one in found]
        tops = [None if one is None else one.value for one in bests]
        if len(runs) == 1:
            step = NOTHING if bests[0] is None else f"{bests[0].step:,}"
            rows.append([name, number(lasts[0], 7), number(tops[0], 7), step])
            continue
        rows.append([name, "last", *(number(one, 7) for one in lasts), _apart(lasts)])
        if lasts != tops:
            rows.append([name, "best", *(number(one, 7) for one in tops), _apart(tops)])
    if not rows:
        return None
    single = ["number", "last", "best", "best at step"]
    several = ["number", "", *labels, "apart"]
    return Table(
        caption="Best is the smallest of losses and errors, the largest of anything else",
        header=single if len(runs) == 1 else several,
        rows=rows,
    )


def _apart(values: list[float | None]) -> str:
    """From the smallest to the largest."""
    known = [one for one in values if one is not None]
    gap = max(known) - min(known) if len(known) > 1 else None
    return NOTHING if gap is None else "0" if gap == 0 else f"{gap:.1e}"


def coverage(runs: Sequence[Run], labels: Sequence[str]) -> tuple[str, Table | None]:
    """Whether every epoch used the samples of its plan, in a sentence and epoch by epoch."""
    rows: list[list[str]] = []
    wrong: set[int] = set()
    equal = unknown = 0
    left = _CHECKED
    known: dict[str, tuple[int, str]] = {}
    for run, label in zip(runs, labels, strict=True):
        for entry in run.coverage:
            plan = plan_of(entry["plan"]) if entry.get("plan") else None
            verdict, expected = "not checked", NOTHING
            key = f"{plan} {entry['epoch']}"
            if not entry.get("whole", True):
                verdict = "begun before there was a record"
            elif plan is not None and (key in known or plan.length <= left):
                if key not in known:
                    left -= plan.length
                    count, total = planned(plan, entry["epoch"])
                    known[key] = (count, written(total))
                count, expected = known[key]
                same = (entry["samples"], entry["digest"]) == (count, expected)
                verdict = "equal" if same else "DIFFERENT"
            if verdict == "equal":
                equal += 1
            elif verdict == "DIFFERENT":
                wrong.add(len(rows))
            else:
                unknown += 1
            epoch, samples = f"{entry['epoch'] + 1}", f"{entry['samples']:,}"
            rows.append([label, epoch, samples, entry["digest"], expected, verdict])
    if not rows:
        return "No epoch was finished, so there is nothing to compare.", None
    said = f"{equal} of {len(rows)} epochs used exactly the samples of their plan, each once."
    if wrong:
        said = f"{len(wrong)} of {len(rows)} epochs did NOT use the samples of their plan. {said}"
    if unknown:
        said += f" {unknown} could not be compared, or would have taken long."
    kept = sorted({*wrong, *range(min(_EPOCHS, len(rows)))})[: _EPOCHS + len(wrong)]
    return said, Table(
        caption="Digest of the samples that the ranks loaded, and of those that the plan names"
        + (f" ({len(kept)} of {len(rows)} epochs)" if len(kept) < len(rows) else ""),
        header=["run", "epoch", "samples", "loaded", "planned", "verdict"],
        rows=[rows[place] for place in kept],
        marked={kept.index(place) for place in wrong},
    )


def events(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """What happened, in order: starts, restarts and resizes, checkpoints in short, ends."""
    found: list[tuple[float, list[str]]] = []
    for run, label in zip(runs, labels, strict=True):
        for place, start in enumerate(run.starts):
            found.append((start["time"], [label, f"{start['step']:,}", _started(run, place)]))
        for end in run.ends:
            error = f": {end['error']}" if end.get("error") else ""
            found.append((end["time"], [label, f"{end['step']:,}", end["state"] + error[:300]]))
        if run.checkpoints:
            last = run.checkpoints[-1]
            text = f"the last of {len(run.checkpoints)} checkpoints"
            found.append((last["time"], [label, f"{last['step']:,}", text]))
    found.sort(key=lambda event: event[0])
    return Table(
        caption="Events" + (f" (the last {_EVENTS})" if len(found) > _EVENTS else ""),
        header=["when", "run", "step", "what"],
        rows=[[moment(when), *cells] for when, cells in found[-_EVENTS:]],
        numeric=False,
    )


def settings(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    return _side_by_side("Settings", [dict(_flat(run.settings)) for run in runs], labels)


def environment(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Of the last launch of each."""
    hidden = ("kind", "time", "last", "version")
    found = [
        dict(_flat({n: v for n, v in run.launches[-1].items() if n not in hidden})) for run in runs
    ]
    return _side_by_side("Environment of the last launch", found, labels)


def _side_by_side(caption: str, sides: list[dict[str, str]], labels: Sequence[str]) -> Table:
    names = list(dict.fromkeys(name for side in sides for name in side))
    rows = [[name, *(side.get(name, NOTHING) for side in sides)] for name in names]
    several = len(sides) > 1
    return Table(
        caption=caption + ("; what differs is marked" if several else ""),
        header=["name", *(labels if several else ["value"])],
        rows=rows,
        marked={place for place, row in enumerate(rows) if len(set(row[1:])) > 1},
        numeric=False,
    )


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, one in value.items():
        if isinstance(one, dict):
            yield from _flat(one, f"{prefix}{name}.")
        elif isinstance(one, list):
            yield f"{prefix}{name}", " ".join(map(str, one)) or "none"
        else:
            yield f"{prefix}{name}", NOTHING if one is None else str(one)


def _started(run: Run, place: int) -> str:
    start = run.starts[place]
    count = start["processes"]
    text = f"{count} process{'es' * (count != 1)}"
    if place == 0:
        return f"begun on {text}"
    before = run.starts[place - 1]
    if before["launch"] == start["launch"]:
        return "another fit"
    again = "gone on" if start["step"] else "begun again"
    resized = f" (before: {before['processes']})" if before["processes"] != count else ""
    return f"{again} on {text}{resized}"


def duration(seconds: float) -> str:
    """A time span in two units at most."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
