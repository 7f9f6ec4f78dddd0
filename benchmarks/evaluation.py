"""How fast evaluation is, beside gathering predictions and targets of every batch on all ranks.

The second is what `gather_for_metrics` and hand-written loops do: each rank then updates metrics
with everything. 36,000 samples of the digits in steps of 256 at 4 processes, accuracy and F1;
whole evaluations, interleaved, medians of 7. Both give the same values.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import evenly
from evenly.crew import Crew

PROCESSES, BATCH, RUNS, TIMES = 4, 256, 7, 100


def data() -> TensorDataset:
    x, y = evenly.data.digits()[1].tensors
    return TensorDataset(x.repeat(TIMES, 1), y.repeat(TIMES))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def collection() -> MetricCollection:
    # Their own sync is left out: after gathering, every rank has seen everything.
    own: dict[str, Any] = {"sync_on_compute": False}
    return MetricCollection([MulticlassAccuracy(10, **own), MulticlassF1Score(10, **own)])


def gathering(dataset: TensorDataset, model: nn.Module, fast: bool) -> dict[str, float]:
    """Every batch on every rank. ``fast`` takes samples straight from the tensors, as ours does."""
    world = evenly.current_world()
    metrics, each = collection(), BATCH // world.size
    sampler: Any = DistributedSampler(dataset, world.size, world.rank, shuffle=False)
    batches: Any = DataLoader(dataset, batch_size=each, sampler=sampler)
    if fast:
        x_all, y_all = dataset.tensors
        chosen = torch.tensor(list(sampler)).split(each)
        batches = ((x_all[rows], y_all[rows]) for rows in chosen)
    seen, total = 0, torch.zeros(())
    with torch.no_grad():
        for x, y in batches:
            scores = model(x)
            both = torch.cat([scores, y[:, None].float()], dim=1)
            gathered = [torch.empty_like(both) for _ in range(world.size)]
            dist.all_gather(gathered, both)
            # Samples are dealt out to the ranks in turn; those beyond the end are repeats.
            joined = torch.stack(gathered, 1).flatten(0, 1)[: len(dataset) - seen]
            seen += len(joined)
            scores, y = joined[:, :-1], joined[:, -1].long()
            metrics.update(scores, y)
            total += F.cross_entropy(scores, y, reduction="sum")
    values = {name: float(value) for name, value in metrics.compute().items()}
    return {"loss": float(total) / seen, **values}


def measure() -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    dataset, model = data(), network()
    with evenly.open_world(device="cpu"):
        trainer = evenly.Trainer(
            model=model,
            loss=F.cross_entropy,
            metrics={"": MetricCollection([MulticlassAccuracy(10), MulticlassF1Score(10)])},
            batch_size=BATCH,
            progress=False,
        )
        ways: dict[str, Any] = {
            "Evenly": lambda: trainer.test(dataset),
            "gathering, DataLoader": lambda: gathering(dataset, model, False),
            "gathering, tensors": lambda: gathering(dataset, model, True),
        }
        values = [way() for way in ways.values()]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(RUNS):
            for name, way in ways.items():
                evenly.barrier()
                begin = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - begin)
    return times, values


def main() -> None:
    with Crew(PROCESSES, threads=1) as crew:
        times, values = crew.run(measure, size=PROCESSES, timeout=600)[0]
    ours = statistics.median(times["Evenly"])
    print(f"{'':28}{'samples/s':>12}{'Evenly is':>14}")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:28}{TIMES * 360 / median:>12,.0f}{median / ours:>13.2f}x")
    losses = [value["loss"] for value in values]
    print(f"losses: {', '.join(f'{loss:.6f}' for loss in losses)}")


if __name__ == "__main__":
    main()
