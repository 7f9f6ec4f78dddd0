"""A model's tensors: loaded from wherever they are, and exported to one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import safetensors
import safetensors.torch
import torch
from torch import nn

from evenly.checkpoint.retention import Mode
from evenly.checkpoint.sources import Weights, open_weights, plain
from evenly.errors import SettingError, StorageError
from evenly.wording import some


class Fit(NamedTuple):
    """What did not fit, by name."""

    missing: list[str]
    """In the model and not in the file."""
    unexpected: list[str]
    """In the file and not in the model."""


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    step: int | None = None,
    best: str | None = None,
    mode: Mode | None = None,
    average: bool = False,
) -> Fit:
    """Load a model's weights from a run's folder, a checkpoint, or a file of another tool.

    Files are safetensors or torch's own (read without running code); prefixes of wrappers
    ("module.", "_orig_mod.", ...) are seen through. Of a run the newest checkpoint, the one of
    ``step``, or the ``best`` by a number of that name (``mode`` "min" or "max" says which are
    better; of a loss the low ones); ``average`` takes the weights of
    `callbacks.EMA`. One tensor at a time is read. Every rank that wants them must call it; ranks
    do not meet. With ``strict=False`` what does not fit by name is left as it is and returned.
    """
    weights = open_weights(source, step=step, best=best, mode=mode, average=average)
    targets = {plain(name): value for name, value in model.state_dict().items()}
    named = _matched(weights, list(targets))
    missing = [name for name in targets if name not in named]
    used = set(named.values())
    unexpected = [name for name in weights.read if name not in used]
    if not named or (strict and (missing or unexpected)):
        raise StorageError(
            f"{weights.where} does not fit the model: it lacks {some(missing) or 'nothing'} and "
            f"has {some(unexpected) or 'nothing'} besides. Build the model that was saved, or give "
            "strict=False to load what fits."
        )
    with torch.no_grad():
        for name, there in named.items():
            value = weights.read[there]()
            if value.shape != targets[name].shape:
                raise StorageError(
                    f"{name} has shape {tuple(value.shape)} in {weights.where} and "
                    f"{tuple(targets[name].shape)} in the model. Build the model that was saved."
                )
            targets[name].copy_(value)
    return Fit(missing, unexpected)


def export(weights: Weights, out: Path, *, replace: bool = False) -> int:
    """Write one file of them: safetensors, or torch's own if it ends in .pt or .pth. Its bytes."""
    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise SettingError(f"{out}: give a name that ends in .safetensors, .pt or .pth.")
    if out.exists() and not replace:
        raise StorageError(
            f"{out} exists; give another name, or let it be replaced (--replace, replace=True)."
        )
    tensors = {name: read() for name, read in weights.read.items()}
    partial = out.with_name(f"{out.name}.partial-{uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".safetensors":
            safetensors.torch.save_file(tensors, partial, metadata={"format": "pt"})
        else:
            torch.save(tensors, partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(out)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{out} could not be written: {error}") from error
    return out.stat().st_size


def _matched(weights: Weights, wanted: list[str]) -> dict[str, str]:
    """The names in the file by the model's, seen through a wrapper of any name ("model.", "net.")
    if they fit better so.
    """
    prefixes = {name[: name.index(".") + 1] for name in weights.read if "." in name}
    best: dict[str, str] = {}
    for prefix in ("", *sorted(prefixes)):
        short = {n[len(prefix) :]: n for n in weights.read if n.startswith(prefix)}
        found = {name: short[name] for name in wanted if name in short}
        if len(found) > len(best):
            best = found
    return best
