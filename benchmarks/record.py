"""What the run record costs the training thread, per step and per logged value.

The Recorder's own hook at a step, with a loss and a learning rate that changes logged at each,
while its thread writes beside it; and adding to the history, which there is with or without a
record. Steps of 64 samples, one rank. Time of the calling thread, and what passes on the clock
(which has the writing thread's share of the interpreter in it).
"""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from evenly.callbacks.recorder import Recorder
from evenly.plan import Plan
from evenly.record import read_run
from evenly.training.history import History

STEPS, ROUNDS = 100_000, 5


def trainer_of(history: History) -> Any:
    """As much of a Trainer as the Recorder looks at."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    return SimpleNamespace(
        history=history,
        step=0,
        epoch=0,
        position=0,
        total_steps=STEPS,
        data_wait=1e-5,
        step_began=0.0,
        met=1e-4,
        stages=[],
        plan=Plan(length=STEPS * 64, batch_size=64),
        world=SimpleNamespace(
            rank=0, size=1, device=torch.device("cpu"), backend="none", local_size=1
        ),
        model=torch.nn.Linear(1, 1),
        callbacks=[],
        optimizer=torch.optim.SGD([parameter], lr=0.1),
        options={},
        stopped=False,
        part=SimpleNamespace(step=0, indices=torch.arange(64), global_weight=64),
    )


def measure(recorded: bool) -> tuple[float, float, int]:
    """Microseconds of thread and of clock per step, and how many values there were."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(History())
        recorder = Recorder(Path(folder), trainer.world)
        if recorded:
            recorder.on_run_start(trainer)
        group = trainer.optimizer.param_groups[0]
        thread, clock = time.thread_time(), time.perf_counter()
        for step in range(1, STEPS + 1):
            trainer.step = trainer.part.step = step
            trainer.step_began = time.perf_counter()
            group["lr"] = 0.1 / step
            trainer.history.add("loss", step, 1.0 / step)
            if recorded:
                recorder.on_step_end(trainer)
        thread, clock = time.thread_time() - thread, time.perf_counter() - clock
        values = 0
        if recorded:
            recorder.on_run_end(trainer)
            run = read_run(folder)
            values = sum(map(len, run.series.values()))
            assert len(run.series["loss"]) == STEPS
    return 1e6 * thread / STEPS, 1e6 * clock / STEPS, values


def main() -> None:
    print("microseconds, best and worst of", ROUNDS, "rounds of", f"{STEPS:,}", "steps")
    print(f"{'':34}{'thread':>16}{'clock':>16}")
    for recorded in (False, True):
        found = [measure(recorded) for _ in range(ROUNDS)]
        for name, share in (("step", 1.0), ("value", found[0][2] / STEPS if recorded else 1.0)):
            spans = [sorted(one[place] / share for one in found) for place in (0, 1)]
            cells = "".join(f"{f'{span[0]:.2f} to {span[-1]:.2f}':>16}" for span in spans)
            print(f"{'with' if recorded else 'without'} a record, per {name:16}{cells}")


if __name__ == "__main__":
    main()
