"""Every sample once, the same random augmentation at any process and worker count, clear errors."""

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import evenly
from evenly.errors import CollateError, DataError, DisagreementError, SampleError, SettingError
from evenly.testing import run_ranks


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Samples read one at a time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, index**2]), index


class Augmented(Squares):
    """Draws from all three global generators, as transforms do."""

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor(noise, dtype=torch.float64), index


class OwnStream(Squares):
    """Draws from the sample's own generator."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2, generator=evenly.sample_generator()), index


class WholeBatches(Squares):
    """Fetches a batch at a time and draws by the samples' keys."""

    fetches: Sequence[int] = ()

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.fetches = [*self.fetches, len(indices)]
        pairs = zip(evenly.sample_keys(), indices, strict=True)
        return [(np.random.default_rng(key).random(2), index) for key, index in pairs]


def table(
    dataset: Any, batch_size: int = 16, workers: int = 0, epochs: Sequence[int] = (0, 1)
) -> dict[tuple[int, int], Any]:
    """(epoch, sample) -> what was read for it; every sample of this rank exactly once."""
    found: dict[tuple[int, int], Any] = {}
    with evenly.open_world():
        loader = evenly.Loader(dataset, batch_size=batch_size, shuffle=True, workers=workers)
        for epoch in epochs:
            for part in loader.epoch(epoch):
                values, indices = part.data
                assert indices.tolist() == part.indices.tolist()
                for value, index in zip(values, part.indices.tolist(), strict=True):
                    assert (epoch, index) not in found
                    found[epoch, index] = value.tolist()
        loader.close()
    return found


def merged(tables: list[dict[tuple[int, int], Any]]) -> dict[tuple[int, int], Any]:
    whole: dict[tuple[int, int], Any] = {}
    for one in tables:
        assert not whole.keys() & one.keys(), "a sample was given to two ranks"
        whole |= one
    return whole


