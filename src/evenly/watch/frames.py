"""What the page shows at one moment, as JSON, and what of it is new since the moment before."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from evenly.record.run import Run
from evenly.report import tables
from evenly.report.curves import curves, speeds
from evenly.report.figures import Data, Figure, Spec
from evenly.report.tables import Table, duration
from evenly.watch.follow import Follower
from evenly.watch.ranks import Ranks, Tile, Tone
from evenly.wording import ranks as ranks_in_words

Json = dict[str, Any]

_TONES: dict[str, Tone] = {"running": "good", "failed": "bad", "killed": "bad"}
_EVENTS = 50


def frame(follower: Follower, ranks: Ranks) -> Json:
    """Everything on the page. The cost depends on the points that are shown, not on the run."""
    tiles = ranks.look(follower.run)
    run = follower.thinned()
    found: Json = {
        "head": _head(follower, run, ranks, tiles),
        "ranks": [asdict(tile) for tile in tiles],
        "figures": {},
    }
    if run is None or not run.launches:
        return found
    labels = [run.name]
    figures = [*curves([run], labels)[0], *speeds([run], labels)]
    numbers = tables.metrics([run], labels)
    events = tables.events([run], labels)
    found["last"] = max(1, run.step) * 1.012
    found["order"] = [figure.name for figure in figures]
    found["figures"] = {figure.name: _figure(figure) for figure in figures}
    found["numbers"] = None if numbers is None else _table(numbers)
    found["events"] = _table(_of_one(events), last=_EVENTS)
    return found


def unreadable(follower: Follower, error: Exception) -> Json:
    """A page that says why there is nothing on it."""
    why = f"The run cannot be shown: {type(error).__name__}: {error}"
    head = _said(follower.folder.resolve().name, "problem", "bad", why)
    return {"head": head, "ranks": [], "figures": {}}


def change(old: Json, new: Json) -> Json:
    """What a page that shows ``old`` must be told to show ``new``."""
    parts = {
        name: value
        for name, value in new.items()
        if name != "figures" and (name not in old or old[name] != value)
    }
    figures: Json = {}
    for name, figure in new["figures"].items():
        before = old["figures"].get(name)
        if before is None or before["about"] != figure["about"]:
            figures[name] = figure
            continue
        changed: Json = {"data": _data_change(before["data"], figure["data"])}
        if before["words"] != figure["words"]:
            changed["words"] = figure["words"]
        if changed["data"] or "words" in changed:
            figures[name] = changed
    gone = [name for name in old["figures"] if name not in new["figures"]]
    return {**parts, "figures": figures, **({"gone": gone} if gone else {})}


def encoded(found: Json, *, whole: bool) -> bytes:
    """As one server-sent event."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return f"event: {'whole' if whole else 'change'}\ndata: {text}\n\n".encode()


def _head(follower: Follower, run: Run | None, ranks: Ranks, tiles: Sequence[Tile]) -> Json:
    name = run.name if run is not None else follower.folder.resolve().name
    if follower.problem:
        return _said(name, "problem", "bad", follower.problem)
    if run is None or not run.launches:
        message = (
            f"There is no record in {follower.folder} yet. This page waits for a Trainer with that "
            "folder to begin."
        )
        return _said(name, "waiting", "calm", message)
    state: str = run.state
    if ranks.failed and state not in ("finished", "stopped"):
        state = "failed"
    message, tone = _sentence(ranks.report), _TONES.get(state, "calm")
    if not message and state == "failed" and run.ends:
        message = str(run.ends[-1].get("error") or "")
    if not message:
        message = _troubles(tiles)
    if not message and follower.behind:
        message = f"Reading the record: {follower.share:.0%}."
    head = _said(name, "starting" if state == "empty" else state, tone, message)
    head["alarm"] = tone == "bad" or any(tile.tone == "bad" for tile in tiles)
    head["summary"] = _summary(state, tiles)
    head["facts"] = _facts(run, state)
    return head


def _said(name: str, state: str, tone: Tone, message: str) -> Json:
    return {
        "name": name,
        "state": state,
        "tone": tone,
        "alarm": tone == "bad",
        "message": message,
        "summary": f"{state}. {message}" if message else state,
        "facts": [],
    }


