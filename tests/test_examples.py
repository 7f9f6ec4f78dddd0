"""The examples do what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evenly.testing import run_ranks
from programs import largest_difference

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contrastive(dtype: torch.dtype) -> tuple[list[torch.Tensor], float]:
    found: tuple[list[torch.Tensor], float] = load("contrastive").train(dtype)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_contrastive_training_equals_that_of_one_process(size: int) -> None:
    """1,437 samples in steps of 200 end with an uneven step of 37."""
    weights, loss = run_ranks(contrastive, 1, torch.float64)[0]
    assert loss < 5.0, "it must learn: chance is log(200) = 5.3"
    for other, its_loss in run_ranks(contrastive, size, torch.float64):
        assert largest_difference(other, weights) <= 1e-10
        assert its_loss == pytest.approx(loss, abs=1e-12)


def weights_of(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    found: list[torch.Tensor] = load(name).train(dtype)
    return found


@pytest.mark.parametrize("name", ["two_heads", "gan"])
def test_several_losses_from_one_forward_pass_equal_those_of_one_process(name: str) -> None:
    reference = run_ranks(weights_of, 1, name, torch.float64)[0]
    for size in (2, 3):
        for weights in run_ranks(weights_of, size, name, torch.float64):
            assert largest_difference(weights, reference) <= 1e-10


def language_model() -> tuple[list[torch.Tensor], list[float]]:
    weights, trainer = load("language_model").train(torch.float64)
    return weights, list(trainer.history["train/right"].values)


def test_the_language_model_equals_that_of_one_process_and_learns() -> None:
    weights, right = run_ranks(language_model, 1)[0]
    assert right[-1] > 0.5
    for other, its_right in run_ranks(language_model, 3):
        assert largest_difference(other, weights) <= 1e-10
        assert its_right == pytest.approx(right, abs=1e-12)


def checksum() -> str:
    found: str = load("same_bits").train(epochs=1)
    return found


def test_the_same_bits_come_out_of_one_and_of_three_processes() -> None:
    assert run_ranks(checksum, 3) == run_ranks(checksum, 1) * 3