@pytest.mark.parametrize("length", [1, 2, 3, 37])
@pytest.mark.parametrize("size", [2, 3])
def test_every_sample_is_read_exactly_once_at_any_length_and_size(length: int, size: int) -> None:
    whole = merged(run_ranks(table, size, Squares(length)))
    assert sorted(whole) == [(epoch, index) for epoch in (0, 1) for index in range(length)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("kind", [Augmented, OwnStream, WholeBatches])
def test_augmentation_is_the_same_at_any_process_and_worker_count(kind: type[Squares]) -> None:
    alone = table(kind(37))
    assert len({str(value) for value in alone.values()}) == 74, "samples and epochs must differ"
    for workers in (1, 3):
        assert table(kind(37), workers=workers) == alone
    assert merged(run_ranks(table, 3, kind(37), workers=0)) == alone
    assert merged(run_ranks(table, 2, kind(37), workers=1)) == alone


def test_augmentation_inside_a_subset_is_the_same_too() -> None:
    """torch's Subset fetches whole batches from a data set that draws sample by sample."""
    for kind in (Augmented, OwnStream):
        subset = Subset(kind(50), list(range(50)))
        assert table(subset) == table(kind(50))


def test_reading_does_not_disturb_the_programs_own_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    table(Augmented(20))
    assert torch.rand(3).tolist() == expected


def test_a_data_set_that_fetches_whole_batches_is_asked_once_a_step(world: evenly.World) -> None:
    dataset = WholeBatches(40)
    list(evenly.Loader(dataset, batch_size=16, workers=0).epoch(0))
    assert dataset.fetches == [16, 16, 8]


def steps(size: int, batch_size: int) -> list[tuple[int, int, int, tuple[int, ...]]]:
    with evenly.open_world():
        dataset = TensorDataset(torch.arange(size))
        loader = evenly.Loader(dataset, batch_size=batch_size)
        return [
            (part.step, part.weight, part.global_weight, tuple(part.data[0].shape))
            for part in loader.epoch(0)
        ]


def test_a_rank_without_samples_still_gets_its_turn() -> None:
    found = run_ranks(steps, 3, 5, 4)
    assert found[0] == [(0, 2, 4, (2,)), (1, 1, 1, (1,))]
    assert found[1] == [(0, 1, 4, (1,)), (1, 0, 1, (0,))]
    assert found[2] == [(0, 1, 4, (1,)), (1, 0, 1, (0,))]


class Named(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(3), "name": f"sample {index}", "pair": (torch.zeros(()), index)}


def empty_turn() -> Any:
    with evenly.open_world():
        loader = evenly.Loader(Named(1), batch_size=4)
        return next(iter(loader.epoch(0))).data


def test_an_empty_turn_has_the_structure_of_a_real_one() -> None:
    data = run_ranks(empty_turn, 2)[1]
    assert data["x"].shape == (0, 3)
    assert data["name"] == []
    assert [tuple(t.shape) for t in data["pair"]] == [(0,), (0,)]


def test_an_epoch_can_start_at_any_step(world: evenly.World) -> None:
    loader = evenly.Loader(Squares(100), batch_size=16, shuffle=True, workers=0)
    whole = [part.indices.tolist() for part in loader.epoch(3)]
    assert [part.indices.tolist() for part in loader.epoch(3, start=4)] == whole[4:]
    assert len(loader) == len(whole) == 7


def test_workers_survive_an_epoch_that_was_left_early(world: evenly.World) -> None:
    loader = evenly.Loader(Squares(200), batch_size=8, shuffle=True, workers=2)
    for epoch in range(3):
        for part in loader.epoch(epoch):
            if part.step == 2:
                break
    full = [part.indices.tolist() for part in loader.epoch(3)]
    assert full == [indices.tolist() for _, indices in loader.plan.walk(3)]
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_two_epochs_of_one_loader_at_a_time_are_refused(world: evenly.World, workers: int) -> None:
    loader = evenly.Loader(Squares(20), batch_size=4, workers=workers)
    first = loader.epoch(0)
    next(first)
    second = loader.epoch(1)
    next(second)
    with pytest.raises(DataError, match="use a second Loader"):
        next(first)
    assert [part.step for part in second] == [1, 2, 3, 4], "the newer one loses nothing"
    loader.close()


def test_workers_do_not_move_the_programs_own_generator(world: evenly.World) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    for workers in (0, 1):
        torch.manual_seed(5)
        loader = evenly.Loader(Squares(20), batch_size=4, workers=workers)
        list(loader.epoch(0))
        loader.close()
        assert torch.equal(torch.rand(1), expected)


class Broken(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("unreadable file")
        return super().__getitem__(index)


class BrokenWhole(Broken):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Broken, BrokenWhole])
def test_a_sample_that_raises_is_named(
    world: evenly.World, kind: type[Squares], workers: int
) -> None:
    loader = evenly.Loader(kind(20), batch_size=4, shuffle=True, workers=workers)
    with pytest.raises(SampleError, match=r"sample 13 could not be read: OSError: unreadable"):
        list(loader.epoch(0))


def read_broken() -> str:
    try:
        with evenly.open_world():
            for part in evenly.Loader(Broken(20), batch_size=20, workers=1).epoch(0):
                evenly.barrier()
                assert part
    except evenly.errors.EvenlyError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_when_a_sample_fails_on_one_rank_every_rank_stops() -> None:
    first, second = run_ranks(read_broken, 2)
    assert second.startswith("SampleError: sample 13")
    assert first.startswith("RankFailedError: rank 1 failed")
    assert "sample 13" in first


class Ragged(Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index + 1), index


def test_a_collate_that_fails_names_the_samples_and_the_remedy(world: evenly.World) -> None:
    with pytest.raises(CollateError, match=r"samples 0, 1, 2, 3 .* collate_fn that pads") as caught:
        list(evenly.Loader(Ragged(8), batch_size=4, workers=0).epoch(0))
    assert caught.value.indices == (0, 1, 2, 3)


class Deadly(Squares):
    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleepy(Squares):
    def __getitem__(self, index: int) -> Any:
        time.sleep(30)


