"""Predictions in a folder: every batch goes straight to its place on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from evenly.errors import SettingError, StorageError
from evenly.prediction import parquet
from evenly.prediction.columns import Schema
from evenly.prediction.files import create, opened, runs, sync_folder, write_at
from evenly.prediction.layout import Format, Layout, file_names, lay_out
from evenly.prediction.manifest import described, make_manifest, write_manifest
from evenly.prediction.memory import Indices
from evenly.prediction.rows import RowWriter
from evenly.together import together
from evenly.turn import on_rank
from evenly.world import current_world


class Folder:
    """Collects predictions on disk, holding one batch in memory.

    Until all are safe there, the folder has another name and no manifest. All ranks must see the
    same file system. `prepare`, `open` and `finish` are meetings of all ranks.
    """

    def __init__(self, out: Path, format: Format, length: int, token: str) -> None:
        self._out = out
        self._partial = out.with_name(f"{out.name}.partial-{token}")
        self._format = format
        self._length = length
        self._schema = Schema(None, (), "")
        self._structure: Any = None
        self._layout = Layout({}, {}, {})
        self._rows: dict[int, RowWriter] = {}
        self._files = ExitStack()
        self._descriptors: dict[str, int] = {}

    def prepare(self) -> None:
        """Refuse a folder that exists, and make the one to write to."""
        on_rank(0)(self._make_folder)()
        together(self._see_folder)

    def open(self, schema: Schema) -> None:
        """Make all files at their full size, and open them."""
        self._schema = schema
        self._structure = described(schema.template)
        names = file_names(schema.columns)
        self._layout = lay_out(schema.columns, names, self._length, self._format)
        rank = current_world().rank
        for place, (name, column) in enumerate(zip(names, schema.columns, strict=True)):
            if column.kind == "rows":
                self._rows[place] = RowWriter(self._partial, name, rank, self._length)
        on_rank(0)(self._make_files)()
        together(self._open_files)

    def add(self, indices: Indices, values: list[Any]) -> None:
        with self._explained("write"):
            for place, region in self._layout.regions.items():
                rows, descriptor = region.encoded(values[place]), self._descriptors[region.file]
                for first, stop in runs(indices):
                    start = region.offset + int(indices[first]) * region.row_bytes
                    write_at(descriptor, rows[first:stop], start)
            for place, writer in self._rows.items():
                writer.add(indices, values[place])

    def finish(self) -> Path:
        """Sync, put lines in order, write the manifest, and give the folder its name."""
        together(self._sync)
        if self._rows:
            on_rank(0)(self._add_up)()
            together(self._place)
        self._files.close()
        on_rank(0)(self._commit)()
        return self._out

    def abandon(self) -> None:
        """Close and remove what is there; files that another rank has open do no harm."""
        with contextlib.suppress(OSError):
            self._files.close()
        if current_world().rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _make_folder(self) -> None:
        if os.path.lexists(self._out):
            raise SettingError(
                f"out={str(self._out)!r} exists, and predictions are never mixed with other files. "
                "Give another folder, or delete it."
            )
        with self._explained("make"):
            self._partial.mkdir(parents=True)

    def _see_folder(self) -> None:
        if not self._partial.is_dir():
            raise StorageError(
                f"rank {current_world().rank} does not see {self._partial}, which rank 0 made. "
                "Give a folder on a file system that all machines share."
            )

    def _make_files(self) -> None:
        with self._explained("make"):
            needed, free = sum(self._layout.sizes.values()), shutil.disk_usage(self._partial).free
            if needed > free:
                raise StorageError(
                    f"the predictions take {needed} bytes and {self._partial.parent} has {free} "
                    "left. Free some, or give a folder on another disk."
                )
            for file, header in self._layout.headers.items():
                create(self._partial / file, header, self._layout.sizes[file])
            for writer in self._rows.values():
                writer.create()

    def _open_files(self) -> None:
        with self._explained("open"):
            for file in self._layout.headers:
                descriptor = self._files.enter_context(opened(self._partial / file, os.O_WRONLY))
                self._descriptors[file] = descriptor
            for writer in self._rows.values():
                self._files.callback(writer.close)
                writer.open()

    def _sync(self) -> None:
        with self._explained("write"):
            for descriptor in self._descriptors.values():
                os.fsync(descriptor)
            for writer in self._rows.values():
                writer.sync()

    def _add_up(self) -> None:
        with self._explained("write"):
            for writer in self._rows.values():
                writer.add_up()

    def _place(self) -> None:
        with self._explained("write"):
            for writer in self._rows.values():
                writer.place()

    def _commit(self) -> None:
        with self._explained("finish"):
            manifest = make_manifest(
                self._partial,
                format=self._format,
                length=self._length,
                structure=self._structure,
                columns=self._entries(),
            )
            if self._format == "parquet":
                manifest = parquet.convert(self._partial, manifest)
            write_manifest(self._partial, manifest)
            sync_folder(self._partial)
            if os.path.lexists(self._out):  # renaming would replace an empty folder
                raise FileExistsError(f"{self._out} was made meanwhile")
            self._partial.rename(self._out)
            try:
                sync_folder(self._out.parent)
            except OSError:
                self._out.rename(self._partial)
                raise

    def _entries(self) -> list[dict[str, Any]]:
        """The columns as the manifest has them."""
        found: list[dict[str, Any]] = []
        for place, column in enumerate(self._schema.columns):
            entry: dict[str, Any] = {"name": column.name, "kind": column.kind}
            if place in self._layout.regions:
                region = self._layout.regions[place]
                entry |= {
                    "file": region.file,
                    "offset": region.offset,
                    "dtype": str(region.stored).removeprefix("torch."),
                    "predicted": str(column.dtype).removeprefix("torch."),
                    "shape": [self._length, *column.shape],
                }
            elif place in self._rows:
                writer = self._rows[place]
                entry |= {"file": writer.lines.name, "offsets": writer.offsets.name}
                entry["row"] = column.row
            found.append(entry)
        return found

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"rank {current_world().rank} could not {what} the predictions for {self._out}: "
                f"{error}. Nothing was finished there; see to the disk and predict again."
            ) from error
