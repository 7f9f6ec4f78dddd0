"""Whole lines of a record, from any offset on, also while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenly.errors import StorageError

FILE = "record.jsonl"
VERSION = 1
"""Of the format. Kinds and names may be added to one; a change of meaning is a new one."""

_BLOCK = 1000

Entry = dict[str, Any]


class Tail:
    """The lines of a record that were not read yet.

    ``offset`` is where the next read begins, always after a whole line, so that it can be kept and
    given to another Tail. A last line without its end is left for the next time.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.damaged = 0
        """Lines that were no JSON objects, and were passed over."""

    def read(self, limit: int | None = None) -> list[Entry]:
        """The whole lines there are now; of about ``limit`` bytes, if that is given.

        A record that became shorter than what was read is another one, and is an error.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    raise StorageError(f"{self.path} was replaced while it was read. Read it anew.")
                file.seek(self.offset)
                data = file.read() if limit is None else file.read(limit) + file.readline()
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error}") from None
        end = data.rfind(b"\n") + 1
        self.offset += end
        found: list[Entry] = []
        lines = data[:end].splitlines()
        for begin in range(0, len(lines), _BLOCK):
            found += self._block(lines[begin : begin + _BLOCK])
        return found

    def _block(self, lines: list[bytes]) -> list[Entry]:
        """Parsed as one list, which is quicker than line by line, unless one is damaged."""
        try:
            entries = json.loads(b"[" + b",".join(lines) + b"]")
            if len(entries) != len(lines):
                raise ValueError
        except ValueError:
            entries = [_parsed(line) for line in lines]
        good = [
            one for one in entries if isinstance(one, dict) and isinstance(one.get("kind"), str)
        ]
        self.damaged += len(lines) - len(good)
        return good


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def record_of(path: Path) -> Path:
    """The record that is meant by a run's folder or by the file itself."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise StorageError(
            f"{path} holds no run record ({FILE}). A Trainer with folder= writes one there."
        )
    return file
