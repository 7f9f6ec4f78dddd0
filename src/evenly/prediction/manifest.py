"""The manifest of predictions on disk: written last, so that what has one is whole."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections import namedtuple
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evenly import tracing
from evenly.errors import SettingError, StorageError
from evenly.prediction.columns import ATOMS
from evenly.prediction.rows import Rows
from evenly.tree import map_leaves

NAME = "manifest.json"
_KIND = "evenly predictions"
_VERSION = 1
# Python names it from 3.13 on. Without it the kernel refuses private maps larger than memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def read_predictions(path: str | os.PathLike[str]) -> Any:
    """The predictions that were written to ``path``, in the structure they were given in.

    Nothing is loaded until it is used: tensors are mapped from disk (changes to them stay in
    memory), lists are `Rows`, read entry by entry. Needs no world. Named tuples come back as
    named tuples of the same name, other mappings as dicts.
    """
    folder = tracing.found(path)
    manifest = _read(folder)
    if manifest.get("format") == "parquet":
        raise SettingError(
            f"the predictions in {folder} are a parquet file, which cannot be mapped. Read it with "
            f"pyarrow.parquet.read_table({str(folder / 'predictions.parquet')!r})."
        )
    try:
        values = read_columns(folder, manifest)
        return map_leaves(lambda place: values[place], _structure(manifest["structure"]), ATOMS)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OSError) as error:
        raise StorageError(
            f"{folder / NAME} does not fit the files beside it ({error!r}). It was changed, or not "
            "written by Evenly; predict again."
        ) from None


def read_columns(folder: Path, manifest: Mapping[str, Any]) -> list[Any]:
    """Each column of the predictions, from the files that the manifest names."""
    return [_column(folder, column) for column in manifest["columns"]]


def make_manifest(
    folder: Path, *, format: str, length: int, structure: Any, columns: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What is in the folder, as JSON values."""
    return {
        "kind": _KIND,
        "version": _VERSION,
        "format": format,
        "rows": length,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "structure": structure,
        "columns": list(columns),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    with (folder / NAME).open("x") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{folder} holds no finished predictions ({error}). Folders named '.partial-' are what "
            "a killed run leaves; predict again, and delete them."
        ) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files", {}), dict):
        raise StorageError(f"{folder / NAME} is no manifest of predictions.")
    if manifest.get("kind") != _KIND or manifest.get("version") != _VERSION:
        raise StorageError(
            f"{folder / NAME} is {manifest.get('kind')!r} of version {manifest.get('version')!r}; "
            f"this Evenly reads {_KIND!r} of version {_VERSION}. Use the Evenly that wrote it."
        )
    for name, size in manifest.get("files", {}).items():
        file = _inside(folder, name)
        found = file.stat().st_size if file.exists() else "no"
        if found != size:
            raise StorageError(
                f"{file} has {found} bytes and should have {size}: the folder was changed or not "
                "copied whole. Copy it again, or predict again."
            )
    return dict(manifest)


def _inside(folder: Path, name: Any) -> Path:
    """A file that a manifest names. Names that lead out of the folder, and links, are refused."""
    if not isinstance(name, str) or Path(name).name != name or (folder / name).is_symlink():
        raise StorageError(f"{folder / NAME} names a file {name!r}, which is not one beside it.")
    return folder / name


def _column(folder: Path, column: Mapping[str, Any]) -> Any:
    if column["kind"] == "nothing":
        return None
    if column["kind"] == "rows":
        lines, offsets = _inside(folder, column["file"]), _inside(folder, column["offsets"])
        return Rows(lines, offsets, column["row"])
    dtype, shape = getattr(torch, column["dtype"]), column["shape"]
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(
        _mapped(_inside(folder, column["file"])), dtype=dtype, count=count, offset=column["offset"]
    )
    return flat.reshape(shape)


def _mapped(path: Path) -> mmap.mmap:
    """The file in memory, paged in on use; writing to it changes the process's copy alone."""
    with path.open("rb") as file:
        if sys.platform != "linux":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return mmap.mmap(
            file.fileno(),
            0,
            flags=mmap.MAP_PRIVATE | _NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )


def described(tree: Any) -> Any:
    """A structure as JSON values; its leaves are the places of columns."""
    if isinstance(tree, Mapping):
        odd = [key for key in tree if not isinstance(key, str | int)]
        if odd:
            raise SettingError(
                f"the predictions have the key {odd[0]!r} of type {type(odd[0]).__name__}, which a "
                "manifest cannot hold; use strings."
            )
        return {"dict": [[key, described(value)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        named = {}
        if hasattr(tree, "_fields"):
            named = {"name": type(tree).__name__, "fields": list(tree._fields)}
        return {"tuple": [described(value) for value in tree], **named}
    return tree


def _structure(described: Any) -> Any:
    if isinstance(described, int):
        return described
    if "dict" in described:
        return {key: _structure(value) for key, value in described["dict"]}
    values = [_structure(value) for value in described["tuple"]]
    if "fields" in described:
        return namedtuple(described["name"], described["fields"])(*values)
    return tuple(values)
