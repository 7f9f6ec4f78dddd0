"""What the Trainer costs per step, beside the same loop written by hand with DDP.

The tiny network of the digits, an epoch of 11,496 samples (the digits eight times) in steps of 64,
progress bar on. By hand twice: with DataLoader and DistributedSampler, as it is usually written,
and with the samples taken straight from the tensors, as fast as it gets. At one process DDP is left
out there, which would cost a half more. Interleaved, in the same processes, one thread each;
medians of 15 runs, and the quartiles, because two processes on two shared cores differ much from
run to run.
"""

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenly
from evenly.callbacks import Callback
from evenly.crew import Crew

BATCH, EPOCHS, RUNS, TIMES = 64, 1, 15, 8


def data() -> TensorDataset:
    x, y = evenly.data.digits()[0].tensors
    return TensorDataset(x.repeat(TIMES, 1), y.repeat(TIMES))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Stopwatch(Callback):
    """From the first epoch's start to the end; no hook at steps, which would cost."""

    ranks = "every"

    def on_epoch_start(self, trainer: evenly.Trainer) -> None:
        if trainer.epoch == 0:
            self.begin = time.perf_counter()

    def on_run_end(self, trainer: evenly.Trainer) -> None:
        self.seconds = time.perf_counter() - self.begin


def by_trainer() -> float:
    train, watch = data(), Stopwatch()
    trainer = evenly.Trainer(
        model=network(),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=BATCH,
        callbacks=[watch],
    )
    trainer.fit(train, epochs=EPOCHS)
    return watch.seconds / trainer.step


def by_hand(loading: str) -> float:
    world = evenly.current_world()
    train = data()
    model: nn.Module = network()
    if world.size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: Any = DistributedSampler(train, world.size, world.rank, shuffle=True)
    each = BATCH // world.size
    loader = DataLoader(train, batch_size=each, sampler=sampler)
    x_all, y_all = train.tensors
    steps, begin = 0, time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches: Any = loader
        if loading == "tensors":
            order = torch.tensor(list(sampler)).split(each)
            batches = ((x_all[chosen], y_all[chosen]) for chosen in order)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    seconds = time.perf_counter() - begin
    del model, optimizer
    return seconds / steps


def measure() -> dict[str, list[float]]:
    """Every way in turn, several times; the bar is drawn as on a terminal, into nothing."""
    os.environ["FORCE_COLOR"] = "1"
    nowhere, before = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(nowhere, 2)
    ways = {
        "Trainer": by_trainer,
        "by hand, DataLoader": lambda: by_hand("loader"),
        "by hand, tensors": lambda: by_hand("tensors"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        with evenly.open_world(device="cpu"):
            for way in ways.values():
                way()
            for _ in range(RUNS):
                for name, way in ways.items():
                    times[name].append(way())
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
    return times


def main() -> None:
    head = f"{'microseconds a step':28}{'processes':>12}{'median':>10}{'quartiles':>16}"
    print(f"{head}{'Trainer is':>14}")
    with Crew(2, threads=1) as crew:
        for size in (1, 2):
            times = crew.run(measure, size=size, timeout=600)[0]
            ours = statistics.median(times["Trainer"])
            for name, found in times.items():
                median = statistics.median(found)
                low, _, high = (q * 1e6 for q in statistics.quantiles(found, n=4))
                cells = f"{median * 1e6:>10.0f}{f'{low:.0f} to {high:.0f}':>16}"
                print(f"{name:28}{size:>12}{cells}{ours / median:>13.2f}x")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
