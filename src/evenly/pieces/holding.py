"""What the bits depend on besides the program: held fast while pieces run, compared over ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from evenly.collectives import all_gather_object
from evenly.errors import EvenlyWarning
from evenly.surroundings import what_changed
from evenly.world import current_world

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def tell_of_differences(here: Mapping[str, Any]) -> None:
    """Say where ranks are not alike, so that the bits depend on who has which piece; a meeting of
    all ranks.
    """
    for rank, other in enumerate(all_gather_object(here)):
        changed = what_changed(here, other, bits=True)
        if changed and current_world().rank == 0:
            warnings.warn(
                f"rank 0 has {changed.replace('(now', f'(rank {rank}:')}: the bits then depend on "
                "which rank has which piece, and not only on the number of pieces.",
                EvenlyWarning,
                stacklevel=3,
            )
            return


@contextlib.contextmanager
def held(threads: int, device: torch.device) -> Iterator[None]:
    """So many threads, and on a GPU deterministic algorithms; afterwards as before."""
    with contextlib.ExitStack() as stack:
        if torch.get_num_threads() != threads:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        if device.type == "cuda":
            _hold_gpu(stack)
        yield


def _hold_gpu(stack: contextlib.ExitStack) -> None:
    if _CUBLAS not in os.environ:
        os.environ[_CUBLAS] = ":4096:8"
        stack.callback(os.environ.pop, _CUBLAS, None)
    stack.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    stack.callback(setattr, settings, "fill_uninitialized_memory", fill)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # which algorithm is quickest is not always the same
    settings.fill_uninitialized_memory = False  # costs time, and nothing here reads it
