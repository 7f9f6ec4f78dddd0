"""The same promises on a GPU: nccl where each rank has one, gloo where ranks share one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.errors import DeviceError
from evenly.testing import run_ranks
from programs import largest_difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def train(dtype: torch.dtype = torch.float64, workers: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    x, y = evenly.data.digits()[0].tensors
    with evenly.open_world(device="cuda", backend="gloo") as world:
        dataset = TensorDataset(x.to(dtype), y)
        loader = evenly.Loader(dataset, batch_size=100, shuffle=True, workers=workers)
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for part in loader.epoch(epoch):
                x, y = part.data
                assert x.device == world.device
                part.share(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
        loader.close()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_that_share_a_gpu_give_the_weights_of_one(workers: int) -> None:
    alone = run_ranks(train, 1)[0]
    for size in (2, 3):
        for weights in run_ranks(train, size, workers=workers):
            assert largest_difference(weights, alone) <= 1e-12


def collectives() -> dict[str, Any]:
    with evenly.open_world(device="cuda", backend="gloo") as world:
        rank, size = world.rank, world.size
        on: dict[str, Any] = {"device": world.device}
        mixed = {"gpu": torch.full((rank,), rank, **on), "cpu": torch.tensor([rank])}
        parts = [torch.full((r + 1,), r, **on) for r in range(size)]
        found = {
            "sum": evenly.all_reduce({"g": torch.ones(2, **on), "c": torch.ones(1)}),
            "gather": evenly.all_gather(mixed),
            "scatter": evenly.scatter(parts if rank == 0 else None),
            "all_to_all": evenly.all_to_all(parts),
            "broadcast": evenly.broadcast(torch.tensor([rank], **on), source=1),
            "object": evenly.all_gather_object(rank),
        }
        evenly.barrier()
        devices = {name: str(value) for name, value in _devices(found).items()}
        return {"devices": devices, **as_lists(found)}


def _devices(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "sum g": found["sum"]["g"].device.type,
        "sum c": found["sum"]["c"].device.type,
        "gather gpu": found["gather"]["gpu"].device.type,
        "gather cpu": found["gather"]["cpu"].device.type,
        "scatter": found["scatter"].device.type,
        "all_to_all": found["all_to_all"][0].device.type,
        "broadcast": found["broadcast"].device.type,
    }


def as_lists(found: dict[str, Any]) -> dict[str, Any]:
    from evenly.tree import map_leaves

    moved: dict[str, Any] = map_leaves(lambda v: v.tolist() if hasattr(v, "tolist") else v, found)
    return moved


def test_collectives_keep_each_tensor_on_its_device() -> None:
    for rank, found in enumerate(run_ranks(collectives, 3)):
        assert set(found["devices"].values()) == {"cuda", "cpu"}
        assert [name for name, kind in found["devices"].items() if kind == "cpu"] == [
            "sum c",
            "gather cpu",
        ]
        assert found["sum"] == {"g": [3.0, 3.0], "c": [3.0]}
        assert found["gather"] == {"gpu": [1, 2, 2], "cpu": [0, 1, 2]}
        assert found["scatter"] == [rank] * (rank + 1)
        assert found["all_to_all"] == [[rank] * (rank + 1)] * 3
        assert found["broadcast"] == [1]


def refused() -> str:
    try:
        with evenly.open_world(device="auto"):
            return "opened"
    except DeviceError as error:
        return str(error)


def test_sharing_a_gpu_without_asking_is_refused_on_every_rank() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has a GPU for each of two ranks")
    for text in run_ranks(refused, 2):
        assert "would share one GPU" in text


def nccl_of_one() -> tuple[str, list[float], str]:
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    try:
        with evenly.open_world(device="cuda") as world:
            total = evenly.all_reduce(torch.ones(2, device=world.device))
            on_cpu = evenly.all_gather_object("x")
            return world.backend, total.tolist(), on_cpu[0]
    finally:
        dist.destroy_process_group()


def test_a_group_on_nccl_is_used() -> None:
    backend, total, value = run_ranks(nccl_of_one, 1)[0]
    assert "cuda:nccl" in backend
    assert total == [1.0, 1.0]
    assert value == "x"


def test_a_batch_is_on_the_gpu_and_whole() -> None:
    x, _ = evenly.data.digits()[0].tensors
    with evenly.open_world(device="auto") as world:
        assert world.device.type == "cuda"
        loader = evenly.Loader(TensorDataset(x), batch_size=64)
        seen = torch.cat([part.data[0].cpu() for part in loader.epoch(0)])
    assert torch.equal(seen, x)
