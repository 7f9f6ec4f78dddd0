"""Saving goes on beside training, loses no error, and leaves what the rules ask for."""

from __future__ import annotations

import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import evenly
from evenly import storage
from evenly.callbacks import Callback
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.plain import put_together, taken_apart
from evenly.checkpoint.retention import About, Retention
from evenly.checkpoint.spread import rows_of, spread
from evenly.errors import EvenlyWarning, SettingError, StorageError
from evenly.testing import run_ranks
from trainings import difference, digits, made, outcome


def steps_in(folder: Path) -> list[int]:
    found = CheckpointFolder(folder / "checkpoints").all()
    return [int(path.name.partition("-")[2]) for path in found]


class At(Callback):
    """Runs something after one step."""

    ranks = "every"

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        if trainer.step == self.step:
            self.act()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that does not answer until it is told to."""
    answer = threading.Event()
    original = safetensors.torch.save_file

    def save_file(*args: Any) -> None:
        assert answer.wait(30)
        original(*args)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    return answer


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, world: evenly.World, slow_disk: threading.Event
) -> None:
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(steps_in(tmp_path))
        slow_disk.set()

    trainer = made(folder=tmp_path, save_every=2, callbacks=[At(3, look)])
    trainer.fit(digits(), steps=3)
    assert seen == [[]]  # step 3 was made before the checkpoint of step 2 was there
    assert steps_in(tmp_path) == [3, 2]


def test_what_is_saved_is_the_state_at_the_step_and_not_what_became_of_it(
    tmp_path: Path, world: evenly.World, slow_disk: threading.Event
) -> None:
    trainer = made(folder=tmp_path, save_every=2, callbacks=[At(3, slow_disk.set)])
    trainer.fit(digits(), steps=3)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000003")
    again = made(folder=tmp_path)
    again.fit(digits(), steps=3, resume="auto")
    assert difference(outcome(again), outcome(trainer)) == 0


def test_a_save_waits_where_it_is_asked_to(tmp_path: Path, world: evenly.World) -> None:
    seen: list[list[int]] = []
    looks = At(3, lambda: seen.append(steps_in(tmp_path)))
    made(folder=tmp_path, save_every=2, async_save=False, callbacks=[looks]).fit(digits(), steps=3)
    assert seen == [[2]]


def break_disk(monkeypatch: pytest.MonkeyPatch, steps: set[int], rank: int = 0) -> None:
    """Files of the checkpoints of these steps cannot be written on one rank."""
    original = storage.entry_of

    def entry_of(file: Path) -> storage.Entry:
        step = int(file.parent.name.split("-")[1].partition(".")[0])
        if step in steps and evenly.current_world().rank == rank:
            raise OSError(28, "No space left on device")
        return original(file)

    monkeypatch.setattr(storage, "entry_of", entry_of)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_is_an_error_on_all_ranks_soon_after(tmp_path: Path, rank: int) -> None:
    def program() -> tuple[int, str, list[int]]:
        class Slow(Callback):
            ranks = "every"

            def on_step_end(self, trainer: evenly.Trainer) -> None:
                time.sleep(0.01)

        with pytest.MonkeyPatch.context() as patch:
            break_disk(patch, {4}, rank)
            trainer = made(folder=tmp_path, save_every=2, callbacks=[Slow()])
            with pytest.raises(StorageError) as caught:
                trainer.fit(digits(), steps=1000)
        return trainer.step, str(caught.value), steps_in(tmp_path)

    for step, text, steps in run_ranks(program, 2):
        assert step <= 20
        assert "No space left on device" in text
        assert "Earlier checkpoints are untouched" in text
        assert steps == [2]
    assert not list((tmp_path / "checkpoints").glob("*.partial-*"))


def test_a_failed_save_can_be_a_warning_and_the_next_one_is_made(tmp_path: Path) -> None:
    def program() -> tuple[list[str], list[int]]:
        import warnings

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            break_disk(patch, {4}, 1)
            trainer = made(folder=tmp_path, save_every=2, on_save_error="warn")
            trainer.fit(digits(), steps=7)
        return [str(one.message) for one in told if one.category is EvenlyWarning], steps_in(
            tmp_path
        )

    first, second = run_ranks(program, 2)
    (text,) = [text for text in first[0] if "checkpoint" in text]
    assert "No space left" in text
    assert "Training goes on" in text
    assert not [text for text in second[0] if "checkpoint" in text]
    assert first[1] == [7, 6, 2]


def test_a_folder_that_is_in_the_way_or_vanishes_is_an_error_that_says_so(
    tmp_path: Path, world: evenly.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match="could not be written"):
        made(folder=tmp_path).fit(digits(), steps=1)
    (tmp_path / "checkpoints").unlink()

    original = storage.entry_of

    def entry_of(file: Path) -> storage.Entry:
        shutil.rmtree(tmp_path / "checkpoints")
        return original(file)

    monkeypatch.setattr(storage, "entry_of", entry_of)
    with pytest.raises(StorageError, match="see whether the folder is there"):
        made(folder=tmp_path).fit(digits(), steps=1)


def test_an_error_of_the_program_does_not_cost_the_checkpoint_that_is_being_written(
    tmp_path: Path,
) -> None:
    def program() -> list[int]:
        original = storage.entry_of

        def entry_of(file: Path) -> storage.Entry:
            time.sleep(0.5)
            return original(file)

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "entry_of", entry_of)
            trainer = made(folder=tmp_path, save_every=2, callbacks=[At(3, fail)])
            with pytest.raises((ZeroDivisionError, evenly.errors.WorldError)):
                trainer.fit(digits(), steps=5)
        return steps_in(tmp_path)

    assert run_ranks(program, 2)[0] == [2]


def test_the_best_by_a_metric_stay_and_are_saved_when_they_are_found(
    tmp_path: Path, world: evenly.World
) -> None:
    rules = Retention(last=1, best=2, monitor="validation/loss")
    trainer = made(folder=tmp_path, keep=rules, save_every=1000)
    trainer.fit(digits(), digits(length=99), steps=80, validate_every=10)
    losses = trainer.history["validation/loss"]
    order = sorted(range(len(losses)), key=lambda i: losses.values[i])
    best = {losses.steps[i] for i in order[:2]}
    assert set(steps_in(tmp_path)) == best | {80}
    # After a restart they are known.
    again = made(folder=tmp_path, keep=rules, save_every=1000)
    again.fit(digits(), digits(length=99), steps=90, validate_every=10, resume="auto")
    losses = again.history["validation/loss"]
    order = sorted(range(len(losses)), key=lambda i: losses.values[i])
    assert set(steps_in(tmp_path)) == {losses.steps[i] for i in order[:2]} | {90}


def test_ranks_save_the_best_at_the_same_points(tmp_path: Path) -> None:
    def program() -> list[int]:
        rules = Retention(last=1, best=3, monitor="train/loss")
        trainer = made(folder=tmp_path, keep=rules, save_every=7)
        trainer.fit(digits(length=300), epochs=8)
        return steps_in(tmp_path)

    assert len(run_ranks(program, 3)[0]) in (3, 4)


def test_a_monitor_that_is_not_measured_is_named(tmp_path: Path, world: evenly.World) -> None:
    def fit(monitor: str, **options: Any) -> None:
        keep = Retention(best=1, monitor=monitor)
        made(folder=tmp_path, keep=keep).fit(digits(length=99), epochs=1, **options)

    with pytest.raises(SettingError, match="no evaluation of that name"):
        fit("validation/loss")
    with pytest.raises(SettingError, match=r"there is 'validation/loss'.*monitor="):
        fit("validation/accuracy", validate=digits(length=50))


def test_a_damaged_checkpoint_that_was_further_costs_no_whole_one(
    tmp_path: Path, world: evenly.World
) -> None:
    made(folder=tmp_path, save_every=2).fit(digits(), steps=8)
    (tmp_path / "checkpoints" / "step-000000008" / "state.json").write_text("{}")
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000006")
    trainer = made(folder=tmp_path, save_every=1, keep=1)
    with pytest.warns(EvenlyWarning, match="The one before it is used"):
        trainer.fit(digits(), steps=6, resume="auto")
    assert steps_in(tmp_path) == [8, 6]
    with pytest.warns(EvenlyWarning, match="The one before it is used"):
        made(folder=tmp_path, keep=1).fit(digits(), steps=9, resume="auto")
    assert steps_in(tmp_path)[0] == 9


def test_a_callback_on_one_rank_can_ask_for_a_checkpoint(tmp_path: Path) -> None:
    class Ask(Callback):
        ranks = "one"

        def on_epoch_end(self, trainer: evenly.Trainer, values: Any) -> None:
            trainer.save()

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.step == 2:
                trainer.save()

    def program() -> list[int]:
        trainer = made(folder=tmp_path, keep=None, callbacks=[Ask()])
        trainer.fit(digits(length=300), epochs=2)
        return steps_in(tmp_path)

    assert run_ranks(program, 2)[0] == [10, 6, 5, 3]


def test_tensors_whose_names_would_be_the_same_stay_apart() -> None:
    values = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "c": {1: torch.ones(2), "1": 3}}
    tensors: dict[str, Tensor] = {}
    plain = taken_apart(values, "state", tensors)
    again = put_together(plain, tensors.__getitem__)
    assert float(again["a.b"]) == 1
    assert float(again["a"]["b"]) == 0
    assert again["c"]["1"] == 3


points = st.builds(
    About,
    step=st.integers(1, 60),
    epoch=st.integers(0, 6),
    position=st.sampled_from([0, 5]),
    values=st.dictionaries(
        st.just("validation/loss"), st.one_of(st.just(math.nan), st.integers(0, 9)), max_size=1
    ),
)


@settings(deadline=None)
@given(
    found=st.lists(points, max_size=12, unique_by=lambda one: one.step),
    last=st.one_of(st.none(), st.integers(1, 4)),
    best=st.integers(0, 3),
    every=st.sampled_from([None, 10, "2 epochs"]),
)
def test_the_rules_keep_what_they_say(
    found: list[About], last: int | None, best: int, every: Any
) -> None:
    stay = Retention(last=last, best=best, every=every).stay(found)
    steps = sorted(one.step for one in found)
    newest = set(steps if last is None else steps[-last:])
    scored = [one for one in found if one.values and not math.isnan(one.values["validation/loss"])]
    scored.sort(key=lambda one: (one.values["validation/loss"], one.step))
    expected = newest | {one.step for one in scored[:best]}
    if every == 10:
        expected |= {step for step in steps if step % 10 == 0}
    elif every is not None:
        expected |= {one.step for one in found if one.position == 0 and one.epoch % 2 == 0}
    assert stay == expected


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 2000), max_size=2).map(tuple), min_size=1, max_size=6),
    size=st.integers(1, 9),
)
def test_every_row_of_every_tensor_is_written_by_one_rank(
    shapes: list[tuple[int, ...]], size: int
) -> None:
    tensors = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    loads = []
    for share in spread(tensors, size):
        loads.append(sum(rows_of(tensors[rows.name], rows).nbytes for rows in share))
        for name, start, stop in share:
            found[name].append((start, stop))
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.dim() else 1
        edges = [0, *(stop for _, stop in found[name])]
        assert [start for start, _ in found[name]] == edges[:-1]
        assert edges[-1] == rows
    row = max((t[:1].nbytes for t in tensors.values() if t.dim()), default=0)
    assert max(loads) <= sum(loads) / size + 2 * (1 << 20) + row


def test_a_large_tensor_is_written_by_all_ranks_and_read_by_any_number(tmp_path: Path) -> None:
    def train(steps: int) -> tuple[dict[str, Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 9000), nn.Linear(9000, 10))
        trainer = made(model=model, folder=tmp_path, batch_size=16)
        data = digits(torch.float32, length=64)
        trainer.fit(data, steps=steps, resume="auto")
        assert trainer.checkpoints is not None
        files = trainer.checkpoints.all()[0].glob("*.safetensors")
        return outcome(trainer)["weights"], [file.stat().st_size for file in files]

    weights, sizes = run_ranks(train, 3, 2)[0]
    assert len(sizes) == 3
    assert max(sizes) < 1.3 * min(sizes)
    again = run_ranks(train, 2, 2)[0][0]  # nothing is left to do
    assert all(torch.equal(weights[name], again[name]) for name in weights)
