"""In pieces on a GPU: processes that share it give the bits of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import evenly
from evenly.testing import run_ranks
from pieces_programs import Bits, Interrupt, apart, mlp, of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def network(name: str) -> nn.Module:
    if name == "mlp":
        return mlp()
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train(
    name: str, options: dict[str, Any], folder: Path | None = None, stop: int | None = None
) -> Bits:
    train, test = evenly.data.digits()
    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=network(name),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        metrics={"accuracy": MulticlassAccuracy(10)},
        train_metrics={"accuracy": MulticlassAccuracy(10)},
        callbacks=[Interrupt(stop)],
        batch_size=239,  # six steps in uneven pieces, and one of 3 samples
        pieces=4,
        clip_norm=1.0,
        folder=folder,
        save_every=2,
        progress=False,
        device="cuda",
        backend="gloo",
        **options,
    )
    assert next(trainer.model.parameters()).is_cuda
    variables = dict(os.environ)
    try:
        trainer.fit(train, test, epochs=3, resume="auto" if folder else None)
    except (KeyboardInterrupt, evenly.errors.WorldError):
        return {}
    assert dict(os.environ) == variables
    assert not torch.are_deterministic_algorithms_enabled()
    return of(trainer, predictions=trainer.predict(test))


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("cnn", {}), ("mlp", {"precision": "bf16"}), ("cnn", {"precision": "fp16"})],
)
def test_every_bit_is_that_of_one_process(name: str, options: dict[str, Any]) -> None:
    one = run_ranks(train, 1, name, options)[0]
    again = run_ranks(train, 1, name, options)[0]
    assert apart(again, one) == [], "not even one process repeats itself"
    for count in (2, 3):
        for rank in run_ranks(train, count, name, options):
            assert apart(rank, one) == []


def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    one = run_ranks(train, 1, "cnn", {})[0]
    assert run_ranks(train, 2, "cnn", {}, tmp_path, 9)[0] == {}
    for rank in run_ranks(train, 1, "cnn", {}, tmp_path):
        assert apart(rank, one) == []
