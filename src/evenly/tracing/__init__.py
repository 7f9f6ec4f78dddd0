"""What a run did, step by step, written down for `evenly verify`.

::

    recorder   sees the steps, numbers and predictions of one rank
    journal    writes them to its folder
    forward    what goes into the model: rows, random draws, precision
    prints     digests and samples of tensors, small enough to keep
    hook       `evenly.trace`, for loops that Evenly knows nothing of

Off unless the variable EVENLY_TRACE names a folder: then `current()` is None, and so is `active`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenly.tracing.recorder import Recorder

FOLDER, STEPS = "EVENLY_TRACE", "EVENLY_TRACE_STEPS"

active: Recorder | None = None
"""The recorder, once something has asked for it by `current()`."""


def current() -> Recorder | None:
    """The recorder of this process, made at the first call; None where tracing is off."""
    global active
    folder = os.environ.get(FOLDER)
    if active is not None and (not folder or active.folder != Path(folder)):
        active.close()
        active = None
    if active is None and folder:
        from evenly.tracing.recorder import Recorder

        active = Recorder.begin(Path(folder), int(os.environ.get(STEPS, "20")))
    return active


def redirected(path: Any) -> Any:
    """Where a traced run writes instead of ``path``, so that it touches nothing of the user's."""
    folder = os.environ.get(FOLDER)
    if not folder or path is None:
        return path
    place = Path(path).absolute()
    return Path(folder) / "folders" / f"{zlib.crc32(str(place).encode()):08x}-{place.name}"


def found(path: str | os.PathLike[str]) -> Path:
    """``path``, or where this traced run has written instead of it."""
    moved = Path(redirected(path))
    return moved if moved.exists() else Path(path)
