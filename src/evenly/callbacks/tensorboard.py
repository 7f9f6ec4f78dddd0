"""Numbers for TensorBoard. The only module that uses it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.callbacks.logging import Logger
from evenly.errors import SettingError

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class TensorBoard(Logger):
    """Writes every number of the history into event files: ``tensorboard --logdir FOLDER``.

    Into ``folder``, or "tensorboard" in the Trainer's. The numbers are those over all ranks,
    written by rank 0. Where a run goes on from a checkpoint, TensorBoard forgets what came after.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        if find_spec("tensorboard") is None:
            raise SettingError(
                "callbacks.TensorBoard needs tensorboard, which is not installed: "
                "pip install tensorboard"
            )
        self._folder = None if folder is None else Path(folder)
        self._place = ""
        self._writer: Any = None

    def begin(self, trainer: Trainer, settings: Mapping[str, Any]) -> None:
        folder = self._folder
        if folder is None:
            if trainer.recorder is None:
                raise SettingError(
                    "callbacks.TensorBoard does not know where to write: give it a folder, or give "
                    "the Trainer folder=."
                )
            folder = trainer.recorder.folder / "tensorboard"
        self._place = str(folder)
        self._writer = _opened(self._place, purge_step=trainer.step + 1)
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        text = "\n".join(["| setting | value |", "|---|---|", *rows])
        self._writer.add_text("settings", text, trainer.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._writer
        if writer is None:  # an evaluation after the end of `fit`
            writer = _opened(self._place)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        if writer is not self._writer:
            writer.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _opened(folder: str, **options: Any) -> Any:
    # Loading it takes a second, which only the rank that writes need spend.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, **options)
