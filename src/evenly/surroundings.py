"""What the last bits of a result depend on besides the program: versions, threads, hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WORDS = {
    "torch": "torch",
    "threads": "threads per process",
    "instructions": "instruction set",
    "device": "device",
}


def surroundings(device: torch.device) -> dict[str, Any]:
    """Of this process. Ranks are alike in these, or their bits are not."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
    }


def what_changed(before: Mapping[str, Any], here: Mapping[str, Any], *, bits: bool) -> str:
    """In words, what matters: for ``bits`` everything, for numbers only another release of torch,
    whose functions and optimizers may compute otherwise.
    """
    changed = []
    for name, words in _WORDS.items():
        old, new = before.get(name), here.get(name)
        if not bits and (name != "torch" or _release(old) == _release(new)):
            continue
        if old != new:
            changed.append(f"{words} {old} (now {new})")
    return ", ".join(changed)


def _release(version: object) -> list[str]:
    """1.2 of "1.2.3+cpu"."""
    return str(version).split(".")[:2]
