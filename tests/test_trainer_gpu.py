"""The Trainer on a GPU: one process against several that share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import evenly
from evenly.errors import LossError
from evenly.testing import run_ranks
from trainings import adamw, difference, digits, made, network, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

ON_GPU: dict[str, Any] = {"device": "cuda", "backend": "gloo"}


def train(options: dict[str, Any], batchnorm: bool = False) -> dict[str, Any]:
    trainer = made(model=network(batchnorm=batchnorm), **ON_GPU, **options)
    assert next(trainer.model.parameters()).is_cuda
    trainer.fit(digits(), digits(length=99), epochs=3)
    found = outcome(trainer)
    found["weights"] = {name: tensor.cpu() for name, tensor in found["weights"].items()}
    return found


@pytest.mark.parametrize(
    ("options", "batchnorm"),
    [
        ({}, False),
        ({"microbatch": 7, "clip_norm": 0.5}, False),
        ({"loss": nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3.0, 10).double())}, False),
        ({}, True),
    ],
)
def test_processes_that_share_a_gpu_give_the_numbers_of_one(
    options: dict[str, Any], batchnorm: bool
) -> None:
    one = run_ranks(train, 1, options, batchnorm)[0]
    for rank in run_ranks(train, 2, options, batchnorm):
        assert difference(rank, one) <= 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 2])
def test_half_precision_learns_and_metrics_stay_in_full(precision: str, count: int) -> None:
    def program() -> tuple[float, Any]:
        trainer = made(
            model=network(torch.float32),
            precision=precision,
            clip_norm=1.0,
            metrics={"accuracy": MulticlassAccuracy(10)},
            **ON_GPU,
        )
        trainer.fit(digits(torch.float32), epochs=8)
        return trainer.test(digits(torch.float32))["accuracy"], trainer.mixed.state_dict()

    ranks = run_ranks(program, count)
    assert ranks[0][0] > 0.9
    assert all(rank == ranks[0] for rank in ranks)


def test_a_loss_that_is_nan_ends_the_run_a_step_later_on_all_ranks() -> None:
    def program() -> tuple[str, int]:
        data = digits(length=200)
        data.tensors[0][117] = float("nan")
        trainer = made(batch_size=50, shuffle=False, **ON_GPU)
        try:
            trainer.fit(data, epochs=2)
        except LossError as error:
            return str(error), trainer.step
        return "", trainer.step

    for message, step in run_ranks(program, 2):
        assert "the loss of step 2 of epoch 0 is nan" in message
        assert "the data of samples 117 are not" in message
        assert step == 4


def test_stop_ends_all_ranks_at_the_same_step() -> None:
    class Stop(evenly.callbacks.Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.world.rank == 1 and trainer.step == 5:
                trainer.stop()

    def program() -> int:
        trainer = made(callbacks=[Stop()], **ON_GPU)
        trainer.fit(digits(), epochs=3)
        return trainer.step

    assert run_ranks(program, 2) == [7, 7]


def test_random_layers_repeat_and_nothing_of_the_generators_is_left_changed() -> None:
    def program() -> tuple[list[float], bool]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)).double()
        trainer = made(model=model, **ON_GPU)
        before = torch.cuda.get_rng_state()
        trainer.fit(digits(), epochs=1)
        kept = torch.equal(before, torch.cuda.get_rng_state())
        return list(trainer.history["loss"].values), kept

    first, second = (run_ranks(program, 1)[0] for _ in range(2))
    assert first == second
    assert first[1]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2)])
def test_a_run_on_a_gpu_goes_on_from_a_checkpoint_that_was_written_beside_it(
    tmp_path: Path, counts: tuple[int, int, int]
) -> None:
    def program(folder: Path | None, steps: int) -> tuple[dict[str, Any], str]:
        trainer = made(optimizer=adamw, folder=folder, save_every=5, **ON_GPU)
        trainer.fit(digits(), steps=steps, resume="auto" if folder else None)
        found = outcome(trainer)
        found["weights"] = {name: tensor.cpu() for name, tensor in found["weights"].items()}
        assert trainer.optimizer is not None
        (state, *_) = trainer.optimizer.state.values()
        return found, str(state["exp_avg"].device)

    whole = run_ranks(program, 1, None, 40)[0][0]
    for count, steps in zip(counts, (13, 30, 40), strict=True):
        ranks = run_ranks(program, count, tmp_path, steps)
    for found, device in ranks:
        assert difference(found, whole) <= 1e-10
        assert device.startswith("cuda")
