"""What the bits depend on besides the program: held fast while pieces run, and recorded."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from evenly.errors import EvenlyWarning, SettingError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_SETTINGS = ("pieces", "threads")
"""What a user sets: another value is refused. The rest is as the machine is, and is warned of."""


def facts(pieces: int, threads: int, device: torch.device) -> dict[str, Any]:
    """What must be the same for the same bits, for a checkpoint."""
    on_gpu = device.type == "cuda"
    return {
        "pieces": pieces,
        "threads": threads,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul": torch.get_float32_matmul_precision(),
    }


def check(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None, where: str) -> None:
    """Refuse to go on with other pieces or threads, and warn of another machine or torch."""
    before, now = saved or {}, here or {}
    for name in _SETTINGS:
        if before.get(name) != now.get(name):
            raise SettingError(
                f"the run in {where} has {name}={before.get(name)} and this one "
                f"{name}={now.get(name)}, which gives other bits. Set it as it was, or start in "
                "another folder."
            )
    warn_of_differences(before, now, f"the run in {where} was made with", "here there is")


def warn_of_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], first: str, second: str
) -> None:
    apart = [name for name in one if one[name] != other.get(name)]
    if apart:
        listing = ", ".join(f"{name} {one[name]} ({second} {other.get(name)})" for name in apart)
        warnings.warn(
            f"{first} {listing}: the numbers will be equal to rounding, and not to the bit.",
            EvenlyWarning,
            stacklevel=2,
        )


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
