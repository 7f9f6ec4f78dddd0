"""Several losses, each with an optimizer of its own."""

import pytest
import torch
from torch import Tensor, nn

import evenly
from evenly.errors import SettingError
from evenly.testing import run_ranks


def test_each_optimizer_sees_its_own_loss_only(world: evenly.World) -> None:
    """A shared weight moves by both, each with its own rate; by hand: 1 - 0.1 * 2 - 0.5 * 3."""
    shared = nn.Parameter(torch.tensor(1.0))
    only = nn.Parameter(torch.tensor(1.0))
    unused = nn.Parameter(torch.tensor(1.0))
    first = torch.optim.SGD([shared], lr=0.1)
    second = torch.optim.SGD([shared, only, unused], lr=0.5, weight_decay=0.1)
    evenly.step_each([(2 * shared, first), (3 * shared * only, second)])
    # The second also decays: by 0.1 of the value that the first left, 0.8.
    assert shared.item() == pytest.approx(0.8 - 0.5 * (3 + 0.1 * 0.8))
    assert only.item() == pytest.approx(1 - 0.5 * (3 + 0.1))
    assert unused.item() == 1.0, "a parameter without a gradient is left alone, decay included"
    assert shared.grad is None


def test_what_is_no_loss_is_refused(world: evenly.World) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(SettingError, match=r"no .* pairs"):
        evenly.step_each([])
    for loss in (torch.ones(2, requires_grad=True), torch.ones(1)):
        with pytest.raises(SettingError, match="loss 0 of step_each"):
            evenly.step_each([(loss, optimizer)])


def used_on_one_rank() -> tuple[list[float], bool]:
    with evenly.open_world() as world:
        torch.manual_seed(world.rank)
        net = nn.Linear(2, 2)
        evenly.match(net)
        start = net.weight.detach().clone()
        sometimes, never = (nn.Parameter(torch.zeros(())) for _ in range(2))
        optimizer = torch.optim.SGD([*net.parameters(), sometimes, never], lr=1.0)
        loss: Tensor = net(torch.ones(1, 2)).sum()
        if world.rank == 1:
            loss = loss + 4 * sometimes
        evenly.step_each([(loss, optimizer)])
        same = bool(torch.equal(evenly.broadcast(start), start))
        return [sometimes.item(), never.item()], same


def test_a_parameter_used_on_some_ranks_moves_alike_on_all() -> None:
    assert run_ranks(used_on_one_rank, 2) == [([-2.0, 0.0], True)] * 2
