"""A part: what it shares, how it is cut, and the mistakes that would change the numbers."""

import pytest
import torch

import evenly
from evenly.errors import DataError, SettingError
from evenly.fetching import none_of
from evenly.part import Part
from evenly.testing import run_ranks


def part_of(world: evenly.World, data: object, weight: int = 4, of: int = 4) -> Part:
    indices = torch.arange(weight)
    return Part(
        data=data, indices=indices, epoch=0, step=0, weight=weight, global_weight=of, world=world
    )


def test_alone_the_share_is_the_loss_itself(world: evenly.World) -> None:
    loss = torch.tensor(2.0)
    assert part_of(world, None).share(loss) is loss


def test_the_share_of_nothing_is_zero_with_zero_gradient(world: evenly.World) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (torch.zeros(0, 3) * weight).mean()
    assert loss.isnan()
    share = part_of(world, None, weight=0).share(loss)
    share.backward()
    assert share.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_loss_that_is_no_mean_is_refused(world: evenly.World) -> None:
    part = part_of(world, None)
    with pytest.raises(SettingError, match=r"given a tensor of shape \(4,\)"):
        part.share(torch.ones(4))
    with pytest.raises(SettingError, match=r"given a float.*no \.item\(\)"):
        part.share(2.0)  # type: ignore[arg-type]


def test_a_total_is_divided_by_its_weight(world: evenly.World) -> None:
    part = part_of(world, None)
    assert part.share(evenly.Total(torch.tensor(6.0), 4)).item() == 1.5
    assert part.share(evenly.Total(torch.tensor(6.0), torch.tensor([3.0]))).item() == 2.0
    with pytest.raises(SettingError, match="sum to 0"):
        part.share(evenly.Total(torch.tensor(0.0), 0))


def test_micro_batches_cut_every_field_by_sample(world: evenly.World) -> None:
    data = {
        "x": torch.arange(8).reshape(4, 2),
        "names": list("abcd"),
        "scale": 3,
        "pair": [torch.arange(4)],
    }
    found = [micro.data for micro in walk(part_of(world, data), 3)]
    assert [one["x"].tolist() for one in found] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [one["names"] for one in found] == [["a", "b"], ["c", "d"]]
    assert [one["scale"] for one in found] == [3, 3]
    assert [one["pair"][0].tolist() for one in found] == [[0, 1], [2, 3]]


def test_fields_are_not_taken_for_samples_when_their_numbers_agree(world: evenly.World) -> None:
    """Two views of two samples: a list of two fields."""
    data = [{"x": torch.tensor([0, 1])}, {"x": torch.tensor([10, 11])}]
    found = walk(part_of(world, data, weight=2, of=2), 1)
    assert [[field["x"].tolist() for field in micro.data] for micro in found] == [
        [[0], [10]],
        [[1], [11]],
    ]


def walk(part: Part, limit: int) -> list[Part]:
    found = []
    for micro in part.microbatches(limit):
        micro.share(torch.tensor(1.0))
        found.append(micro)
    return found


def test_data_that_cannot_be_cut_is_refused(world: evenly.World) -> None:
    with pytest.raises(DataError, match=r"shape \(3,\)"):
        walk(part_of(world, torch.zeros(3)), 2)
    with pytest.raises(DataError, match="holds a object"):
        walk(part_of(world, object()), 2)


def test_mistakes_with_micro_batches_are_refused(world: evenly.World) -> None:
    part = part_of(world, torch.arange(4))
    with pytest.raises(SettingError, match="before share"):
        list(part.microbatches(2))
    with torch.no_grad():
        assert len(list(part.microbatches(2))) == 2, "without gradients nothing is shared"
    runs = part.microbatches(2)
    micro = next(runs)
    with pytest.raises(SettingError, match=r"share\(\) of the micro-batch"):
        part.share(torch.tensor(1.0))
    with pytest.raises(SettingError, match="does not know the weight"):
        micro.share(evenly.Total(torch.tensor(1.0), 1))
    runs.close()  # type: ignore[attr-defined]
    part.share(torch.tensor(1.0))


def test_an_empty_batch_keeps_its_structure_and_no_values() -> None:
    batch = {"x": torch.ones(1, 3), "ids": [7], "nested": (torch.ones(1), ["name"]), "count": 1}
    empty = none_of(batch)
    assert empty["x"].shape == (0, 3)
    assert empty["ids"] == []
    assert empty["nested"][0].shape == (0,)
    assert empty["nested"][1] == []


def runs_with_sync_batchnorm() -> tuple[list[int], list[float]]:
    with evenly.open_world():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 4), evenly.SyncBatchNorm(4)).double()
        model = evenly.replicate(net)
        dataset = torch.utils.data.TensorDataset(torch.arange(5.0, dtype=torch.float64)[:, None])
        weights = []
        for part in evenly.Loader(dataset, batch_size=5).epoch(0):
            for micro in part.microbatches(1):
                weights.append(micro.weight)
                micro.share(model(micro.data[0]).square().mean()).backward()
        running = net[1].running_mean
        assert isinstance(running, torch.Tensor)
        return weights, running.tolist()


def test_every_rank_has_as_many_micro_batches_so_that_layers_meet() -> None:
    """5 samples on 3 ranks are 2, 2, 1; in runs of at most 1 the last rank has an empty one."""
    (first, one), (_, two), (third, three) = run_ranks(runs_with_sync_batchnorm, 3)
    assert one == two == three
    assert len(first) == len(third)
