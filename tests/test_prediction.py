"""Predictions in data-set order, each sample once, at any process count; clear errors on all."""

import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import evenly
from evenly.errors import DataError, EvenlyError, SettingError
from evenly.prediction import memory, predict
from evenly.testing import run_ranks
from evenly.tree import map_leaves


class Pair(NamedTuple):
    low: Any
    high: Any


def tensor(part: evenly.Part) -> Any:
    return part.data[0][:, None] * torch.tensor([1.0, 0.5])


def nested(part: evenly.Part) -> Any:
    x = part.data[0]
    return {
        "half": (x[:, None] / 3).half(),
        "pair": Pair((x / 7).bfloat16(), x % 2 == 0),
        "inside": {"whole": (x.long(), x.to(torch.uint8).numpy()), "missing": None},
        "empty": torch.zeros(len(x), 0),
    }


def ragged(part: evenly.Part) -> Any:
    samples = [int(x) for x in part.data[0]]
    return {
        "text": [f"sample {i}\n\u00e9" for i in samples],
        "number": [i / 2 for i in samples],
        "bits": [torch.arange(i % 4).bfloat16() for i in samples],
        "array": [np.full((i % 3, 2), i, dtype=np.int16) for i in samples],
        "boxes": [{"box": torch.full((i % 2, 4), i / 3), "label": str(i)} for i in samples],
    }


def collect(
    function: Callable[[evenly.Part], Any], length: int, batch_size: int = 6, **settings: Any
) -> Any:
    with evenly.open_world():
        dataset = TensorDataset(torch.arange(length, dtype=torch.float32))
        loader = evenly.Loader(dataset, batch_size=batch_size, **settings.pop("loader", {}))
        return predict(loader.epoch(0), function, length=length, **settings)


