"""Replicas: the module itself alone, DDP among several, and a clean end."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import evenly
from evenly.errors import SettingError
from evenly.replica import Replica
from evenly.testing import run_ranks


def test_alone_a_replica_is_the_module_itself(world: evenly.World) -> None:
    net = nn.Linear(2, 2)
    assert evenly.replicate(net) is net


def test_a_model_with_nothing_to_train_is_refused(world: evenly.World) -> None:
    with pytest.raises(SettingError, match="takes a torch module"):
        evenly.replicate(print)  # type: ignore[arg-type]
    for net in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(SettingError, match="no parameter that is trained"):
            evenly.replicate(net)


def start_different() -> tuple[list[float], bool, list[float], list[str]]:
    with evenly.open_world() as world:
        torch.manual_seed(world.rank)
        net = nn.Linear(2, 1)
        model = evenly.replicate(net)
        wrapped = isinstance(model, Replica)
    after = model(torch.ones(1, 2))  # the world is closed: no exchange, but it computes
    after.sum().backward()
    return net.weight.flatten().tolist(), wrapped, after.tolist()[0], list(model.state_dict())


def test_replicas_start_from_rank_0_and_compute_after_the_world_closed() -> None:
    first, second = run_ranks(start_different, 2)
    assert first[0] == second[0]
    assert first[1]
    assert first[2] == second[2]
    assert first[3] == ["weight", "bias"]


class Scorer(nn.Linear):
    def score(self) -> int:
        return 1


def ask_the_replica() -> str:
    with evenly.open_world():
        model = evenly.replicate(Scorer(2, 2))
        try:
            model.score()  # type: ignore[operator]
        except AttributeError as error:
            return str(error)
    return ""


def test_a_method_of_the_model_is_pointed_to_not_passed_on() -> None:
    assert "'score' belongs to the Scorer that was replicated" in run_ranks(ask_the_replica, 2)[0]


def a_few_steps() -> None:
    net = nn.Linear(64, 10)
    with evenly.open_world():
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()


@pytest.fixture
def busy_machine() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.soak
@pytest.mark.usefixtures("busy_machine")
def test_closing_never_hangs_on_a_busy_machine() -> None:
    """With plain DDP one of 300 runs hung: see `Replica`."""
    for _ in range(500):
        run_ranks(a_few_steps, 7, timeout=60)
