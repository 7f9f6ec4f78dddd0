"""Writing at places in a file that several processes share, and making what is written last."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor, closed at the end."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: NDArray[Any] | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``; the system may take it in several bites.

    Plain writes rather than a mapped file: mapped pages count as this process's memory, and a
    full disk kills a process that writes to them.
    """
    if isinstance(data, bytes):
        view = memoryview(data)
    else:
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def runs(indices: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive samples start and stop in ``indices``."""
    cuts = (np.flatnonzero(np.diff(indices) != 1) + 1).tolist()
    return zip([0, *cuts], [*cuts, len(indices)], strict=True)


def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """How a .npy file of this type and shape begins; the values follow."""
    file = io.BytesIO()
    descr = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def create(path: Path, header: bytes, size: int) -> None:
    """Make a file of ``size`` bytes with a header and without its values."""
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
