"""The demonstration: the digits on 1, 2 and 4 processes, by Evenly and by the usual recipe.

Both train the same network from the same weights. The usual recipe is torch's DistributedSampler
with DistributedDataParallel, the global batch divided by the process count, and metrics added up
over the ranks, as PyTorch's own tutorials show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import evenly
from evenly.callbacks import Callback
from evenly.crew import Crew
from evenly.report import write_report

Sampler = DistributedSampler[tuple[Tensor, ...]]

BATCH = 64
EPOCHS = 5


@dataclass(frozen=True)
class Outcome:
    """What one training gave."""

    seen: int
    """Samples used in the last epoch."""
    duplicates: int
    missing: int
    loss: float
    """Mean training loss of the last epoch."""
    accuracy: float
    """On the 360 test samples."""
    weights: list[Tensor]


@dataclass(frozen=True)
class Row:
    """One process count, both ways."""

    processes: int
    evenly: Outcome
    usual: Outcome


def rows(counts: tuple[int, ...], folder: Path | None = None) -> Iterator[Row]:
    """Train at each process count, one after the other; with a folder, Evenly keeps records."""
    with Crew(max(counts), threads=1) as crew:
        for n in counts:
            place = None if folder is None else run_folder(folder, n)
            ours = crew.run(train_evenly, place, size=n, timeout=300)[0]
            usual = crew.run(train_usual, size=n, timeout=300)[0]
            yield Row(processes=n, evenly=ours, usual=usual)


def run_folder(folder: Path, processes: int) -> Path:
    return folder / f"{processes} process{'es' if processes > 1 else ''}"


def report(counts: tuple[int, ...], folder: Path) -> Path:
    """The runs that `rows` recorded, laid over each other on one page."""
    *most, last = map(str, counts)
    names = f"{', '.join(most)} and {last}" if most else last
    title = f"Digits on {names} process{'es' if counts != (1,) else ''}"
    runs = [run_folder(folder, n) for n in dict.fromkeys(counts)]
    return write_report(runs, folder / "report.html", title=title)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """The largest difference of any weight."""
    pairs = zip(one.weights, other.weights, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class _Seen(Callback):
    """Which samples the running epoch has used, on this rank."""

    ranks = "every"

    def __init__(self) -> None:
        self.indices: list[Tensor] = []

    def on_epoch_start(self, trainer: evenly.Trainer) -> None:
        self.indices = []

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        assert trainer.part is not None
        self.indices.append(trainer.part.indices)


def train_evenly(folder: Path | None = None) -> Outcome:
    """With Evenly; the same text runs on any number of processes."""
    train, test = evenly.data.digits()
    with evenly.open_world(device="cpu"):
        seen = _Seen()
        net = _network()
        trainer = evenly.Trainer(
            model=net,
            loss=F.cross_entropy,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            metrics={
                "accuracy": MulticlassAccuracy(10, average="micro"),
                "confusion": MulticlassConfusionMatrix(10),
            },
            batch_size=BATCH,
            seed=0,
            folder=folder,
            callbacks=[seen],
            progress=False,
        )
        history = trainer.fit(train, validate=test, epochs=EPOCHS)
        right = trainer.test(test)["accuracy"] * len(test)
        samples = evenly.all_gather(torch.cat(seen.indices))
        loss = torch.tensor(history["train/loss"].values[-1])
        return _outcome(samples, loss, torch.tensor(round(right) / len(test)), net)


def train_usual() -> Outcome:
    """With DistributedSampler and DDP, as it is usually written."""
    train, test = evenly.data.digits()
    with evenly.open_world(device="cpu") as world:
        net = _network()
        # DDP at one process needs a group that a world of one does not have.
        model: nn.Module = nn.parallel.DistributedDataParallel(net) if world.size > 1 else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbered = TensorDataset(*train.tensors, torch.arange(len(train)))
        place = (world.size, world.rank)
        sampler: Sampler = DistributedSampler(numbered, *place, shuffle=True, seed=0)
        loader = DataLoader(numbered, batch_size=BATCH // world.size, sampler=sampler)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            losses, used = [], []
            for x, y, indices in loader:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                used.append(indices)
                losses.append(loss.detach())
        del model, optimizer  # before the group: see evenly.replica.Replica
        right, count = torch.zeros(()), torch.zeros(())
        test_sampler: Sampler = DistributedSampler(test, *place, shuffle=False)
        for x, y in DataLoader(test, batch_size=BATCH, sampler=test_sampler):
            right += (net(x).argmax(1) == y).sum()
            count += len(y)
        mean = torch.stack(losses).mean()
        if world.size > 1:
            for value in (right, count, mean):
                dist.all_reduce(value)
            mean /= world.size
        return _outcome(evenly.all_gather(torch.cat(used)), mean, right / count, net)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _outcome(samples: Tensor, loss: Tensor, accuracy: Tensor, net: nn.Module) -> Outcome:
    distinct = len(samples.unique())
    return Outcome(
        seen=len(samples),
        duplicates=len(samples) - distinct,
        missing=len(evenly.data.digits()[0]) - distinct,
        loss=float(loss),
        accuracy=float(accuracy),
        weights=[parameter.detach().clone() for parameter in net.parameters()],
    )
