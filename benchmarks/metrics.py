"""What it costs to compute seven metrics over four processes: torchmetrics' own sync, and ours.

Accuracy, F1, precision, recall, confusion matrix, AUROC and calibration error in one collection, as
a user would make it. Each process has updated it with its share of the samples. The ways
take turns in the same run; the table has the median over the repeats of the slowest rank's time.
"Sync" is the exchange and the restoring alone, "compute" has the arithmetic too, which is the same
for both: every rank does it on the samples of all ranks.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

import evenly
from evenly.crew import Crew
from evenly.metrics import compute

PROCESSES = 4
SAMPLES = (400, 4_000, 40_000)
BATCH = 50
CLASSES = 10
REPEATS = 15


def seven(collection: type[MetricCollection] = MetricCollection) -> MetricCollection:
    kinds = (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
        MulticlassConfusionMatrix,
        MulticlassAUROC,
        MulticlassCalibrationError,
    )
    return collection([kind(CLASSES) for kind in kinds])


def fresh(metrics: MetricCollection) -> MetricCollection:
    for metric in metrics.values(copy_state=False):
        metric._computed = None
    return metrics


def their_sync(metrics: MetricCollection) -> None:
    for metric in metrics.values(copy_state=False):
        metric.sync()
        metric.unsync()


class Exchanged(MetricCollection):
    """Everything but the arithmetic."""

    def compute(self) -> dict[str, Any]:
        return {}


def measure(samples: int) -> tuple[dict[str, list[float]], dict[str, int], float]:
    with evenly.open_world(device="cpu") as world:
        torch.manual_seed(world.rank)
        metrics, exchanged = seven(), seven(Exchanged)
        for _ in range(samples // BATCH // world.size):
            target = torch.randint(CLASSES, (BATCH,))
            scores = torch.randn(BATCH, CLASSES) + 2 * torch.eye(CLASSES)[target]
            metrics.update(scores.softmax(1), target)
            exchanged.update(scores.softmax(1), target)
        ways: dict[str, Callable[[], Any]] = {
            "their sync": lambda: their_sync(metrics),
            "our sync": lambda: compute(exchanged),
            "theirs": lambda: fresh(metrics).compute(),
            "ours": lambda: compute(metrics),
        }
        group: Any = dist.group.WORLD
        times: dict[str, list[float]] = {name: [] for name in ways}
        collectives, values = {}, {}
        for _ in range(REPEATS + 1):
            for name, way in ways.items():
                evenly.barrier()
                before, start = group._get_sequence_number_for_group(), time.perf_counter()
                values[name] = way()
                times[name].append(time.perf_counter() - start)
                collectives[name] = group._get_sequence_number_for_group() - before
        apart = max(
            float((values["ours"][name] - value).abs().max())
            for name, value in values["theirs"].items()
        )
        return times, collectives, apart


def main() -> None:
    print(f"{PROCESSES} processes, {REPEATS} repeats, ms")
    head = ("samples", "their sync", "our sync", "", "theirs", "ours", "", "collectives", "apart")
    print("".join(f"{word:>13}" for word in head))
    with Crew(PROCESSES, threads=1) as crew:
        for samples in SAMPLES:
            ranks = crew.run(measure, samples, size=PROCESSES, timeout=300)
            cost = {
                name: median(
                    max(times[name][turn] for times, _, _ in ranks)
                    for turn in range(1, REPEATS + 1)  # the first warms up
                )
                for name in ranks[0][0]
            }
            counts = f"{ranks[0][1]['theirs']} / {ranks[0][1]['ours']}"
            row = [str(samples)]
            for theirs, ours in (("their sync", "our sync"), ("theirs", "ours")):
                times = [f"{1e3 * cost[name]:.2f}" for name in (theirs, ours)]
                row += [*times, f"{cost[theirs] / cost[ours]:.1f}x"]
            row += [counts, f"{max(apart for _, _, apart in ranks):.0e}"]
            print("".join(f"{word:>13}" for word in row))


if __name__ == "__main__":
    main()
