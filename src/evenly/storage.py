"""Folders that are whole or not there: written beside their place, then sealed and renamed.

The manifest, with the size and the SHA-256 of every file, is written last. A folder that was not
sealed has another name; one that was damaged since does not pass `check`. Nothing here runs code
from a file, or leaves the folder by a name in one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from evenly.errors import FormatError, StorageError

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


class Entry(TypedDict):
    """One file, as the manifest knows it."""

    bytes: int
    sha256: str


def partial_of(folder: Path, token: str) -> Path:
    """Where a folder is written before it is sealed."""
    return folder.with_name(f"{folder.name}{_PARTIAL}{token}")


def final_of(partial: Path) -> Path:
    """The place that `partial_of` was made for."""
    return partial.with_name(partial.name.partition(_PARTIAL)[0])


def entry_of(file: Path) -> Entry:
    """Size and checksum of a file, which is on disk when this returns."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return Entry(bytes=opened.tell(), sha256=digest)


def seal(
    partial: Path,
    folder: Path,
    *,
    kind: str,
    version: int,
    files: Mapping[str, Entry],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest, then give the folder its name. An existing one is never replaced.

    ``about`` is what others may want to know without reading the files.
    """
    content = {"kind": kind, "version": version, "files": dict(files), "about": about or {}}
    content["sha256"] = _digest(content)
    with (partial / MANIFEST).open("x") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)
    if folder.exists():
        raise StorageError(f"{folder} exists; a finished folder is never written over.")
    partial.rename(folder)
    sync(folder.parent)


def manifest(folder: Path, *, kind: str, version: int) -> dict[str, Any]:
    """What the manifest says; the files are not looked at."""
    try:
        content: dict[str, Any] = dict(json.loads((folder / MANIFEST).read_bytes()))
        found, written, digest = content["kind"], content["version"], content.get("sha256")
        content["files"] = dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder} has no readable manifest ({error!r}).") from None
    if found != kind:
        raise FormatError(f"{folder} holds {found!r} and not {kind!r}.")
    if written != version:
        raise FormatError(
            f"{folder} has version {written!r} of its format and this Evenly reads {version}. "
            "Read it with the version that wrote it."
        )
    if digest != _digest(content):
        raise StorageError(f"{folder / MANIFEST} is not what was written: its checksum differs.")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    """Of a manifest, apart from the digest itself."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check(folder: Path, *, kind: str, version: int) -> dict[str, Entry]:
    """The files of a sealed folder, after comparing each with the manifest."""
    files: dict[str, Entry] = manifest(folder, kind=kind, version=version)["files"]
    for name, expected in files.items():
        _check_file(folder, name, expected)
    return files


def _check_file(folder: Path, name: Any, expected: Any) -> None:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise StorageError(f"{folder} names a file {name!r}, which is not one inside it.")
    file = folder / name
    if file.is_symlink() or not file.is_file():
        raise StorageError(f"{file} is missing, or not a plain file.")
    try:
        same = entry_of(file) == expected
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from None
    if not same:
        raise StorageError(f"{file} is not what was written: its size or checksum differs.")


def remove(folder: Path) -> None:
    """Take a folder away in one go, so that a half-removed one is not taken for a whole one.

    One that cannot be removed stays: no run should end because an old checkpoint does not go.
    """
    doomed = folder.with_name(f"{folder.name}{_PARTIAL}removed")
    with contextlib.suppress(OSError):
        if _PARTIAL not in folder.name:
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            folder = doomed
        shutil.rmtree(folder, ignore_errors=True)


def clean(parent: Path) -> None:
    """Remove what killed runs left unfinished."""
    for folder in parent.glob(f"*{_PARTIAL}*"):
        remove(folder)


def sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
