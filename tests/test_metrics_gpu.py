"""Metrics whose states are on a GPU: the same values, and every state where it was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.regression import PearsonCorrCoef

import evenly
from evenly import parcel
from evenly.metrics import compute, update
from evenly.testing import run_ranks
from evenly.tree import leaves, map_leaves
from test_metrics import assert_same, digits, seven

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def some_metrics(device: torch.device) -> dict[str, Any]:
    return {
        "seven": seven().to(device),
        "pearson": PearsonCorrCoef().to(device),
        "on the cpu": CatMetric(),
        "lists on the cpu": MulticlassAUROC(10, compute_on_cpu=True).to(device),
        "mean": MeanMetric().to(device),
    }


def feed(metrics: dict[str, Any], start: int, stop: int, device: torch.device) -> None:
    for first in range(start, stop, 40):
        scores, labels = digits(first, min(first + 40, stop))
        moved, target = scores.to(device), labels.to(device)
        for name in ("seven", "lists on the cpu"):
            update(metrics[name], moved, target)
        metrics["pearson"].update(moved[:, 0], moved[:, 0] + 0.01 * target)
        metrics["on the cpu"].update(scores[:, 1])
        metrics["mean"].update(moved[:, 2])


def places(metrics: dict[str, Any]) -> dict[str, list[str]]:
    """The kinds of device on which each metric's states are."""
    found = {}
    for name, metric in metrics.items():
        parts = metric.values(copy_state=False) if name == "seven" else [metric]
        states = [getattr(part, state) for part in parts for state in part._defaults]
        found[name] = sorted({tensor.device.type for tensor in leaves(states)})
    return found


def on_gpu(backend: str) -> dict[str, Any]:
    """Ranks of 230, 130 and no samples, or one of all 360."""
    own_group = backend == "nccl"
    if own_group:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    try:
        given = None if own_group else backend
        with evenly.open_world(device="cuda", backend=given) as world:
            metrics = some_metrics(world.device)
            shares = [(0, 360)] if world.size == 1 else [(0, 230), (230, 360), (360, 360)]
            feed(metrics, *shares[world.rank], world.device)
            before = places(metrics)
            values = compute(metrics)
            kinds = {name: next(leaves(value)).device.type for name, value in values.items()}
            return {
                "values": map_leaves(Tensor.cpu, values),
                "kinds": kinds,
                "before": before,
                "after": places(metrics),
            }
    finally:
        if own_group:
            dist.destroy_process_group()


def on_cpu() -> Any:
    with evenly.open_world(device="cpu") as world:
        metrics = some_metrics(world.device)
        feed(metrics, 0, 360, world.device)
        return compute(metrics)


def test_values_on_a_gpu_are_those_of_the_cpu_and_no_state_moves() -> None:
    reference = run_ranks(on_cpu, 1)[0]
    for backend, size in (("nccl", 1), ("gloo", 1), ("gloo", 2), ("gloo", 3)):
        for rank, found in enumerate(run_ranks(on_gpu, size, backend)):
            assert found["after"] == found["before"]
            assert found["kinds"] == {
                "seven": "cuda",
                "pearson": "cuda",
                "on the cpu": "cpu",
                "lists on the cpu": "cpu",
                "mean": "cuda",
            }
            if rank < 2:
                assert found["before"]["seven"] == ["cuda"]
                assert found["before"]["lists on the cpu"] == ["cpu"]
            for name, values in reference.items():
                what = f"{name} on {size} with {backend}"
                assert_same(found["values"][name], values, what, tolerance=1e-5)


def a_parcel_on_a_gpu() -> list[Any]:
    """What nccl would carry: the bytes of a parcel are on the GPU, its tensors on both."""
    with evenly.open_world(device="cuda", backend="gloo") as world:
        value = {
            "gpu": torch.arange(5.0, device=world.device),
            "cpu": [torch.tensor(7), torch.ones(3, dtype=torch.bool)],
            "half": torch.ones(2, 2, dtype=torch.bfloat16, device=world.device),
            "text": "as it is",
        }
        packed = parcel._pack(value)
        row = packed.bytes(8192, world.device)
        length, size = row[: parcel._HEAD].cpu().view(torch.int64).tolist()
        opened = parcel._open(row, length, size)
        found = [
            (tensor.device.type, tensor.cpu().tolist())
            for tensor in leaves(opened)
            if isinstance(tensor, Tensor)
        ]
        return [row.device.type, opened["text"], found]


def test_a_parcel_on_the_gpu_gives_each_tensor_back_on_its_device() -> None:
    device, text, tensors = run_ranks(a_parcel_on_a_gpu, 1)[0]
    assert (device, text) == ("cuda", "as it is")
    assert tensors == [
        ("cuda", [0.0, 1.0, 2.0, 3.0, 4.0]),
        ("cpu", 7),
        ("cpu", [True, True, True]),
        ("cuda", [[1.0, 1.0], [1.0, 1.0]]),
    ]
