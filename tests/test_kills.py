"""Killed at any moment, on any number of processes, a run goes on to the numbers of one that was
left alone. A few schedules here; `make soak` runs hundreds.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from evenly.checkpoint import CheckpointFolder
from faults import PARTIAL, STEPS, Nursery
from soak import share
from test_launcher import Launched
from trainings import difference

PHASES = ("start", "step", "save", "evaluation")


def records(folder: Path) -> list[list[str]]:
    """What the ranks wrote down, as words, each with its run in front."""
    found = []
    for file in sorted(folder.glob("witness-*")):
        run = file.name.split("-")[1]
        found += [[run, *line.split()] for line in file.read_text().splitlines()]
    return found


def samples(folder: Path) -> dict[int, dict[tuple[str, int], dict[int, list[int]]]]:
    """step -> (run, size) -> rank -> samples."""
    found: dict[int, dict[tuple[str, int], dict[int, list[int]]]] = {}
    for run, phase, rank, size, step, *indices in records(folder):
        if phase == "step":
            group = found.setdefault(int(step), {}).setdefault((run, int(size)), {})
            group[int(rank)] = [int(index) for index in indices]
    return found


def check_finished(folder: Path, left_alone: Path, *, bits: bool = False) -> None:
    """The numbers of the run left alone; each step made of its own samples, each once."""
    found, expected = (
        torch.load(path / "result.pt", weights_only=True) for path in (folder, left_alone)
    )
    assert difference(found, expected) <= (0 if bits else 1e-12)
    plan = {step: groups[next(iter(groups))][0] for step, groups in samples(left_alone).items()}
    assert sorted(plan) == list(range(1, STEPS + 1))
    for epoch in range(STEPS // 23):
        steps = range(23 * epoch + 1, 23 * epoch + 24)
        assert sorted(i for step in steps for i in plan[step]) == list(range(1437))
    made = samples(folder)
    assert sorted(made) == sorted(plan)
    for step, groups in made.items():
        whole = 0
        for (_, size), parts in groups.items():
            used = sorted(i for part in parts.values() for i in part)
            assert set(used) <= set(plan[step])
            assert len(used) == len(set(used))
            whole += len(parts) == size and used == sorted(plan[step])
        assert whole, f"no run made all of step {step}"


def reached(folder: Path, phase: str, step: int, run: str) -> bool:
    """Whether this run is in ``phase``, at ``step`` or later."""
    if phase == "save":
        if not reached(folder, "step", 0, run):
            return False  # what is there was left by one that was killed
        partial = (folder / "run" / "checkpoints").glob(f"step-{PARTIAL}")
        return any(int(path.name.split(".")[0].split("-")[1]) >= step for path in partial)
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (folder / f"witness-{run}-0").read_text().splitlines()
        return any(
            words[0] == phase and int(words[3]) >= step
            for words in (line.split(maxsplit=4) for line in lines[-3:])
        )
    return False


def furthest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    found = CheckpointFolder(folder / "run" / "checkpoints", keep=None).all()
    return int(found[0].name.partition("-")[2]) if found else 0


def strike(
    folder: Path, dice: random.Random, run: str, alive: Callable[[], bool], startup: float
) -> str:
    """Wait for a random moment of a random phase; the phase, or "" if the run ended before."""
    phase = dice.choice(PHASES)
    step = furthest(folder) + dice.randint(1, 40)
    until = time.monotonic() + (dice.uniform(0, startup) if phase == "start" else 60)
    while alive():
        if phase == "start":
            if time.monotonic() >= until:
                return phase
        elif reached(folder, phase, step, run):
            time.sleep(dice.uniform(0, 0.004))
            return phase
        assert phase == "start" or time.monotonic() < until, f"hangs before {phase} {step}"
        time.sleep(0.0005)
    return ""


def disturbed(
    nursery: Nursery, folder: Path, seed: int, kills: int, pieces: int | None = None
) -> list[str]:
    """A run that is killed again and again, rank by rank or whole, and started again on another
    number of processes; what was hit.
    """
    dice = random.Random(seed)
    hit: list[str] = []
    while not (folder / "result.pt").exists():
        size = dice.randint(1, 5)
        started = nursery.start("marathon", size, folder, pieces=pieces)
        phase = ""
        if len(hit) < kills:
            run = str(started.run)
            phase = strike(folder, dice, run, started.whole, 0.4)
        if not phase:
            codes = started.wait(60)
            assert set(codes) == {0}, started.log()
            continue
        chosen = dice.sample(range(size), dice.choice([1, size]))
        started.kill(*chosen)
        hit.append(f"{phase} {len(chosen)}/{size}")
        if phase == "start":  # one that never comes is waited for; schedulers end the others
            started.kill(*range(size))
        started.wait(25)
    return hit


def test_random_kills_change_nothing(nursery: Nursery, left_alone: Path, tmp_path: Path) -> None:
    hit = disturbed(nursery, tmp_path, 0, kills=5)
    assert len(hit) >= 3, hit
    check_finished(tmp_path, left_alone)


@pytest.fixture(scope="module")
def in_pieces(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a marathon in pieces that nobody disturbed, on one process."""
    folder = tmp_path_factory.mktemp("in_pieces")
    assert nursery.start("marathon", 1, folder, pieces=5).wait() == [0]
    return folder


def test_random_kills_change_no_bit_in_pieces(
    nursery: Nursery, in_pieces: Path, tmp_path: Path
) -> None:
    hit = disturbed(nursery, tmp_path, 1, kills=5, pieces=5)
    assert len(hit) >= 3, hit
    check_finished(tmp_path, in_pieces, bits=True)


