"""Runs as one HTML page, which needs no other file and fetches nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from evenly.errors import SettingError, StorageError
from evenly.record.run import Run, read_run
from evenly.record.summary import labels as labels_of
from evenly.report import tables
from evenly.report.bundle import javascript
from evenly.report.curves import curves, difference, speeds
from evenly.report.figures import Figure, Mark
from evenly.report.matrices import matrices
from evenly.report.strips import strips
from evenly.report.tables import Table

# Vega makes functions of its expressions. Nothing may be fetched or sent, whatever a record says.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data:; form-action 'none'; base-uri 'none'"
)


def write_report(
    runs: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Read runs (folders, or records) and write the page. It needs vl-convert-python."""
    text = page([read_run(run) for run in runs], title=title)
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the report {path} cannot be written: {error}") from error
    return path


def page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """The page as text. Several runs are laid over each other, in their order."""
    if not runs:
        raise SettingError("there is no run to report; name one or more.")
    labels = labels_of(list(runs))
    main, others = curves(runs, labels)
    apart = difference(runs, labels)
    quick = [*speeds(runs, labels), *strips(runs, labels)]
    confusions = matrices(runs, labels)
    figures = [*main, *([apart] if apart else []), *quick, *confusions]
    said, proof = tables.coverage(runs, labels)
    swatches = len(runs) > 1
    more = f"<p>Not drawn, for want of room: {escape(', '.join(others))}.</p>" if others else ""
    numbers = tables.metrics(runs, labels)
    sections = [
        ("runs", "Runs", _table(tables.overview(runs, labels), swatches=swatches)),
        ("numbers", "Numbers", "" if numbers is None else _table(numbers)),
        ("curves", "Curves", _figures([*main, *([apart] if apart else [])]) + more),
        ("speed", "Speed", _figures(quick)),
        ("confusion", "Confusion", _figures(confusions)),
        (
            "coverage",
            "Every sample once",
            f"<p>{escape(said)}</p>{'' if proof is None else _folded('Digests', _table(proof))}",
        ),
        ("events", "Events", _table(tables.events(runs, labels))),
        ("settings", "Settings", _table(tables.settings(runs, labels))),
        ("environment", "Environment", _table(tables.environment(runs, labels))),
    ]
    shown = [section for section in sections if section[2]]
    name = title or ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
    links = "".join(f'<li><a href="#{key}">{escape(text)}</a></li>' for key, text, _ in shown)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(text)}'
        f"</h2>{content}</section>"
        for key, text, content in shown
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(name)} · Evenly</title>
<style>{_file("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the runs</a>
<header>
<h1>{escape(name)}</h1>
<button type="button" id="theme" hidden>Dark</button>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
<noscript><p>The charts need JavaScript; the tables below them have their numbers.</p></noscript>
{body}
</main>
<footer><p>Written by Evenly from the run record. This file needs nothing else.</p></footer>
<script type="application/json" id="charts">{_json(figures)}</script>
<script>{javascript()}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def _figures(figures: Sequence[Figure]) -> str:
    return f'<div class="figures">{"".join(map(_figure, figures))}</div>' if figures else ""


def _figure(figure: Figure) -> str:
    name = figure.name
    buttons = "".join(
        f'<button type="button" data-zoom="{act}" aria-label="{text}: {escape(figure.title)}">'
        f"{sign}</button>"
        for act, sign, text in (
            ("in", "+", "Zoom in"),
            ("out", "−", "Zoom out"),  # noqa: RUF001
            ("reset", "Reset", "Show all steps"),
        )
    )
    tools = f'<div class="tools" hidden>{buttons}</div>' if figure.zooms else ""
    wide = ' class="wide"' if figure.wide else ""
    marks = "".join(map(_mark, figure.legend))
    legend = f'<ul class="legend">{marks}</ul>' if marks else ""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    numbers = _folded(
        "As numbers", _table(Table(header=figure.header, rows=figure.rows, caption=figure.title))
    )
    return (
        f'<figure id="{name}"{wide} aria-labelledby="{name}-title">'
        f'<div class="head"><h3 id="{name}-title">{escape(figure.title)}</h3>{tools}</div>{legend}'
        f'<div class="chart" id="{name}-chart" role="img" aria-label="{escape(figure.alt)}"></div>'
        f"{caption}{numbers}</figure>"
    )


def _mark(mark: Mark) -> str:
    return (
        f'<li><span class="mark {mark.kind}" style="--mark:{mark.colour}" aria-hidden="true">'
        f"</span>{escape(mark.label)}</li>"
    )


def _table(table: Table, *, swatches: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    rows = []
    for place, (first, *cells) in enumerate(table.rows):
        swatch = ""
        if swatches:
            swatch = (
                f'<span class="mark box" style="--mark:var(--run-{place % 8 + 1})" '
                'aria-hidden="true"></span>'
            )
        kind = ' class="marked"' if place in table.marked else ""
        plain = "".join(f"<td>{escape(text)}</td>" for text in cells)
        rows.append(f'<tr{kind}><th scope="row">{swatch}{escape(first)}</th>{plain}</tr>')
    kind = "numeric" if table.numeric else "words"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f'<table class="{kind}"><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _folded(text: str, content: str) -> str:
    return f"<details><summary>{escape(text)}</summary>{content}</details>"


def _json(figures: Sequence[Figure]) -> str:
    """For a script element: no record can end it, or begin another."""
    charts = [
        {
            "name": figure.name,
            "spec": figure.spec,
            "zooms": figure.zooms,
            "data": {
                name: {"columns": data.columns, "rows": data.rows}
                for name, data in figure.data.items()
            },
        }
        for figure in figures
    ]
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _file(name: str) -> str:
    return files("evenly.report").joinpath(name).read_text(encoding="utf-8")
