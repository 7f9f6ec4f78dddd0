"""Weights leave for plain torch as one file, and come from wherever they are, without code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import evenly
from evenly.callbacks import EMA
from evenly.checkpoint import Retention
from evenly.cli import main
from evenly.errors import SettingError, StorageError
from evenly.testing import run_ranks
from trainings import digits, made, network, outcome


def same(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[n], weights[n]) for n in state)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on two processes, with an average, and all of its checkpoints."""
    folder = tmp_path_factory.mktemp("run")

    def program() -> dict[str, Any]:
        average = EMA(0.9)
        keep = Retention(last=None, best=1)
        trainer = made(folder=folder, callbacks=[average], keep=keep, save_every=5)
        trainer.fit(digits(), digits(length=99), steps=12, validate_every=4)
        losses = trainer.history["validation/loss"]
        best = min(zip(losses.values, losses.steps, strict=True))[1]
        return {**outcome(trainer), "average": average.model.state_dict(), "best": best}

    return folder, run_ranks(program, 2)[0]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_plain_torch_reads_an_exported_model(
    run: tuple[Path, dict[str, Any]], tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"model.{suffix}"
    done = CliRunner().invoke(main, ["export", str(run[0]), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "step-000000012" in done.output
    state = load_file(out) if suffix == "safetensors" else torch.load(out, weights_only=True)
    model = network()
    model.load_state_dict(state)
    assert same(model, run[1]["weights"])
    again = CliRunner().invoke(main, ["export", str(run[0]), "-o", str(out)])
    assert again.exit_code == 1
    assert "exists" in again.output
    options = ["export", str(run[0]), "-o", str(out), "--average", "--replace"]
    assert CliRunner().invoke(main, options).exit_code == 0
    assert evenly.load_weights(model, out) == ([], [])
    assert same(model, run[1]["average"])


def test_any_checkpoint_of_a_run_can_be_chosen(run: tuple[Path, dict[str, Any]]) -> None:
    folder, found = run
    models = [network() for _ in range(4)]
    evenly.load_weights(models[0], folder, step=found["best"])
    evenly.load_weights(models[1], folder, best="validation/loss")
    assert same(models[0], models[1].state_dict())
    evenly.load_weights(models[2], folder / "checkpoints" / "step-000000012")
    assert same(models[2], found["weights"])
    evenly.load_weights(models[3], folder, best="validation/loss", mode="max")
    assert not same(models[3], models[1].state_dict())
    with pytest.raises(StorageError, match="no checkpoint of step 6; there are 12, 10, 8"):
        evenly.load_weights(models[0], folder, step=6)
    with pytest.raises(StorageError, match=r"not|no checkpoint .* 'accuracy'; there is loss"):
        evenly.load_weights(models[0], folder, best="accuracy", mode="max")
    with pytest.raises(SettingError, match="say whether lower or higher is better"):
        evenly.load_weights(models[0], folder, best="validation/accuracy")
    with pytest.raises(SettingError, match="one checkpoint"):
        evenly.load_weights(models[0], folder / "checkpoints" / "step-000000012", step=1)


@pytest.mark.parametrize("kind", ["ddp", "compiled", "lightning", "nested", "safetensors"])
def test_files_of_other_tools_are_seen_through(tmp_path: Path, kind: str) -> None:
    other = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    state = other.state_dict()
    file = tmp_path / "other.pt"
    if kind == "ddp":
        torch.save({f"module.{n}": t for n, t in state.items()}, file)
    elif kind == "compiled":
        torch.save({f"module._orig_mod.{n}": t for n, t in state.items()}, file)
    elif kind == "lightning":
        torch.save({"state_dict": {f"model.{n}": t for n, t in state.items()}, "epoch": 3}, file)
    elif kind == "nested":
        torch.save({"model_state_dict": state, "optimizer": {"state": {}}}, file)
    else:
        file = file.with_suffix(".safetensors")
        save_file({f"module.{n}": t.contiguous() for n, t in state.items()}, file)
    model = network()
    assert evenly.load_weights(model, file) == ([], [])
    assert same(model, state)


def test_what_does_not_fit_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "other.pt"
    torch.save({**network().state_dict(), "extra": torch.zeros(1)}, file)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Linear(10, 2))
    with pytest.raises(StorageError, match=r"lacks 3\.weight, 3\.bias and has extra"):
        evenly.load_weights(model, file)
    fit = evenly.load_weights(model, file, strict=False)
    assert fit == (["3.weight", "3.bias"], ["extra"])
    with pytest.raises(StorageError, match=r"0\.weight has shape \(32, 64\)"):
        evenly.load_weights(
            nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)), file, strict=False
        )
    with pytest.raises(StorageError, match="no checkpoints"):
        evenly.load_weights(model, tmp_path)
    with pytest.raises(StorageError, match="there is no file"):
        evenly.load_weights(model, tmp_path / "nothing")


def test_a_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("evil.pt", "evil.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload()))
        with pytest.raises(StorageError, match="cannot be read"):
            evenly.load_weights(network(), tmp_path / name)
    torch.save({"state_dict": Payload()}, tmp_path / "zip.pt")
    with pytest.raises(StorageError, match="runs no code"):
        evenly.load_weights(network(), tmp_path / "zip.pt")
    assert not (tmp_path / "ran").exists()