def launched(folder: Path, seed: int, kills: int, most: int) -> list[str]:
    """The same with `evenly run`, whose launcher is killed, too. Its processes end with it."""
    dice = random.Random(seed)
    script = folder / "train.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom faults import marathon\n"
        "marathon(Path(sys.argv[1]))\n"
    )
    hit: list[str] = []
    attempt = 0
    while not (folder / "result.pt").exists():
        attempt += 1
        size = dice.randint(1, most)
        variables = {"RUN": f"launched{attempt}", "OMP_NUM_THREADS": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        )
        run = Launched("-n", str(size), str(script), str(folder), folder=folder, env=variables)
        try:
            phase = ""
            if len(hit) < kills:
                phase = strike(folder, dice, variables["RUN"], run.alive, 6.0)
            if not phase:
                assert run.end(90) == 0, run.errors()
                continue
            launcher, *workers = run.tree()
            what = dice.choice(["launcher", "one", "all"]) if workers else "launcher"
            chosen: list[psutil.Process] = {
                "launcher": [launcher],
                "one": workers and [dice.choice(workers)],
                "all": workers,
            }[what]
            for process in chosen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            hit.append(f"{phase} {what}/{size}")
            code = run.end(30)
            wanted = -signal.SIGKILL if what == "launcher" else 128 + signal.SIGKILL
            if what == "launcher" or phase != "start":
                assert code == wanted or (folder / "result.pt").exists(), run.errors()
            assert run.orphans(patience=5.0) == []
        finally:
            run.close()
    return hit


def test_random_kills_of_a_launched_run_change_nothing(left_alone: Path, tmp_path: Path) -> None:
    hit = launched(tmp_path, 3, kills=2, most=3)
    assert len(hit) == 2
    check_finished(tmp_path, left_alone)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 100 + share(100)))
def test_random_kills_change_nothing_for_long(
    nursery: Nursery, left_alone: Path, tmp_path: Path, seed: int
) -> None:
    disturbed(nursery, tmp_path, seed, kills=12)
    check_finished(tmp_path, left_alone)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(300, 300 + share(50)))
def test_random_kills_change_no_bit_in_pieces_for_long(
    nursery: Nursery, in_pieces: Path, tmp_path: Path, seed: int
) -> None:
    disturbed(nursery, tmp_path, seed, kills=12, pieces=5)
    check_finished(tmp_path, in_pieces, bits=True)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(500, 500 + share(100)))
def test_random_kills_of_launched_runs_change_nothing_for_long(
    left_alone: Path, tmp_path: Path, seed: int
) -> None:
    launched(tmp_path, seed, kills=4, most=5)
    check_finished(tmp_path, left_alone)


# A kill in the middle of a save. Every number in the model is the step it was saved at.


def load(folder: Path) -> tuple[int, int]:
    """(step, number in the weights) of what a run would go on from, read as a run reads it."""
    import evenly
    from faults import Numbered
    from trainings import digits

    seen: list[tuple[int, int]] = []

    class Look(evenly.callbacks.Callback):
        def on_run_start(self, trainer: evenly.Trainer) -> None:
            numbers = torch.cat([p.detach() for p in trainer.model.parameters()])
            assert float(numbers.min()) == float(numbers.max()), "a mix of two steps"
            seen.append((trainer.step, int(numbers[0])))

    megabytes = float((folder / "megabytes").read_text())
    with evenly.open_world():
        trainer = evenly.Trainer(
            model=Numbered(megabytes),
            step=lambda model, batch: evenly.Output(loss=evenly.Total(model(batch[0]), 1)),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=8,
            shuffle=False,
            callbacks=[Look()],
            folder=folder / "run",
            progress=False,
        )
        trainer.fit(digits(length=8), steps=1, resume="auto")
    return seen[0]


def written(partial: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(partial):
            with contextlib.suppress(OSError):
                total += entry.stat().st_size
    return total


def killed_in_save(
    nursery: Nursery,
    folder: Path,
    *,
    megabytes: float,
    part: float,
    whole: bool,
    size: int,
    steps: int = 5,
) -> None:
    """Kill one rank, or all, when the save of step 4 has written ``part`` of its bytes. What a run
    goes on from then is the checkpoint before, or a new one, whole.
    """
    (folder / "megabytes").write_text(str(megabytes))
    started = nursery.start(
        "numbered", size, folder, steps=steps, save_every=2, megabytes=megabytes, keep=1
    )
    expected = megabytes * 2**20
    checkpoints = folder / "run" / "checkpoints"
    while started.running():
        done = max(
            (written(path) for path in checkpoints.glob("step-000000004.partial-*")), default=-1
        )
        sealed = (checkpoints / "step-000000004").exists()
        if sealed or (done >= 0 and done >= part * expected):
            break
    started.kill(*(range(size) if whole else [size - 1]))
    started.wait(40)
    step, number = load(folder)
    assert step in (2, 4, steps)
    assert number == step


@pytest.mark.parametrize(("part", "whole"), [(0.0, True), (0.3, False), (0.6, True), (1.0, False)])
def test_a_kill_in_a_save_leaves_the_one_before_or_the_new_one(
    nursery: Nursery, tmp_path: Path, part: float, whole: bool
) -> None:
    killed_in_save(nursery, tmp_path, megabytes=16, part=part, whole=whole, size=2)


@pytest.mark.soak
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("part", [i / (share(20)) for i in range(share(20) + 1)])
def test_a_kill_at_any_part_of_a_large_save_leaves_the_one_before_or_the_new_one(
    nursery: Nursery, tmp_path: Path, part: float, whole: bool
) -> None:
    steps = 4 if part > 0.5 else 5  # the last save of a run, or one with steps to make after it
    killed_in_save(nursery, tmp_path, megabytes=200, part=part, whole=whole, size=3, steps=steps)
