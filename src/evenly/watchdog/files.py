"""The files by which the launcher reads a worker process of its machine."""

from pathlib import Path

FILES_VARIABLE = "EVENLY_WATCH_FILES"
"""Where they are, without their endings."""


def stack_file(base: str | Path) -> Path:
    """Where the process writes its stack when it is asked for it."""
    return Path(f"{base}.stack")


def box_file(base: str | Path) -> Path:
    """Its black box."""
    return Path(f"{base}.box")
