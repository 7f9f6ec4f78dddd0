"""The choice of backend, from what each rank brings."""

import pytest

import evenly
from evenly.devices import GLOO, NCCL, Offer, choose_backend
from evenly.errors import DeviceError


def gpus(*identities: str) -> list[Offer]:
    return [Offer(device="cuda:0", identity=identity) for identity in identities]


CPU = Offer(device="cpu", identity="")


def test_ranks_without_gpus_use_gloo() -> None:
    assert choose_backend([CPU, CPU], None) == GLOO


def test_ranks_with_a_gpu_each_use_nccl_and_carry_cpu_tensors_too() -> None:
    assert choose_backend(gpus("a/0", "a/1", "b/0"), None) == NCCL


def test_one_visible_gpu_per_rank_counts_as_its_own_whatever_its_number() -> None:
    assert choose_backend(gpus("a/uuid-1", "a/uuid-2"), None) == NCCL


def test_sharing_a_gpu_is_refused_unless_asked_for() -> None:
    with pytest.raises(DeviceError, match=r"ranks 0, 2 would share one GPU.*backend='gloo'"):
        choose_backend(gpus("a/0", "a/1", "a/0"), None)
    with pytest.raises(DeviceError, match="nccl refuses"):
        choose_backend(gpus("a/0", "a/0"), "nccl")
    assert choose_backend(gpus("a/0", "a/0"), "gloo") == GLOO


def test_the_device_is_what_the_program_says_else_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENLY_DEVICE", "nonsense")
    with evenly.open_world(device="cpu") as world:
        assert world.device.type == "cpu"
    with pytest.raises(DeviceError, match="device='nonsense'"):
        evenly.open_world()


def test_different_kinds_of_device_are_refused_by_rank() -> None:
    with pytest.raises(DeviceError, match="rank 0: cuda:0, rank 1: cpu"):
        choose_backend([*gpus("a/0"), CPU], None)
