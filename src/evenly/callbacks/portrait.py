"""What a run is made of, in plain values: its settings, and where it runs."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenly import __version__
from evenly.world import World

if TYPE_CHECKING:
    from evenly.trainer import Trainer

# Beyond this a tensor is not for reading; its shape is noted instead.
_NUMBERS = 2**16
_GIT_SECONDS = 2.0


_SHOWN = (
    *("batch_size", "microbatch", "pieces", "seed", "shuffle", "tail", "workers", "precision"),
    *("clip_norm", "nonfinite", "save_every", "scheduler"),
)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a Trainer's arguments that the record shows."""
    return {
        **{name: given[name] for name in _SHOWN},
        "loss": given["step"] if given["loss"] is None else given["loss"],
        "metrics": list(given["metrics"] or ()),
        "train_metrics": list(given["train_metrics"] or ()),
    }


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's settings; of objects, what they are."""
    parameters = list(trainer.model.parameters())
    found = {
        **trainer.options,
        "model": _name(trainer.model),
        "parameters": sum(one.numel() for one in parameters),
        "trained_parameters": sum(one.numel() for one in parameters if one.requires_grad),
        "callbacks": [_name(one) for one in trainer.callbacks],
    }
    optimizer = trainer.optimizer
    if optimizer is not None:
        groups = [{n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups]
        found["optimizer"] = {"name": _name(optimizer), **groups[0]}
        if len(groups) > 1:
            found["optimizer"]["groups"] = groups
    return {name: plain(value) for name, value in found.items()}


def launch_of(world: World) -> dict[str, Any]:
    """This process, its machine and its packages."""
    found: dict[str, Any] = {
        "evenly": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": os.cpu_count(),
        "processes": world.size,
        "device": world.device.type,
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
    }
    if not _started_by_us():
        found |= {"program": sys.argv[0], "arguments": sys.argv[1:]}
    if world.device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(world.device)
        found["cuda"] = torch.version.cuda
    return {**found, "git": _git()}


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers and lists as they are, objects by what they are."""
    if isinstance(value, torch.Tensor):
        if value.numel() > _NUMBERS:
            return {"shape": list(value.shape)}
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return plain(torch.as_tensor(value))
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, os.PathLike) else _name(value)


def _name(thing: Any) -> str:
    """Of a function, a class or an object's class; a lambda has none worth reading."""
    function = getattr(thing, "func", thing)  # of a functools.partial
    name = getattr(function, "__name__", type(function).__name__)
    return "a lambda" if name == "<lambda>" else str(name)


def _started_by_us() -> bool:
    """A process of `launch`: its command line is no word of the user's."""
    return Path(sys.argv[0]).name == "member.py" and "evenly" in Path(sys.argv[0]).parts


def _git() -> dict[str, Any] | None:
    """The commit of the program's folder, and whether its files differ from it; None without."""
    program = Path(sys.argv[0])
    own = program.is_file() and not _started_by_us()
    folder = program.resolve().parent if own else Path.cwd()
    commit = _asked(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _asked(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _asked(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
