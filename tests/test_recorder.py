"""The Trainer's record: everything of a run, on any number of processes, at no exchange more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import evenly
from evenly.callbacks import Callback, Logger, TensorBoard
from evenly.errors import SettingError, StorageError, WorldError
from evenly.record import FILE, read_run
from evenly.record.coverage import plan_of, planned, written
from evenly.report.strips import held_up
from evenly.testing import run_ranks
from trainings import digits, made

History = dict[str, tuple[list[int], list[float]]]


pytestmark = pytest.mark.usefixtures("world")


class Note(Callback):
    """Notes something at each step, and ends a run without a word, as a kill does."""

    ranks = "every"

    def __init__(self, stop: int | None) -> None:
        self.stop = stop

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        trainer.note("twice", 2.0 * trainer.step)
        if trainer.step == self.stop:
            raise KeyboardInterrupt


def train(folder: Path | None, stop: int | None = None, **options: Any) -> History:
    trainer = made(
        metrics={
            "accuracy": MulticlassAccuracy(10, average="micro"),
            "confusion": MulticlassConfusionMatrix(10),
        },
        scheduler=lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
        callbacks=[Note(stop)],
        folder=folder,
        **{"save_every": 7, **options},
    )
    data = digits(length=500), digits(length=99)
    try:
        trainer.fit(*data, epochs=3, resume="auto" if folder else None)
        trainer.test(data[1])
    except (KeyboardInterrupt, WorldError):  # its own, or the word of another rank's
        pass
    return {n: (list(s.steps), list(s.values)) for n, s in trainer.history.items()}


def test_a_run_that_ended_twice_and_was_resized_has_the_record_of_one_that_did_not(
    tmp_path: Path,
) -> None:
    run_ranks(train, 3, tmp_path, 10)
    run_ranks(train, 2, tmp_path, 17)
    history = run_ranks(train, 1, tmp_path)[0]
    run = read_run(tmp_path)
    assert (run.state, run.processes, run.damaged) == ("finished", [3, 2, 1], 0)
    assert (run.step, run.epochs, run.redone) == (24, 3, 3 + 3)
    recorded = {n: (list(s.steps), list(s.values)) for n, s in run.series.items()}
    assert {name: recorded[name] for name in history} == history
    assert {"loss", "twice", "train/loss", "validation/accuracy", "test/loss"} <= set(history)
    assert list(run.series["learning_rate"].steps) == list(range(1, 25))
    assert run.series["learning_rate"].values[0] == 0.1
    assert "samples_per_second" in recorded
    for epoch, entry in enumerate(run.coverage):
        plan = plan_of(entry["plan"])
        assert plan is not None
        count, total = planned(plan, epoch)
        assert (entry["samples"], entry["digest"]) == (count, written(total))
        assert entry["whole"]
    matrix = run.evaluations[-1]["values"]["confusion"]
    assert (run.evaluations[-1]["stage"], sum(map(sum, matrix))) == ("test", 99)
    assert run.checkpoints[-1]["step"] == 24
    assert run.settings["optimizer"]["name"] == "SGD"
    assert run.settings["loss"] == "cross_entropy"
    assert run.settings["pieces"] is None
    assert run.launches[0]["torch"] == torch.__version__
    assert len(run.ends) == 3
    assert run.ends[0]["state"] == "stopped"


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, world: evenly.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(None)
    assert list(tmp_path.iterdir()) == []


class Collectives(Callback):
    """How many there were when an epoch ends; before the checkpoint."""

    ranks = "every"

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_epoch_start(self, trainer: evenly.Trainer) -> None:
        self.counts.append(trainer.world.collectives)

    def on_epoch_end(self, trainer: evenly.Trainer, values: Any) -> None:
        self.counts.append(trainer.world.collectives)


def count_collectives(folder: Path | None) -> list[int]:
    counter = Collectives()
    trainer = made(callbacks=[counter], folder=folder, save_every=1000)
    trainer.fit(digits(length=300), epochs=2)
    first, *rest = counter.counts
    return [count - first for count in rest]


def test_the_record_adds_no_collective_to_an_epoch(tmp_path: Path) -> None:
    assert run_ranks(count_collectives, 2, tmp_path)[0] == run_ranks(count_collectives, 2, None)[0]
    assert len(read_run(tmp_path).coverage) == 2


def straggle(folder: Path) -> None:
    with evenly.open_world() as world:

        def forward(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            time.sleep(0.02 if world.rank == 1 else 0.0)
            found: Tensor = model(batch[0])
            return found

        made(forward=forward, folder=folder).fit(digits(length=256), epochs=2)


def test_a_rank_that_holds_up_the_others_is_seen(tmp_path: Path) -> None:
    run_ranks(straggle, 3, tmp_path)
    entries = read_run(tmp_path).ranks
    assert entries
    for entry in entries:
        first, slow, last = held_up(entry)
        assert slow > 0.3
        assert max(first, last) < slow / 2


def test_an_error_is_in_the_record(tmp_path: Path) -> None:
    class Break(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.step == 5:
                raise ValueError("the data is odd")

    trainer = made(folder=tmp_path, callbacks=[Break()])
    with pytest.raises(ValueError, match="odd"):
        trainer.fit(digits(), epochs=1)
    run = read_run(tmp_path)
    assert (run.state, run.step) == ("failed", 5)
    assert run.ends[-1]["error"] == "ValueError: the data is odd"


def test_a_run_that_stops_itself_says_so(tmp_path: Path) -> None:
    class Stop(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.step == 4:
                trainer.stop()

    made(folder=tmp_path, callbacks=[Stop()]).fit(digits(), epochs=1)
    assert read_run(tmp_path).state == "stopped"


def test_a_second_fit_and_tests_in_other_processes_go_into_the_same_record(tmp_path: Path) -> None:
    trainer = made(folder=tmp_path)
    trainer.fit(digits(length=128), epochs=1)
    trainer.fit(digits(length=128), epochs=2)
    made(folder=tmp_path).test(digits(length=64))
    run = read_run(tmp_path)
    assert (len(run.launches), len(run.starts), run.state) == (2, 2, "finished")
    assert list(run.series["loss"].steps) == [1, 2, 3, 4]
    assert len(run.series["test/loss"]) == 1
    assert run.epochs == 2


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = made(folder=tmp_path / "file" / "run")
    with pytest.raises(StorageError, match=r"record.jsonl cannot be written.*leave out folder="):
        trainer.fit(digits(length=64), epochs=1)


def test_a_record_that_was_lost_is_filled_from_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, 10)
    (tmp_path / FILE).unlink()
    history = train(tmp_path)
    run = read_run(tmp_path)
    recorded = {n: (list(s.steps), list(s.values)) for n, s in run.series.items()}
    assert {name: recorded[name] for name in history} == history


def test_a_folder_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    def program(folder: Path) -> str:
        with evenly.open_world() as world:
            trainer = made(folder=folder if world.rank == 0 else None)
            try:
                trainer.fit(digits(length=64), epochs=1)
            except WorldError as error:
                return str(error)
        return ""

    for text in run_ranks(program, 2, tmp_path):
        assert "whether there is a folder" in text


class Lines(Logger):
    """The logger of the docs: a line of JSON for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.began: list[int] = []
        self.closed = 0

    def begin(self, trainer: evenly.Trainer, settings: Any) -> None:
        self.began.append(trainer.step)
        assert settings["batch_size"] == 64

    def log(self, step: int, values: Any) -> None:
        self.lines.append(json.dumps({"step": step, **values}))

    def close(self) -> None:
        self.closed += 1


