"""When a rank that does not move is reported, and when the run is ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from evenly.errors import SettingError

REPORT_VARIABLE = "EVENLY_HANG_REPORT"
TIMEOUT_VARIABLE = "EVENLY_HANG_TIMEOUT"

_REPORT = 60.0


class Limits(NamedTuple):
    """In seconds; 0 is never."""

    report: float
    timeout: float


def checked(name: str, value: float | None) -> float | None:
    """The value, if it is a number of seconds or not given."""
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise SettingError(f"{name}={value!r}: give seconds, or 0 for never.")
    return float(value)


def from_environment(environ: Mapping[str, str], *, waits: float = 600.0) -> Limits:
    """What the variables say, else 60 s and the time that ``waits`` for other ranks may take:
    whoever allows long waits does not want them ended sooner by this.
    """
    report, timeout = _REPORT, waits
    with_names = {REPORT_VARIABLE: report, TIMEOUT_VARIABLE: timeout}
    for name in with_names:
        text = environ.get(name, "").strip()
        if text:
            try:
                with_names[name] = checked(name, float(text)) or 0.0
            except ValueError:
                raise SettingError(f"{name}={text!r}: give seconds, or 0 for never.") from None
    return Limits(with_names[REPORT_VARIABLE], with_names[TIMEOUT_VARIABLE])