def _summary(state: str, tiles: Sequence[Tile]) -> str:
    """For those who listen: it changes when something happens, and not with every step."""
    words = {"failed": "has failed", "killed": "was killed", "empty": "is starting"}
    said = f"The run {words.get(state, f'is {state}')}."
    return f"{said} {_troubles(tiles) or 'No rank is in trouble.'}"


def _troubles(tiles: Sequence[Tile]) -> str:
    """ "Rank 1: silent. Ranks 2, 3: dead." """
    groups: dict[str, list[int]] = {}
    for tile in tiles:
        if tile.tone == "bad":
            groups.setdefault(tile.state, []).append(tile.rank)
    return " ".join(_sentence(f"{ranks_in_words(some)}: {word}") for word, some in groups.items())


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _facts(run: Run, state: str) -> list[tuple[str, str]]:
    start = run.starts[-1] if run.starts else {}
    total, step = start.get("total_steps") or 0, run.step
    facts = [("step", f"{step:,} of {total:,}" if total else f"{step:,}")]
    each = (start.get("plan") or {}).get("steps") or 0
    epochs = f"{run.epochs:,} of {-(-total // each):,}" if each and total else f"{run.epochs:,}"
    facts.append(("epochs done", epochs))
    facts.append(("processes", " → ".join(map(str, run.processes))))
    facts.append(("took", duration(run.seconds)))
    made = step - start.get("step", 0)
    if state == "running" and total > step and made > 0:
        left = (time.time() - start["time"]) / made * (total - step)
        facts.append(("left, about", duration(left)))
    speed = run.series.get("samples_per_second")
    if speed is not None and len(speed):
        facts.append(("samples a second", f"{speed.values[-1]:,.0f}"))
    facts.append(("restarts", f"{len(run.launches) - 1}"))
    if run.damaged:
        facts.append(("damaged lines", f"{run.damaged:,}"))
    return facts


def _figure(figure: Figure) -> Json:
    return {
        "about": {
            "title": figure.title,
            "caption": figure.caption,
            "spec": _live(figure.spec),
            "legend": [asdict(mark) for mark in figure.legend],
        },
        "words": {"alt": figure.alt, "header": figure.header, "rows": figure.rows},
        "data": {name: _grouped(data) for name, data in figure.data.items()},
    }


def _live(spec: Spec) -> Spec:
    """The last step is a signal, so that a chart grows and is not drawn anew."""
    found = copy.deepcopy(spec)
    found["params"] = [{"name": "last", "value": 1}]
    found["encoding"]["x"]["scale"]["domain"] = [0, {"expr": "last"}]
    return found


def _grouped(data: Data) -> Json:
    """Rows by line, each of which grows at its end."""
    place = data.columns.index("key") if "key" in data.columns else -1
    groups: dict[str, list[list[Any]]] = {}
    for row in data.rows:
        groups.setdefault(row[place] if place >= 0 else "", []).append(row)
    return {"columns": data.columns, "groups": groups}


def _data_change(old: Json, new: Json) -> Json:
    """By dataset and line: how many rows stay, and what comes after them."""
    found: Json = {}
    for name, data in new.items():
        before = old.get(name, {"columns": None, "groups": {}})
        if before["columns"] != data["columns"] or set(before["groups"]) - set(data["groups"]):
            found[name] = data
            continue
        tails = {}
        for key, rows in data["groups"].items():
            own = before["groups"].get(key, [])
            if own != rows:
                same = _same(own, rows)
                tails[key] = [same, rows[same:]]
        if tails:
            found[name] = {"tails": tails}
    return found


def _same(one: list[Any], other: list[Any]) -> int:
    """How many at the beginning are equal."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


def _of_one(table: Table) -> Table:
    """Without the column of the runs: there is one."""
    drop = table.header.index("run")
    rows = [row[:drop] + row[drop + 1 :] for row in table.rows]
    return replace(table, header=[name for name in table.header if name != "run"], rows=rows)


def _table(table: Table, last: int | None = None) -> Json:
    rows = table.rows if last is None else table.rows[-last:][::-1]
    return {
        "caption": table.caption,
        "header": table.header,
        "rows": rows,
        "numeric": table.numeric,
    }
