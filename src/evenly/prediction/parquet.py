"""Predictions as one parquet file. The only module that uses pyarrow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from evenly.errors import SettingError, StorageError
from evenly.prediction.files import opened
from evenly.prediction.manifest import read_columns
from evenly.tree import map_leaves

FILE = "predictions.parquet"
_ROWS = 2**14


def check_installed() -> None:
    """Refuse before anything is computed."""
    if find_spec("pyarrow") is None:
        raise SettingError(
            "format='parquet' needs pyarrow, which is not installed: pip install pyarrow"
        )


def convert(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the files of a folder into one parquet file; returns the manifest of that.

    Done by one process, some rows at a time. Tensors become columns of numbers, or of fixed-size
    lists with each row flattened; lists become what pyarrow makes of their first entries.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    found = zip(manifest["columns"], read_columns(folder, manifest), strict=True)
    columns = {Path(entry["file"]).stem: value for entry, value in found if "file" in entry}
    schema = writer = None
    try:
        for start in range(0, manifest["rows"], _ROWS):
            part = slice(start, min(start + _ROWS, manifest["rows"]))
            values = {name: _values(arrow, column[part]) for name, column in columns.items()}
            table = arrow.table(values, schema=schema)
            if writer is None:
                schema = table.schema
                writer = parquet.ParquetWriter(folder / FILE, schema)
            writer.write_table(table)
    except arrow.ArrowException as error:
        raise StorageError(
            f"the predictions could not be written as parquet: {error}. Use format='npy'."
        ) from error
    finally:
        if writer is not None:
            writer.close()
    with opened(folder / FILE, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
    for file in manifest["files"]:
        (folder / file).unlink()
    kept = [
        {key: entry[key] for key in ("name", "kind", "dtype", "shape") if key in entry}
        for entry in manifest["columns"]
    ]
    size = (folder / FILE).stat().st_size
    return {**manifest, "files": {FILE: size}, "columns": kept}


def _values(arrow: Any, rows: Any) -> Any:
    if not isinstance(rows, torch.Tensor):
        plain = map_leaves(lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, rows)
        return list(plain)
    if rows.dim() == 1:
        return arrow.array(rows.numpy())
    width = rows[0].numel()
    return arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1).numpy()), width)
