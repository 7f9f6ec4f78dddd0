"""`evenly run --restarts`: whatever ends a rank, the run goes on soon from its last checkpoint; and
runs end without a trace.
"""

from __future__ import annotations

import runpy
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from soak import share
from test_launcher import Launched, evenly_run, start, write

__all__ = ["start"]  # the fixture

ROOT = Path(__file__).parent.parent
CAUSES = ["SIGKILL", "exception", "os._exit", "MemoryError"]


def measured(causes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "restarts.py"))["measure"](
        causes
    )
    return found


def check_restarts(causes: list[str]) -> None:
    found = measured(causes)
    assert len(found["step"]) == len(causes)  # each died, and went on
    assert statistics.median(found["relaunch"]) <= 1.0, found
    assert statistics.median(found["step"]) <= 1.2 * found["cold"], found
    told = [line for line in found["errors"].splitlines() if "is done again" in line]
    assert len(told) == len(causes)
    for attempt, line in enumerate(told):
        # Saved after each step in the background, so the one before the last may be the newest.
        wanted = [f"going on after step {4 * attempt + n}, from " for n in (1, 2, 3)]
        assert any(words in line for words in wanted), line
    for attempt in range(len(causes)):
        assert f"restarting ({attempt + 1} of {len(causes)})" in found["errors"]


def test_five_of_five_restarts_go_on_soon_whatever_the_cause() -> None:
    check_restarts([*CAUSES, "SIGKILL"])


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(share(10)))
def test_fifty_of_fifty_restarts_go_on_soon(turn: int) -> None:
    check_restarts([CAUSES[(turn + i) % 4] for i in range(5)])


ENDING = """
    import atexit
    import torch
    class Holder: pass
    holder = Holder()
    holder.itself = holder
    holder.file = open("log.txt", "w")
    holder.file.write("the last words")
    atexit.register(lambda: print("handler ran"))
    {end}
    """


@pytest.mark.parametrize(("end", "code"), [("raise ValueError", 1), ("raise SystemExit", 0)])
def test_a_program_ends_with_its_files_written(tmp_path: Path, end: str, code: int) -> None:
    write(tmp_path / "ending.py", ENDING.replace("{end}", end))
    done = evenly_run("-n", "1", "ending.py", folder=tmp_path)
    assert done.returncode == code
    assert done.stdout == "handler ran\n"
    assert (tmp_path / "log.txt").read_text() == "the last words"


FAILING_WHILE_SAVING = """
    import time
    import evenly
    from evenly import storage
    from trainings import digits, made

    seal = storage.seal
    def slow(*args, **options):
        time.sleep(4)  # longer than the launcher gives those that it stops
        seal(*args, **options)
    storage.seal = slow

    class Fail(evenly.callbacks.Callback):
        ranks = "every"
        def on_step_end(self, trainer):
            if trainer.step == 3 and trainer.world.rank == 1:
                raise ValueError("planted")

    made(folder="run", save_every=2, callbacks=[Fail()]).fit(digits(), steps=6)
    """


def test_a_rank_that_fails_does_not_cost_the_checkpoint_that_rank_0_is_sealing(
    tmp_path: Path,
) -> None:
    write(tmp_path / "train.py", FAILING_WHILE_SAVING)
    variables = {"PYTHONPATH": str(Path(__file__).parent)}
    done = evenly_run("-n", "2", "train.py", folder=tmp_path, env=variables)
    assert done.returncode == 1
    assert "planted" in done.stderr
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000002"]


TRAINING = """
    import sys, time
    import torch
    import torch.nn.functional as F
    import evenly

    class Data(torch.utils.data.Dataset):  # not in memory, so worker processes read it
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if "long" in sys.argv and index == 63:
                print("reading", flush=True)
                time.sleep(60)
            return torch.full((4,), float(index)), index % 3

    class Slow(evenly.callbacks.Callback):
        ranks = "every"
        def on_step_end(self, trainer):
            time.sleep(0.01)

    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=torch.nn.Linear(4, 3), loss=F.cross_entropy, batch_size=8, workers=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Slow()], progress=False, folder="run",
    )
    trainer.fit(Data(), validate=Data(), epochs=100 if "long" in sys.argv else 1)
    """


def test_nothing_outlives_a_killed_launcher(start: Callable[..., Launched], tmp_path: Path) -> None:
    write(tmp_path / "training.py", TRAINING)
    run = start("-n", "2", "training.py", "long")
    run.wait_for("reading")  # in a process that a rank started, and which sleeps now
    assert len(run.tree()) >= 4
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert run.orphans(patience=5.0) == []


def finish(folder: Path, processes: int) -> None:
    done = evenly_run("-n", str(processes), "training.py", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # so neither 'terminate called' nor 'Aborted'


def test_finished_jobs_end_in_good_order(tmp_path: Path) -> None:
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        write(folder / "training.py", TRAINING)
        finish(folder, processes)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(share(100)))
def test_a_hundred_finished_jobs_end_in_good_order(tmp_path: Path, turn: int) -> None:
    write(tmp_path / "training.py", TRAINING)
    finish(tmp_path, 1 + turn % 4)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(share(20)))
def test_nothing_outlives_a_launcher_killed_at_any_moment(
    start: Callable[..., Launched], tmp_path: Path, turn: int
) -> None:
    write(tmp_path / "training.py", TRAINING)
    run = start("-n", str(1 + turn % 3), "training.py", "long")
    end = time.monotonic() + 0.5 + turn * 0.4
    while time.monotonic() < end:
        run.tree()  # remembers whoever was there
        time.sleep(0.02)
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert [p for p in run.orphans(patience=5.0) if p.status() != psutil.STATUS_ZOMBIE] == []
