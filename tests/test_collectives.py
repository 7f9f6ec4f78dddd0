"""What each collective gives, on tensors and structures, with uneven and empty ranks."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evenly
from evenly.errors import DisagreementError, SettingError
from evenly.testing import run_ranks


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def everything() -> dict[str, Any]:
    """One run of all collectives; the tests below look at what came out."""
    with evenly.open_world() as world:
        rank, size = world.rank, world.size
        tree = {"a": [torch.tensor([1.0, rank])], "b": Pair(torch.tensor(rank), torch.ones(2))}
        before = tree["a"][0].clone()
        parts = [{"x": torch.full((r,), r), "y": torch.tensor(r)} for r in range(size)]
        found = {
            "sum": evenly.all_reduce(tree),
            "mean": evenly.all_reduce(torch.tensor([float(rank)]), "mean"),
            "min": evenly.all_reduce(torch.tensor(rank), "min"),
            "max": evenly.all_reduce(torch.tensor(rank), "max"),
            "product": evenly.all_reduce(torch.tensor(rank + 1), "product"),
            "reduce": evenly.reduce(torch.tensor(rank), to=1),
            "broadcast": evenly.broadcast(torch.tensor([rank]), source=2),
            "all_gather": evenly.all_gather(
                {
                    "uneven": torch.full((rank, 2), float(rank), dtype=torch.float64),
                    "number": torch.tensor(rank),
                    "flags": torch.ones(2 - rank, dtype=torch.bool),
                    "half": torch.full((1,), rank, dtype=torch.bfloat16),
                }
            ),
            "gather": evenly.gather(torch.full((rank,), rank), to=2),
            "scatter": evenly.scatter(parts if rank == 0 else None),
            "reduce_scatter": evenly.reduce_scatter(torch.arange(7)),
            "all_to_all": evenly.all_to_all([torch.full((r,), rank) for r in range(size)]),
            "all_gather_object": evenly.all_gather_object({"rank": rank}),
            "gather_object": evenly.gather_object(str(rank), to=1),
            "broadcast_object": evenly.broadcast_object(str(rank), source=1),
            "scatter_object": evenly.scatter_object("abc" if rank == 0 else None),
            "agree": evenly.agree(5),
            "untouched": bool((tree["a"][0] == before).all()),
        }
        evenly.barrier()
        return found


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(everything, 3)


def test_reductions_of_structures(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert found["sum"]["a"][0].tolist() == [3.0, 3.0]
        assert isinstance(found["sum"]["b"], Pair)
        assert found["sum"]["b"].left.item() == 3
        assert found["sum"]["b"].right.tolist() == [3.0, 3.0]
        assert found["mean"].tolist() == [1.0]
        assert (found["min"].item(), found["max"].item(), found["product"].item()) == (0, 2, 6)
        assert found["untouched"], "the input must be left alone"


def test_results_on_one_rank_are_none_elsewhere(three: list[dict[str, Any]]) -> None:
    assert [found["reduce"] is None for found in three] == [True, False, True]
    assert three[1]["reduce"].item() == 3
    assert [found["gather"] is None for found in three] == [True, True, False]
    assert three[2]["gather"].tolist() == [1, 2, 2]
    assert three[1]["gather_object"] == ["0", "1", "2"]
    assert three[0]["gather_object"] is None


def test_gathers_join_uneven_and_empty_ranks_in_rank_order(three: list[dict[str, Any]]) -> None:
    for found in three:
        joined = found["all_gather"]
        assert joined["uneven"].dtype == torch.float64
        assert joined["uneven"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert joined["number"].tolist() == [0, 1, 2]
        assert joined["flags"].tolist() == [True, True, True]
        assert joined["half"].dtype == torch.bfloat16
        assert joined["half"].tolist() == [0.0, 1.0, 2.0]


def test_values_are_handed_out_and_exchanged(three: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(three):
        assert found["broadcast"].item() == 2
        assert found["scatter"]["x"].tolist() == [rank] * rank
        assert found["scatter"]["y"].shape == ()
        assert [t.tolist() for t in found["all_to_all"]] == [[r] * rank for r in range(3)]
        assert found["all_gather_object"] == [{"rank": r} for r in range(3)]
        assert found["broadcast_object"] == "1"
        assert found["scatter_object"] == "abc"[rank]
    assert [found["reduce_scatter"].tolist() for found in three] == [[0, 3, 6], [9, 12], [15, 18]]


def test_alone_every_collective_is_the_identity(world: evenly.World) -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    assert evenly.all_reduce(tensor) is tensor
    assert evenly.reduce(tensor) is tensor
    assert evenly.broadcast(tensor) is tensor
    assert evenly.all_gather(tensor) is tensor
    assert evenly.gather(tensor) is tensor
    assert evenly.scatter([tensor]) is tensor
    assert evenly.reduce_scatter(tensor).tolist() == [1.0, 2.0]
    assert evenly.all_to_all([tensor]) == [tensor]
    assert evenly.all_gather(torch.tensor(3)).tolist() == [3]
    assert evenly.all_gather_object("x") == ["x"]
    assert evenly.gather_object("x") == ["x"]
    assert evenly.broadcast_object("x") == "x"
    assert evenly.scatter_object(["x"]) == "x"
    evenly.barrier()
    evenly.all_gather(tensor, grad=True).square().sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 4.0]


def test_mistakes_are_named(world: evenly.World) -> None:
    with pytest.raises(SettingError, match="given a float"):
        evenly.all_reduce(3.0)
    with pytest.raises(SettingError, match="choose from sum, mean"):
        evenly.all_reduce(torch.ones(1), "average")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="mean of whole numbers"):
        evenly.all_reduce(torch.ones(1, dtype=torch.int64), "mean")
    with pytest.raises(SettingError, match="source=1: the ranks here are 0 to 0"):
        evenly.broadcast(torch.ones(1), source=1)
    with pytest.raises(SettingError, match="2 values for 1 ranks"):
        evenly.scatter_object([1, 2])
    with pytest.raises(SettingError, match="2 parts for 1 ranks"):
        evenly.all_to_all([torch.ones(1)] * 2)


def disagreements() -> list[str]:
    texts = []
    with evenly.open_world() as world:
        for call in (
            lambda: evenly.agree(world.rank // 2, "the learning rate"),
            lambda: evenly.all_gather(torch.zeros(2, 3 + world.rank)),
            lambda: evenly.all_gather([torch.zeros(2)] * (1 + world.rank)),
            lambda: evenly.all_reduce(torch.zeros(2 + world.rank)),
            lambda: evenly.broadcast(torch.zeros(2 + world.rank)),
            lambda: evenly.scatter([torch.ones(1)] if world.rank == 0 else None),
        ):
            try:
                call()
            except (DisagreementError, SettingError) as error:
                texts.append(str(error))
    return texts


def test_ranks_that_disagree_all_raise_and_name_every_value() -> None:
    for learning_rate, shape, structure, *sizes, scatter in run_ranks(disagreements, 3):
        assert len(sizes) == 2
        assert all("[2]" in size and "[4]" in size for size in sizes)
        assert "the learning rate differs between ranks (rank 0: 0, rank 1: 0, rank 2: 1)" in (
            learning_rate
        )
        assert "[3]" in shape
        assert "[5]" in shape
        assert "list(*,*,*)" in structure
        assert "rank 0 gave 1 values for 3 ranks" in scatter


def odd_values() -> list[Any]:
    with evenly.open_world() as world:
        half = torch.tensor([40000.0], dtype=torch.float16)
        mean = evenly.all_reduce(half, "mean").item()
        conjugate = evenly.all_gather(torch.tensor([1 + 2j]).conj())
        evenly.agree(float("nan"), "a value that is not a number")
        texts = []
        for call in (
            lambda: evenly.all_gather({} if world.rank else {"n": torch.ones(1)}),
            lambda: evenly.all_reduce({} if world.rank else {"n": torch.ones(1)}),
            lambda: evenly.all_gather(torch.ones(1, requires_grad=world.rank == 0), grad=True),
        ):
            try:
                call()
            except DisagreementError:
                texts.append("differs")
        return [mean, conjugate.tolist(), texts]


def test_odd_values_are_right_or_refused_on_every_rank() -> None:
    for found in run_ranks(odd_values, 2):
        assert found == [40000.0, [1 - 2j, 1 - 2j], ["differs"] * 3]


def test_a_second_derivative_through_a_gather_is_refused(world: evenly.World) -> None:
    x = torch.tensor([2.0], requires_grad=True)
    y = evenly.all_gather(x, grad=True)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def in_a_subgroup() -> list[int]:
    with evenly.open_world() as world:
        group = dist.new_group([1, 2])
        if world.rank == 0:
            return []
        joined: list[int] = evenly.all_gather(torch.tensor([world.rank]), group=group).tolist()
        return joined


def test_a_group_of_some_ranks_meets_alone() -> None:
    assert run_ranks(in_a_subgroup, 3) == [[], [1, 2], [1, 2]]


def contrastive_gradient(counts: list[int]) -> list[Tensor]:
    """Every sample is compared with every other: the gradient needs all ranks' embeddings."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    samples = torch.randn(sum(counts), 3, dtype=torch.float64)
    with evenly.open_world() as world:
        counts = counts if world.size > 1 else [sum(counts)]
        start = sum(counts[: world.rank])
        own = slice(start, start + counts[world.rank])
        model = evenly.replicate(net)
        local = model(samples[own])
        everyone = evenly.all_gather(local, grad=True)
        scores = local @ everyone.t()
        loss = nn.functional.cross_entropy(
            scores, torch.arange(start, own.stop), reduction="sum"
        ) / len(samples)
        (loss * world.size).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("counts", [[6, 5, 0], [4, 4, 4], [1, 0, 10]])
def test_a_gather_with_gradients_gives_the_single_process_gradient(counts: list[int]) -> None:
    alone = contrastive_gradient(counts)
    for gradients in run_ranks(contrastive_gradient, 3, counts):
        for one, other in zip(alone, gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-14)


def gather_a_column() -> list[float]:
    with evenly.open_world() as world:
        rows = torch.arange(4.0).reshape(1, 4) + world.rank
        joined: list[float] = evenly.all_gather(rows[:, 1]).tolist()
        return joined


def test_a_single_value_cut_from_a_row_can_travel() -> None:
    assert run_ranks(gather_a_column, 2) == [[1.0, 2.0]] * 2
