"""What watching costs: marks of the training thread, and steps with the watchdog and without.

Steps of a small model on 2 processes, in turn with signs of life once a second and without: the
median ratio over the pairs, of time and of the processes' own computing time, which a busy machine
disturbs less. "marks" is what the training thread does for it at each step.
"""

import argparse
import statistics
import time
import timeit

import torch
import torch.nn.functional as F
from torch import nn

import evenly
from evenly.crew import Crew
from evenly.watchdog.activity import activity
from evenly.world import World


def per_step() -> float:
    """Seconds of the marks that one step sets: where it is, waiting for data, and after it."""

    def marks() -> None:
        activity.at(0, 1, 2)
        before = activity.enter("data", activity.phase)
        activity.back(before)
        activity.made += 1

    return min(timeit.repeat(marks, number=100_000, repeat=7)) / 100_000


def seconds_a_step(steps: int, watched: bool) -> tuple[float, float]:
    if not watched:
        World.watch = lambda self, place, store=None: None  # type: ignore[method-assign]
    else:
        World.watch = _watch  # type: ignore[method-assign]
    torch.manual_seed(0)
    train = evenly.data.digits()[0]
    trainer = evenly.Trainer(
        model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=64,
        progress=False,
        device="cpu",
    )
    trainer.fit(train, steps=50)
    begin, computing = time.perf_counter(), time.process_time()
    trainer.fit(train, steps=50 + steps)
    taken = (time.perf_counter() - begin) / steps, (time.process_time() - computing) / steps
    trainer.close()
    return taken


_watch = World.watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    print(f"marks: {1e6 * per_step():.2f} microseconds a step")
    with Crew(2, threads=1) as crew:
        runs: dict[bool, list[list[float]]] = {True: [], False: []}
        for _ in range(given.pairs):
            for watched in (False, True):
                ranks = crew.run(seconds_a_step, given.steps, watched, size=2, timeout=600)
                runs[watched].append([max(column) for column in zip(*ranks, strict=True)])
    for number, name in enumerate(("time", "computing time")):
        without = [run[number] for run in runs[False]]
        ratios = [a[number] / b for a, b in zip(runs[True], without, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name}: {1e6 * statistics.median(without):.0f} microseconds a step without, "
            f"{middle:.3f}x with ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
