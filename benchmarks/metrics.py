"""What it costs to compute seven metrics over four processes: torchmetrics' own sync, and ours.

Accuracy, F1, precision, recall, confusion matrix, AUROC and calibration error in one collection, as
a user would make it. Each process has updated it with its share of the samples. The three ways
take turns in the same run; the table has the median over the repeats of the slowest rank's time.
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


def seven() -> MetricCollection:
    kinds = (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
        MulticlassConfusionMatrix,
        MulticlassAUROC,
        MulticlassCalibrationError,
    )
    return MetricCollection([kind(CLASSES) for kind in kinds])


def fresh(metrics: MetricCollection) -> MetricCollection:
    for metric in metrics.values(copy_state=False):
        metric._computed = None
    return metrics


def alone(metrics: MetricCollection) -> Any:
    """The arithmetic on a rank's own samples, without any sync."""
    for metric in metrics.values(copy_state=False):
        metric._to_sync = False
    try:
        return metrics.compute()
    finally:
        for metric in metrics.values(copy_state=False):
            metric._to_sync = True


def measure(samples: int) -> tuple[dict[str, list[float]], dict[str, int], float]:
    with evenly.open_world(device="cpu") as world:
        torch.manual_seed(world.rank)
        metrics = seven()
        for _ in range(samples // BATCH // world.size):
            target = torch.randint(CLASSES, (BATCH,))
            scores = torch.randn(BATCH, CLASSES) + 2 * torch.eye(CLASSES)[target]
            metrics.update(scores.softmax(1), target)
        ways: dict[str, Callable[[MetricCollection], Any]] = {
            "no sync": alone,
            "torchmetrics": lambda metrics: metrics.compute(),
            "evenly": compute,
        }
        group: Any = dist.group.WORLD
        times: dict[str, list[float]] = {name: [] for name in ways}
        collectives, values = {}, {}
        for _ in range(REPEATS + 1):
            for name, way in ways.items():
                fresh(metrics)
                evenly.barrier()
                before, start = group._get_sequence_number_for_group(), time.perf_counter()
                values[name] = way(metrics)
                times[name].append(time.perf_counter() - start)
                collectives[name] = group._get_sequence_number_for_group() - before
        apart = max(
            float((values["evenly"][name] - value).abs().max())
            for name, value in values["torchmetrics"].items()
        )
        return times, collectives, apart


def main() -> None:
    print(f"{PROCESSES} processes, {REPEATS} repeats")
    print(
        f"{'samples':>8}{'no sync':>12}{'torchmetrics':>15}{'evenly':>12}{'speedup':>10}"
        f"{'sync alone':>12}{'collectives':>14}{'difference':>12}"
    )
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
            theirs, ours = cost["torchmetrics"], cost["evenly"]
            counts = f"{ranks[0][1]['torchmetrics']} / {ranks[0][1]['evenly']}"
            sync = (theirs - cost["no sync"]) / max(1e-9, ours - cost["no sync"])
            print(
                f"{samples:>8}{1e3 * cost['no sync']:>9.2f} ms{1e3 * theirs:>12.2f} ms"
                f"{1e3 * ours:>9.2f} ms{theirs / ours:>9.1f}x{sync:>11.1f}x{counts:>14}"
                f"{max(apart for _, _, apart in ranks):>12.1e}"
            )


if __name__ == "__main__":
    main()
