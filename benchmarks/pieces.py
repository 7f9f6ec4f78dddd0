"""What the same bits cost: steps in pieces against plain replication with the same micro-batches.

    python benchmarks/pieces.py [--counts 1,2,4] [--steps 12] [--rounds 5]

Both train the same model on the same batches in the same number of runs per step: with pieces=P on
n processes each runs P / n pieces; plain replication (Trainer without pieces) has microbatch= set
so that each process runs as many micro-batches of the same size. One thread each. Rounds of the two
alternate in the same processes; the medians of the steps' seconds are compared: those that passed,
and those that the processes computed (all together), which other programs on the machine change
less. Where there are more processes than cores, they wait for each other, and the time that passed
says little about either.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenly

WIDTHS = {"1M": 550, "25M": 2840}
SAMPLES = {"1M": 512, "25M": 128}


class Clock(evenly.callbacks.Callback):
    """Of each step: seconds that passed, and seconds that this process computed."""

    ranks = "every"

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._begin = (0.0, 0.0)

    def on_step_start(self, trainer: evenly.Trainer) -> None:
        self._begin = (time.perf_counter(), time.process_time())

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        wall, cpu = self._begin
        self.seconds.append((time.perf_counter() - wall, time.process_time() - cpu))


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def measure(name: str, pieces: int, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step, of both ways, in turns."""
    torch.set_num_threads(1)
    batch = SAMPLES[name]
    with evenly.open_world() as world:
        data = TensorDataset(
            torch.randn(batch * steps, 256), torch.randint(0, 10, (batch * steps,))
        )
        found: dict[str, list[tuple[float, float]]] = {"plain": [], "pieces": []}
        ways: dict[str, dict[str, Any]] = {
            "plain": {"microbatch": batch // pieces},
            "pieces": {"pieces": pieces},
        }
        trainers, clocks = {}, {}
        for way, options in ways.items():
            clocks[way] = Clock()
            trainers[way] = evenly.Trainer(
                model=network(WIDTHS[name]),
                loss=F.cross_entropy,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
                batch_size=batch,
                callbacks=[clocks[way]],
                progress=False,
                check_loss=False,
                **options,
            )
        for round_ in range(rounds + 1):
            for way, trainer in trainers.items():
                clocks[way].seconds.clear()
                trainer.fit(data, epochs=round_ + 1)
                if round_:  # the first one warms up
                    found[way] += clocks[way].seconds[2:]
        parameters = sum(p.numel() for p in trainers["plain"].model.parameters())
        return {"seconds": found, "parameters": parameters, "size": world.size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--models", default="1M,25M")
    parser.add_argument("--pieces", default="4,8")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("| parameters | processes | pieces | plain, ms | pieces, ms | ratio | ratio computed |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models.split(","):
        for count in map(int, options.counts.split(",")):
            for pieces in map(int, options.pieces.split(",")):
                ranks = evenly.testing.run_ranks(
                    measure, count, name, pieces, options.steps, options.rounds, timeout=550
                )
                plain, ours = (
                    statistics.median(wall for wall, _ in ranks[0]["seconds"][way])
                    for way in ("plain", "pieces")
                )
                computed = [
                    sum(statistics.median(cpu for _, cpu in rank["seconds"][way]) for rank in ranks)
                    for way in ("plain", "pieces")
                ]
                crowded = " (more than cores)" if count > cores else ""
                print(
                    f"| {ranks[0]['parameters'] / 1e6:.1f} M | {count}{crowded} | {pieces} "
                    f"| {1e3 * plain:.1f} | {1e3 * ours:.1f} | {ours / plain:.2f} "
                    f"| {computed[1] / computed[0]:.2f} |",
                    flush=True,
                )
    evenly.testing.stop_ranks()


if __name__ == "__main__":
    main()
