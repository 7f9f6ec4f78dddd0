"""Program B of the design: as written, under each launcher, and exact at each process count."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.testing import run_ranks
from programs import largest_difference, train_digits

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits_parts.py"


def output_of(*command: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_the_same_under_python_evenly_run_and_torchrun() -> None:
    alone = output_of(str(EXAMPLE))
    assert "of 360 right" in alone
    assert output_of("-m", "evenly", "run", "-n", "3", str(EXAMPLE)) == f"[0] {alone}"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert output_of(*torchrun, str(EXAMPLE)) == alone


@cache
def alone(batch_size: int, dtype: torch.dtype, limit: int | None) -> list[torch.Tensor]:
    return run_ranks(train_digits, 1, batch_size, dtype, limit=limit)[0]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [48, 64, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_final_weights_equal_those_of_one_process(
    size: int, batch_size: int, dtype: torch.dtype, bound: float
) -> None:
    reference = alone(batch_size, dtype, None)
    for weights in run_ranks(train_digits, size, batch_size, dtype):
        assert largest_difference(weights, reference) <= bound


@pytest.mark.parametrize("limit", [5, 16])
def test_micro_batches_change_nothing(limit: int) -> None:
    """The parts differ in size, and the last step is short."""
    reference = alone(100, torch.float64, None)
    assert largest_difference(alone(100, torch.float64, limit), reference) <= 1e-12
    for weights in run_ranks(train_digits, 3, 100, torch.float64, limit=limit):
        assert largest_difference(weights, reference) <= 1e-12


def test_more_processes_than_samples_change_nothing() -> None:
    reference = run_ranks(train_digits, 1, 64, torch.float64, length=5)[0]
    for weights in run_ranks(train_digits, 7, 64, torch.float64, length=5):
        assert largest_difference(weights, reference) <= 1e-12


def weighted(kind: str, limit: int | None = None) -> list[torch.Tensor]:
    """Losses that do not divide by the number of samples, as Totals."""
    torch.manual_seed(0)
    net = nn.Linear(64, 10).double()
    x, y = evenly.data.digits()[0].tensors
    y = torch.where(y == 3, -100, y) if kind == "ignore_index" else y
    classes = torch.linspace(0.1, 5, 10).double()
    with evenly.open_world() as world:
        loader = evenly.Loader(TensorDataset(x.double(), y), batch_size=100, shuffle=True)
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def weight_of(target: torch.Tensor) -> torch.Tensor:
            if kind == "ignore_index":
                return (target != -100).sum().double()
            return classes[target].sum()

        for part in loader.epoch(0):
            of = evenly.all_reduce(weight_of(part.data[1])).item() if limit else None
            for micro in part.microbatches(limit) if limit else [part]:
                x, y = micro.data
                loss = F.cross_entropy(
                    model(x), y, None if kind == "ignore_index" else classes, reduction="sum"
                )
                micro.share(evenly.Total(loss, weight_of(y)), of=of).backward()
            if world.size == 1 and limit is None:
                mean = torch.nn.functional.cross_entropy(
                    net(part.data[0]),
                    part.data[1],
                    None if kind == "ignore_index" else classes,
                )
                (expected,) = torch.autograd.grad(mean, [net.weight])
                torch.testing.assert_close(net.weight.grad, expected, rtol=0, atol=1e-13)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("kind", ["class weights", "ignore_index"])
def test_a_total_gives_weighted_losses_their_true_denominator(kind: str) -> None:
    reference = run_ranks(weighted, 1, kind)[0]
    for limit in (None, 7):
        for weights in run_ranks(weighted, 3, kind, limit):
            assert largest_difference(weights, reference) <= 1e-12
