"""A figure: a chart as a Vega-Lite specification, its words, and its numbers as a table.

Colours are variables of the page's style sheet, so that one drawing is right in light, in dark and
on paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]

NOTHING = "\N{EN DASH}"
"""Stands where there is no value."""

COLOURS = 8
"""How many runs have a colour of their own."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows of a chart, without the names repeated in each; page.js puts them together."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An entry of a legend: a colour, or a kind of line."""

    label: str
    colour: str = "var(--ink)"
    kind: str = "box"
    """"box", "line", "dashed", "dot", "point" or "event"."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Everything that the page needs to show one chart, also to those who do not see it."""

    name: str
    """Unique on the page; an identifier."""
    title: str
    alt: str
    """What there is to see, in words."""
    spec: Spec
    data: dict[str, Data]
    caption: str = ""
    legend: list[Mark] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    """Of the table of numbers."""
    rows: list[list[str]] = field(default_factory=list)
    zooms: bool = False
    """Whether its steps can be zoomed."""
    wide: bool = False
    """Whether it takes the whole width."""


def colour(number: int) -> str:
    """Of the run of this number."""
    return f"var(--run-{number % COLOURS + 1})"


def number(value: float | None, digits: int = 6) -> str:
    """As people read it; what is not there is a dash."""
    if value is None:
        return NOTHING
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def frame(height: int) -> Spec:
    """What all charts have in common."""
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        "config": {
            "font": "inherit",
            "view": {"stroke": None},
            "axis": {
                "labelColor": "var(--soft)",
                "titleColor": "var(--soft)",
                "gridColor": "var(--grid)",
                "domainColor": "var(--line)",
                "tickColor": "var(--line)",
                "titleFontWeight": "normal",
                "labelFontSize": 11,
                "titleFontSize": 11,
            },
            "text": {"color": "var(--soft)"},
            "rule": {"color": "var(--soft)"},
        },
    }
