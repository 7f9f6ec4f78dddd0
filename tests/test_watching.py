"""Ranks that watch each other, without a launcher: in warm processes."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import evenly
from evenly.callbacks import Callback
from evenly.testing import run_ranks
from evenly.watchdog import peers
from evenly.watchdog.table import read_ranks
from trainings import digits, made


class Do(Callback):
    """Something on one rank, at one step or at every."""

    ranks = "every"

    def __init__(self, what: Callable[[], Any], *, rank: int, step: int | None = None) -> None:
        self.what, self.rank, self.step = what, rank, step

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        if trainer.world.rank == self.rank and self.step in (None, trainer.step):
            self.what()


def heard() -> list[str]:
    """What this rank, as the one that watches, tells the user."""
    said: list[str] = []
    peers._say = said.append  # type: ignore[assignment]
    return said


def test_one_rank_tells_of_one_that_sleeps_with_its_stack() -> None:
    def program() -> list[str]:
        said = heard()
        sleeper = Do(lambda: time.sleep(2.5), rank=1, step=5)
        made(callbacks=[sleeper], hang_report=1.0).fit(digits(), epochs=1)
        return said

    found = run_ranks(program, 3)
    told = [said for said in found if any("in a callback" in text for text in said)]
    assert len(told) == 1, found  # one of them, usually rank 0
    report = next(text for text in told[0] if "in a callback" in text)
    assert re.match(r"rank 1 has not moved for \d s \(process ", report)
    assert "in a callback (on_step_end of Do), at step 4 of epoch 0. " in report
    assert "Ranks 0, 2 wait for it in the exchange of gradients of step 5 of epoch 0." in report
    assert "in on_step_end" in report


def test_when_rank_0_holds_pythons_lock_another_rank_tells() -> None:
    def program() -> list[str]:
        said = heard()

        # The lock is kept in calls of a PyDLL.
        def hold() -> None:
            time.sleep(0.6)
            ctypes.PyDLL(None).sleep(5)

        holder = Do(hold, rank=0, step=5)
        made(callbacks=[holder], hang_report=1.0).fit(digits(), epochs=1)
        return said

    found = run_ranks(program, 3)
    texts = [text for said in found[1:] for text in said if not text.endswith("moved on.")]
    assert len(texts) == 1, found
    assert texts[0].startswith(("rank 0 has given no sign of life", "rank 0 has not moved"))


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take their time on one rank."""

    def __init__(self, rank: int) -> None:
        self.data, self.rank = digits(), rank

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if evenly.current_world().rank == self.rank:
            time.sleep(0.001)
        sample: tuple[Tensor, Tensor] = self.data[index]
        return sample


def test_a_slow_rank_is_told_by_its_own_time_and_whether_data_or_computing(tmp_path: Path) -> None:
    def program(by: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
        said = heard()

        def loss(scores: Tensor, target: Tensor) -> Tensor:
            slow = by == "computing" and evenly.current_world().rank == 2
            time.sleep(0.02 if slow else 0.002)
            return F.cross_entropy(scores, target)

        trainer = made(loss=loss, hang_report=0.8, folder=folder, workers=0)
        trainer.fit(Slow(2 if by == "data" else -1), steps=120)
        return said, read_ranks(folder)

    for by in ("data", "computing"):
        found = run_ranks(program, 3, by, tmp_path / by)
        said, table = [text for said, _ in found for text in said], found[0][1]
        texts = [text for text in said if "slower than the other ranks" in text]
        assert texts, (by, said, table)
        assert all(text.startswith("rank 2 is ") for text in texts), texts
        assert ("of it waiting for data" in texts[0]) == (by == "data"), texts
        own = [row["own_seconds"] for row in table["ranks"]]
        assert own[2] > 2 * max(own[:2]), own
        # Each step takes as long as the slowest rank, on every rank.
        assert all(row["step_seconds"] > 0.015 for row in table["ranks"])