def test_a_logger_gets_every_number_once_and_in_order(tmp_path: Path) -> None:
    lines = Lines()
    trainer = made(callbacks=[lines])
    trainer.fit(digits(length=200), digits(length=50), epochs=2)
    trainer.test(digits(length=50))
    found = [json.loads(line) for line in lines.lines]
    for name, series in trainer.history.items():
        pairs = [(one["step"], one[name]) for one in found if name in one]
        assert pairs == list(zip(series.steps, series.values, strict=True)), name
    assert (lines.began, lines.closed) == ([0], 1)


def tensorboard(folder: Path, stop: int | None) -> None:
    trainer = made(folder=folder, callbacks=[TensorBoard(), Note(stop)], save_every=5)
    try:
        trainer.fit(digits(length=500), digits(length=50), epochs=2, resume="auto")
    except (KeyboardInterrupt, WorldError):
        return
    trainer.test(digits(length=50))


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is missing"
    )
    run_ranks(tensorboard, 2, tmp_path, 8)
    run_ranks(tensorboard, 1, tmp_path, None)
    shown = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    series = read_run(tmp_path).series
    for name in ("loss", "validation/loss", "test/loss"):
        pairs = [(event.step, event.value) for event in shown.Scalars(name)]
        assert pairs == [
            (step, pytest.approx(value, rel=1e-6))
            for step, value in zip(series[name].steps, series[name].values, strict=True)
        ]


def test_a_missing_tensorboard_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.callbacks.tensorboard.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install tensorboard"):
        TensorBoard()
    monkeypatch.undo()
    with pytest.raises(SettingError, match="give it a folder"):
        made(callbacks=[TensorBoard()]).fit(digits(length=64), epochs=1)