def same(one: Any, other: Any) -> bool:
    """Equal structures with tensors of equal types and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def alone(function: Callable[[Any], Any], length: int) -> Any:
    """What the function gives for the whole data set at once; arrays come back as tensors."""
    x = torch.arange(length, dtype=torch.float32)
    whole = function(SimpleNamespace(data=[x]))
    return map_leaves(lambda v: torch.tensor(v) if isinstance(v, np.ndarray) else v, whole)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 29])
def test_predictions_come_in_data_set_order_on_every_rank(size: int, length: int) -> None:
    for found in run_ranks(collect, size, tensor, length):
        assert same(found, alone(tensor, length))


@pytest.mark.parametrize("function", [tensor, nested, ragged])
def test_one_process_gives_what_the_function_gives_for_all_at_once(function: Any) -> None:
    assert same(collect(function, 29), alone(function, 29))


@pytest.mark.parametrize("function", [nested, ragged])
@pytest.mark.parametrize(("size", "length"), [(3, 29), (3, 2)])
def test_every_structure_and_type_survives(function: Any, size: int, length: int) -> None:
    for found in run_ranks(collect, size, function, length):
        assert same(found, alone(function, length))


def test_rank_0_alone_keeps_them_when_asked() -> None:
    first, *others = run_ranks(collect, 3, ragged, 29, keep="first")
    assert same(first, alone(ragged, 29))
    assert others == [None, None]


def test_shuffled_parts_come_back_in_data_set_order_too() -> None:
    for found in run_ranks(collect, 2, nested, 29, loader={"shuffle": True, "seed": 3}):
        assert same(found, alone(nested, 29))


def in_small_rounds() -> Any:
    with mock.patch("evenly.prediction.memory._ROUND", 200):
        return collect(ragged, 29)


def test_an_exchange_in_many_rounds_gives_the_same() -> None:
    for found in run_ranks(in_small_rounds, 3):
        assert same(found, alone(ragged, 29))


def collectives_used(length: int) -> int:
    with evenly.open_world():
        loader = evenly.Loader(TensorDataset(torch.zeros(length)), batch_size=4)
        parts = loader.epoch(0)
        with mock.patch(
            "torch.distributed.all_gather_object", wraps=dist.all_gather_object
        ) as seen:
            predict(parts, lambda part: part.data[0], length=length)
        return seen.call_count


def test_the_number_of_collectives_does_not_depend_on_the_number_of_batches() -> None:
    assert run_ranks(collectives_used, 2, 8) == run_ranks(collectives_used, 2, 400) == [6, 6]


def reuse() -> Any:
    """A function that gives the same memory every time, as captured graphs do."""
    buffer = torch.zeros(2)

    def function(part: evenly.Part) -> Any:
        rows = buffer[: part.weight]
        rows.copy_(part.data[0])
        return {"tensor": rows, "list": list(rows)}

    return collect(function, 8, 2)


def test_a_function_may_use_its_memory_again() -> None:
    found = reuse()
    assert found["tensor"].tolist() == [float(row) for row in found["list"]] == list(range(8))


def test_predictions_are_kept_without_their_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    assert not collect(lambda part: part.data[0] * weight, 8).requires_grad


BAD: dict[str, tuple[Callable[[evenly.Part], Any], str]] = {
    "too few rows": (lambda part: part.data[0][1:], r"shape \(2,\) for a part of 3 samples"),
    "squeezed": (lambda part: {"x": part.data[0].sum()}, r"'x' has shape \(\) for a part of 3"),
    "a number": (lambda part: 3.5, "is a float, which says nothing about each of 3 samples"),
    "an object": (lambda part: (part, 1), "'0' is a Part"),
    "nothing": (lambda part: None, "hold nothing"),
    "an empty structure": (lambda part: {}, "hold nothing"),
    "list of fields": (lambda part: [part.data[0]], "list of 1 .* 3 samples.*tuple or a dict"),
    "mixed entries": (lambda part: ["a", "b", torch.ones(2)], "entry 0 is strings.*entry 2 is fl"),
    "odd entries": (lambda part: [b"a", b"b", b"c"], "a list with a bytes in it"),
    "lists of tensors": (lambda part: [[part.data[0]]] * 3, "give a dict of names and tensors"),
    "sparse": (lambda part: torch.eye(3).to_sparse(), "to_dense"),
    "array of text": (lambda part: np.array(["a", "b", "c"]), "array of type <U1"),
}


def refused(function: Callable[[evenly.Part], Any], length: int = 12, **settings: Any) -> str:
    """The error of one rank, which stays in a world that still works."""
    with evenly.open_world() as world:
        try:
            collect(function, length, **settings)
        except EvenlyError as error:
            assert evenly.all_reduce(torch.tensor(1)) == world.size
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", BAD)
def test_predictions_that_belong_to_no_sample_are_refused(what: str) -> None:
    function, words = BAD[what]
    with pytest.raises(SettingError, match=words):
        collect(function, 12, 3)


def wrong_on_rank(rank: int, step: int, value: Any) -> Callable[[evenly.Part], Any]:
    def function(part: evenly.Part) -> Any:
        if part.world.rank == rank and part.step == step:
            if isinstance(value, Exception):
                raise value
            return value
        return part.data[0]

    return function


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_rank_that_fails_at_any_step_is_an_error_on_all_and_the_world_lives(step: int) -> None:
    for text in run_ranks(refused, 3, wrong_on_rank(1, step, torch.ones(5)), 24):
        assert text.startswith("SettingError: the prediction has shape (5,) for a part of 2")


class OwnError(EvenlyError):
    pass


def test_an_error_of_the_function_reaches_every_rank() -> None:
    for text in run_ranks(refused, 2, wrong_on_rank(0, 2, OwnError("no such thing")), 24):
        assert text == "OwnError: no such thing"


def test_a_structure_that_differs_between_ranks_is_an_error_on_all() -> None:
    for text in run_ranks(refused, 2, wrong_on_rank(1, 0, {"a": torch.ones(3, 2)})):
        assert text.startswith("DisagreementError: the predictions differ between ranks")
        assert "rank 0: float32[samples], rank 1: {'a': float32[samples, 2]}" in text


def test_a_structure_that_differs_between_batches_is_an_error_with_the_remedy() -> None:
    words = r"step 1 are float32\[samples, 7\], .* float32\[samples\].*a list with one tensor per"
    with pytest.raises(SettingError, match=words):
        collect(wrong_on_rank(0, 1, torch.ones(6, 7)), 12)


def steps_until_another_fails() -> int:
    """How many of its 200 steps of 20 ms rank 0 has done when it learns that rank 1 failed."""
    steps = 0

    def function(part: evenly.Part) -> Any:
        nonlocal steps
        steps += 1
        if part.world.rank == 1 and part.step == 1:
            raise OwnError("early")
        time.sleep(0.02)
        return part.data[0]

    assert refused(function, 400, batch_size=2) == "OwnError: early"
    return steps


def test_the_others_stop_soon_after_a_rank_has_failed() -> None:
    first, second = run_ranks(steps_until_another_fails, 2)
    assert second == 2
    assert first < 60


def test_parts_that_leave_samples_out_are_refused() -> None:
    for text in run_ranks(refused, 2, tensor, 13, loader={"tail": "drop"}):
        assert text.startswith("DataError: 12 predictions for a data set of 13 samples")


def twice(change: int) -> None:
    with evenly.open_world():
        parts = list(evenly.Loader(TensorDataset(torch.arange(12.0)), batch_size=6).epoch(0))
        again = replace(parts[0], indices=parts[1].indices + change)
        predict([again, parts[1]], tensor, length=12)


def test_a_sample_predicted_twice_is_refused_even_when_the_count_is_right() -> None:
    with pytest.raises(DataError, match=r"12 predictions .* not one for each"):
        twice(0)
    with pytest.raises(DataError, match="holds the samples 7 to 12 of a data set of 12"):
        twice(1)


@pytest.mark.parametrize(("settings", "words"), [({"keep": "last"}, "keep='last'")])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        collect(tensor, 12, **settings)


def own_class() -> tuple[bool, ...]:
    """A class that is not in any module, as those of a script or a notebook."""
    kind = namedtuple("kind", ["x"])
    found = collect(lambda part: kind(part.data[0]), 5)
    return isinstance(found, kind), found._fields == ("x",)


def test_a_class_of_the_script_comes_back_as_itself() -> None:
    assert run_ranks(own_class, 2) == [(True, True)] * 2


def different_keep(other: str) -> str:
    with evenly.open_world() as world:
        return refused(tensor, keep="all" if world.rank else other)


def test_settings_that_differ_between_ranks_are_an_error_on_all() -> None:
    for text in run_ranks(different_keep, 2, "first"):
        assert "what predict() was asked for differs between ranks" in text
    for text in run_ranks(different_keep, 2, "last"):
        assert text.startswith("SettingError: keep='last'")


def without_memory() -> str:
    with evenly.open_world() as world:
        whole = mock.Mock(side_effect=OwnError("no memory")) if world.rank else memory._whole
        with mock.patch("evenly.prediction.memory._whole", whole):
            return refused(tensor)


def test_a_rank_without_memory_for_the_result_is_an_error_on_all() -> None:
    assert run_ranks(without_memory, 2) == ["OwnError: no memory"] * 2