def test_a_worker_that_dies_or_sleeps_is_an_error_with_advice(world: evenly.World) -> None:
    with pytest.raises(DataError, match="worker of rank 0 ended"):
        list(evenly.Loader(Deadly(8), batch_size=4, workers=1).epoch(0))
    with pytest.raises(DataError, match="gave nothing for 1 s"):
        list(evenly.Loader(Sleepy(8), batch_size=4, workers=1, timeout=1).epoch(0))


def uneven_lengths() -> str:
    with evenly.open_world() as world:
        loader = evenly.Loader(Squares(100 + world.rank), batch_size=8)
        try:
            loader.epoch(0)
        except DisagreementError as error:
            return str(error)
    return ""


def test_lengths_that_differ_between_ranks_are_an_error_on_all() -> None:
    for text in run_ranks(uneven_lengths, 3):
        assert "rank 0: 100, rank 1: 101, rank 2: 102" in text


def different(what: str) -> str:
    with evenly.open_world() as world:
        settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 0}
        if what != "epoch":
            settings[what] += world.rank
        loader = evenly.Loader(Squares(20), **settings)
        try:
            loader.epoch(world.rank if what == "epoch" else 0)
        except DisagreementError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", ["seed", "batch_size", "epoch"])
def test_settings_that_differ_between_ranks_are_an_error_on_all(what: str) -> None:
    for text in run_ranks(different, 2, what):
        assert "differs between ranks" in text


class Leaving(Squares):
    def __getitem__(self, index: int) -> Any:
        raise SystemExit(0)


def test_a_sample_that_exits_its_worker_is_named_at_once(world: evenly.World) -> None:
    begin = time.monotonic()
    with pytest.raises(SampleError, match="sample 0 could not be read: SystemExit"):
        list(evenly.Loader(Leaving(8), batch_size=4, workers=1).epoch(0))
    assert time.monotonic() - begin < 5


def split_without_a_seed() -> str:
    with evenly.open_world() as world:
        torch.manual_seed(world.rank)
        train, _ = torch.utils.data.random_split(Squares(100), [80, 20])
        try:
            evenly.Loader(train, batch_size=8).epoch(0)
        except DisagreementError as error:
            return str(error)
    return ""


def test_a_random_split_that_differs_between_ranks_is_an_error_on_all() -> None:
    for text in run_ranks(split_without_a_seed, 2):
        assert "the samples that a Subset of the data set chooses" in text


def test_a_loader_is_read_by_epochs() -> None:
    with pytest.raises(SettingError, match=r"loader\.epoch\(e\)"):
        iter(evenly.Loader(Squares(3), batch_size=1))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"dataset": Squares(0)}, DataError, "is empty"),
        ({"batch_size": 0}, SettingError, "batch_size=0"),
        ({"batch_size": 2.5}, SettingError, "batch_size=2.5"),
        ({"workers": -1}, SettingError, "workers=-1"),
        ({"workers": "many"}, SettingError, "workers='many'"),
        ({"tail": "pad"}, SettingError, "tail='pad'"),
        ({"tail": "drop", "batch_size": 64}, DataError, "tail='drop' leaves nothing"),
        ({"dataset": Stream()}, SettingError, "cannot be read by index"),
        ({"dataset": 5}, SettingError, "cannot be read by index"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        evenly.Loader(**{"dataset": Squares(20), "batch_size": 4, **settings})


def test_keys_are_for_fetches_only() -> None:
    with pytest.raises(DataError, match="outside a fetch"):
        evenly.sample_keys()


def test_data_in_memory_needs_no_workers_and_other_data_gets_some(world: evenly.World) -> None:
    memory = TensorDataset(torch.arange(5))
    assert evenly.Loader(memory, batch_size=2)._worker_count(world) == 0
    assert evenly.Loader(Subset(memory, [1, 2]), batch_size=2)._worker_count(world) == 0
    assert evenly.Loader(Squares(5), batch_size=2)._worker_count(world) >= 1
