"""A run that ends and goes on, on as many processes as there are, has the numbers of one that did
not end; and a checkpoint is whole or not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

import evenly
from evenly import storage
from evenly.callbacks import EMA, Callback, EarlyStopping
from evenly.checkpoint import CheckpointFolder
from evenly.errors import EvenlyWarning, FormatError, SettingError, StorageError, WorldError
from evenly.stopping import STOP_KEY
from evenly.store import connect
from evenly.testing import run_ranks
from evenly.variables import read_place
from trainings import adamw, difference, digits, made, network, outcome

Numbers = dict[str, Any]
VALIDATION = digits(length=99)


class Interrupt(Callback):
    """Ends a run without a word after some steps, as a kill does."""

    ranks = "every"

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


def train(folder: Path | None, stop: int | None = None, **options: Any) -> Numbers:
    """Everything that has a state: momentum, a schedule, an average, patience, metrics, totals."""

    class Log(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            assert trainer.part is not None
            labels = trainer.part.data[1]
            trainer.log("label", evenly.Total(labels.sum(), len(labels)))

    average, patience = EMA(0.9), EarlyStopping(patience=50)
    trainer = made(
        optimizer=adamw,
        scheduler=lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
        callbacks=[Log(), average, patience, Interrupt(stop)],
        train_metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        folder=folder,
        **{"save_every": 7, **options},
    )
    data = digits(), digits(length=99)
    try:
        trainer.fit(*data, epochs=3, resume="auto" if folder else None)
    except (KeyboardInterrupt, WorldError):  # its own, or the word of another rank's
        return {}
    found = outcome(trainer)
    found["weights"] |= {f"ema.{n}": t for n, t in average.model.state_dict().items()}
    found["history"]["patience"] = [patience.best, patience.best_step, patience.waited]
    return found


@pytest.fixture(scope="module")
def undisturbed() -> Numbers:
    return run_ranks(train, 1, None)[0]


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2, 1), (1, 4, 2), (2, 5, 3)])
def test_a_run_goes_on_in_mid_epoch_on_any_number_of_processes(
    tmp_path: Path, undisturbed: Numbers, counts: tuple[int, int, int]
) -> None:
    assert run_ranks(train, counts[0], tmp_path, 17)[0] == {}
    assert run_ranks(train, counts[1], tmp_path, 40)[0] == {}
    for rank in run_ranks(train, counts[2], tmp_path):
        assert difference(rank, undisturbed) <= 1e-12


def test_every_sample_of_the_epoch_is_used_once_across_the_interruption(tmp_path: Path) -> None:
    def program(size: int, stop: int | None) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []

        class See(Callback):
            ranks = "every"

            def on_step_end(self, trainer: evenly.Trainer) -> None:
                assert trainer.part is not None
                seen.append((trainer.step, trainer.part.indices.tolist()))
                if trainer.step == stop:
                    raise KeyboardInterrupt

        trainer = made(callbacks=[See()], folder=tmp_path, save_every=5)
        with contextlib.suppress(KeyboardInterrupt, WorldError):
            trainer.fit(digits(), epochs=1, resume="auto")
        return seen

    before = run_ranks(program, 3, 3, 13)
    after = run_ranks(program, 2, 2, None)
    kept = [i for rank in before for step, indices in rank if step <= 10 for i in indices]
    rest = [i for rank in after for _, indices in rank for i in indices]
    assert sorted(kept + rest) == list(range(1437))


def test_dropout_goes_on_to_the_bit_at_the_same_process_count(tmp_path: Path) -> None:
    def program(folder: Path | None, steps: list[int]) -> Numbers:
        for total in steps:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)).double()
            trainer = made(model=model, folder=folder)
            trainer.fit(digits(), steps=total, resume="auto" if folder else None)
        return outcome(trainer)

    whole = run_ranks(program, 2, None, [40])[0]
    for rank in run_ranks(program, 2, tmp_path, [13, 31, 40]):
        assert difference(rank, whole) == 0


def test_plain_torch_can_read_the_model_and_no_file_holds_code(tmp_path: Path) -> None:
    def program() -> dict[str, Tensor]:
        trainer = made(folder=tmp_path)
        trainer.fit(digits(), steps=3)
        return outcome(trainer)["weights"]  # type: ignore[no-any-return]

    weights = run_ranks(program, 3)[0]
    (folder,) = CheckpointFolder(tmp_path / "checkpoints").all()
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert len(list(folder.glob("*.safetensors"))) == 3
    model = network()
    prefix = "model."
    model.load_state_dict({n[len(prefix) :]: t for n, t in found.items() if n.startswith(prefix)})
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}


def test_the_newest_ones_are_kept(tmp_path: Path, world: evenly.World) -> None:
    trainer = made(folder=tmp_path, save_every=2, keep=3)
    trainer.fit(digits(), steps=11)
    names = [path.name for path in CheckpointFolder(tmp_path / "checkpoints").all()]
    assert names == ["step-000000011", "step-000000010", "step-000000008"]


def test_checkpoints_come_by_epoch_or_by_the_clock_of_one_rank(tmp_path: Path) -> None:
    def program(often: str, path: Path) -> list[str]:
        import time

        class Slow(Callback):
            ranks = "every"

            def on_step_end(self, trainer: evenly.Trainer) -> None:
                if often != "epoch":
                    time.sleep(0.05)

        trainer = made(folder=path, save_every=often, keep=None, callbacks=[Slow()])
        trainer.fit(digits(), steps=50 if often == "epoch" else 20)
        assert trainer.checkpoints is not None
        return [found.name for found in trainer.checkpoints.all()]

    by_epoch = run_ranks(program, 2, "epoch", tmp_path / "a")[0]
    assert by_epoch == ["step-000000050", "step-000000046", "step-000000023"]
    assert len(run_ranks(program, 2, "0.2s", tmp_path / "b")[0]) >= 4


def test_a_folder_of_another_run_is_refused_until_one_says_what_to_do(
    tmp_path: Path, world: evenly.World
) -> None:
    made(folder=tmp_path).fit(digits(), steps=3)
    with pytest.raises(SettingError, match=r"checkpoints of an earlier run.*resume='auto'"):
        made(folder=tmp_path).fit(digits(), steps=5)
    with pytest.raises(SettingError, match="give the Trainer a folder="):
        made().fit(digits(), steps=5, resume="auto")
    for options in ({"batch_size": 32}, {"seed": 1}, {"shuffle": False}):
        with pytest.raises(SettingError, match=f"{next(iter(options))}="):
            made(folder=tmp_path, **options).fit(digits(), steps=5, resume="auto")
    with pytest.raises(SettingError, match="length=1437 and this one length=99"):
        made(folder=tmp_path).fit(digits(length=99), steps=5, resume="auto")
    other = made(model=nn.Linear(64, 10).double(), folder=tmp_path)
    with pytest.raises(StorageError, match="another model"):
        other.fit(digits(), steps=5, resume="auto")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, at steps 2 and 4."""
    path = tmp_path_factory.mktemp("two")
    with evenly.open_world():
        made(folder=path, save_every=2).fit(digits(), steps=4)
    return path


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    which=st.integers(0, 9),
    harm=st.sampled_from(["truncate", "flip", "remove", "swap", "grow", "link"]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_any_damage_is_noticed_and_the_one_before_is_used(
    two: Path, tmp_path_factory: pytest.TempPathFactory, which: int, harm: str, place: float
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "checkpoints"
    shutil.copytree(two / "checkpoints", folder)
    newest, before = CheckpointFolder(folder).all()
    files = sorted(newest.iterdir())
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    if harm == "truncate":
        file.write_bytes(content[: int(place * len(content))])
    elif harm == "flip":
        content[int(place * len(content))] ^= 1
        file.write_bytes(content)
    elif harm == "remove":
        file.unlink()
    elif harm == "grow":
        file.write_bytes(content + b" x")
    elif harm == "swap":
        file.write_bytes((before / file.name).read_bytes())
        if file.read_bytes() == content:
            return
    elif file.name != "manifest.json":
        target = folder / "elsewhere"
        target.write_bytes(content)
        file.unlink()
        file.symlink_to(target)
    else:
        return
    with evenly.open_world(), pytest.warns(EvenlyWarning, match="The one before it is used"):
        found = CheckpointFolder(folder).newest()
    assert found is not None
    assert found.path == before


def test_a_file_outside_the_folder_or_with_code_in_it_is_never_read(
    two: Path, tmp_path: Path, world: evenly.World
) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "checkpoints"
    shutil.copytree(two / "checkpoints", folder)
    newest = CheckpointFolder(folder).all()[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    for name in ("../evil", "/etc/passwd", "..", ""):
        manifest["files"] = {name: {"bytes": 1, "sha256": "0"}}
        manifest["sha256"] = storage._digest(manifest)
        (newest / "manifest.json").write_text(json.dumps(manifest))
        with pytest.warns(EvenlyWarning, match="not one inside it"):
            assert CheckpointFolder(folder).newest() is not None
    for file in newest.iterdir():
        file.write_bytes(pickle.dumps(Payload()))
    with pytest.warns(EvenlyWarning, match="no readable manifest"):
        CheckpointFolder(folder).newest()
    assert not (tmp_path / "ran").exists()


def test_a_version_of_the_future_is_refused(two: Path, tmp_path: Path, world: evenly.World) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(two / "checkpoints", folder)
    newest = CheckpointFolder(folder).all()[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(FormatError, match="version 99"):
        CheckpointFolder(folder).newest()
    with pytest.raises(FormatError, match="version 99"):  # and not begun anew beside it
        made(folder=tmp_path).fit(digits(), steps=5, resume="auto")
    assert [path.name for path in CheckpointFolder(folder).all()] == [newest.name, "step-000000002"]


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_costs_nothing(
    tmp_path: Path,
) -> None:
    def program() -> tuple[str, list[str]]:
        import resource

        trainer = made(folder=tmp_path, save_every=2)
        trainer.fit(digits(), steps=2)
        if trainer.world.rank == 1:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            trainer.fit(digits(), steps=4)
        except StorageError as error:
            text = str(error)
        finally:
            if trainer.world.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert trainer.checkpoints is not None
        return text, [path.name for path in trainer.checkpoints.all()]

    for text, names in run_ranks(program, 2):
        assert "could not be written" in text
        assert "Earlier checkpoints are untouched" in text
        assert names == ["step-000000002"]


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, world: evenly.World) -> None:
    class Odd(Callback):
        def on_step_end(self, trainer: evenly.Trainer) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {"friend": object()}

    with pytest.raises(SettingError, match=r"callbacks\.0\.1\.friend is a object"):
        made(folder=tmp_path, callbacks=[Odd()]).fit(digits(), steps=1)


PROGRAM = """
import sys, torch
sys.path.insert(0, {tests!r})
import evenly
from trainings import digits, made, outcome

attempt = int(__import__("os").environ["TORCHELASTIC_RESTART_COUNT"])

class Die(evenly.callbacks.Callback):
    ranks = "every"
    def on_step_end(self, trainer):
        if trainer.step == {dies}[attempt] and trainer.world.rank == attempt:
            __import__("os").kill(__import__("os").getpid(), 9)

trainer = made(folder={folder!r}, save_every=5, callbacks=[Die()])
trainer.fit(digits(), epochs=2, resume="auto")
if trainer.world.rank == 0:
    torch.save(outcome(trainer)["weights"], {result!r})
"""


@pytest.mark.soak
def test_a_killed_rank_restarts_the_group_from_the_last_checkpoint(tmp_path: Path) -> None:
    script, result = tmp_path / "train.py", tmp_path / "result.pt"
    values = {
        "tests": str(Path(__file__).parent),
        "folder": str(tmp_path / "run"),
        "result": str(result),
        "dies": [13, 22, 1000],
    }
    script.write_text(PROGRAM.format(**values))
    command = [sys.executable, "-m", "evenly", "run", "-n", "2", "--restarts", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr

    def plain() -> Any:
        trainer = made()
        trainer.fit(digits(), epochs=2)
        return outcome(trainer)["weights"]

    found, expected = torch.load(result, weights_only=True), run_ranks(plain, 1)[0]
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) <= 1e-12


STOPPING = """
import sys, torch, time, os
sys.path.insert(0, {tests!r})
import evenly
from trainings import digits, made, outcome

class Slow(evenly.callbacks.Callback):
    ranks = "every"
    def on_step_end(self, trainer):
        time.sleep(0.02)
        if trainer.step == 5:
            open({folder!r} + f"/pid-{{trainer.world.rank}}", "w").write(str(os.getpid()))

trainer = made(folder={folder!r} + "/run", save_every=1000, callbacks=[Slow()])
trainer.fit(digits(), epochs=int(sys.argv[1]), resume="auto")
if trainer.world.rank == 0:
    torch.save((trainer.step, outcome(trainer)["weights"]), {result!r})
"""


def begun(tmp_path: Path, *command: str) -> tuple[Path, subprocess.Popen[str]]:
    """A training that goes on for long, after its fifth step."""
    script = tmp_path / "train.py"
    values = {"tests": str(Path(__file__).parent), "folder": str(tmp_path)}
    script.write_text(STOPPING.format(**values, result=str(tmp_path / "result.pt")))
    started = subprocess.Popen(
        [sys.executable, *command, str(script), "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "pid-0").exists() and started.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return script, started


@pytest.mark.parametrize("way", ["alone", pytest.param("launcher", marks=pytest.mark.soak)])
def test_a_request_to_stop_saves_and_exits_with_a_code_for_schedulers(
    tmp_path: Path, way: str
) -> None:
    launcher = ["-m", "evenly", "run", "-n", "2", "--restarts", "2"] if way == "launcher" else []
    script, started = begun(tmp_path, *launcher)
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 75, errors
    assert "stopped as asked at step" in errors
    (path,) = CheckpointFolder(tmp_path / "run" / "checkpoints").all()
    stopped = int(path.name.partition("-")[2])
    assert stopped < 1000

    command = [sys.executable, *launcher, str(script), "3"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    steps, found = torch.load(tmp_path / "result.pt", weights_only=True)

    def plain() -> Any:
        trainer = made()
        trainer.fit(digits(), steps=steps)
        return outcome(trainer)["weights"]

    expected = run_ranks(plain, 1)[0]
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) <= 1e-12


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    _, started = begun(tmp_path)
    os.kill(started.pid, signal.SIGSTOP)
    os.kill(started.pid, signal.SIGTERM)
    os.kill(started.pid, signal.SIGUSR1)
    os.kill(started.pid, signal.SIGCONT)
    started.communicate(timeout=30)
    assert started.returncode in (-signal.SIGTERM, -signal.SIGUSR1)


def test_a_request_at_the_last_step_is_not_lost(tmp_path: Path, world: evenly.World) -> None:
    class Ask(Callback):
        def on_run_end(self, trainer: evenly.Trainer) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = made(callbacks=[Ask()], folder=tmp_path)
    with pytest.raises(SystemExit) as left:
        trainer.fit(digits(), steps=2)
    assert left.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_without_checkpoints_ends_the_run_as_ever(world: evenly.World) -> None:
    class Ask(Callback):
        def on_step_end(self, trainer: evenly.Trainer) -> None:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    made(callbacks=[Ask()]).fit(digits(), steps=2)


@pytest.mark.parametrize(("often", "when"), [("epoch", 23), (5, 5)])
def test_a_request_during_an_evaluation_ends_it_and_it_is_made_when_the_run_goes_on(
    tmp_path: Path, often: Any, when: int
) -> None:
    """Whether it is the last evaluation of the run or not, on one rank, which the others hear."""

    class Data(Dataset[Any]):
        def __init__(self, trainers: list[evenly.Trainer]) -> None:
            self.read, self.trainers = 0, trainers

        def __len__(self) -> int:
            return 99

        def __getitem__(self, place: int) -> Any:
            (trainer,) = self.trainers
            if trainer.step == when and trainer.world.rank == 0 and not self.read:
                self.read += 1
                store = connect(read_place(os.environ), timedelta(seconds=10))
                store.set(STOP_KEY, "SIGTERM")  # as `evenly run` does
                time.sleep(1)
            return tuple(tensor[place] for tensor in VALIDATION.tensors)

    def run(folder: Path | None, harm: bool) -> tuple[Any, Any]:
        trainer = made(
            folder=folder,
            workers=0,
            save_every=1000,
            scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
            scheduler_monitor="first/loss",
        )
        # What was evaluated before the request came is not evaluated again.
        validate = {"first": VALIDATION, "second": Data([trainer]) if harm else VALIDATION}
        code = None
        try:
            resume: Any = folder and "auto"
            trainer.fit(digits(), validate, epochs=1, validate_every=often, resume=resume)
        except SystemExit as left:
            code = left.code
        return code, outcome(trainer)

    def program() -> list[Any]:
        first = run(tmp_path, True)
        connect(read_place(os.environ), timedelta(seconds=10)).delete_key(STOP_KEY)
        evenly.barrier()
        return [first, run(tmp_path, False), run(None, False)]

    for first, again, whole in run_ranks(program, 2):
        assert first[0] == 75
        assert len(first[1]["history"]["first/loss"]) == 1
        assert len(first[1]["history"].get("second/loss", [])) == 0
        assert again[0] is None
        assert difference(again[1], whole[1]) <= 1e-12
    newest = CheckpointFolder(tmp_path / "checkpoints")
    about = newest.about()[max(newest.about())]
    assert "second/loss" in about.values or often == 5
