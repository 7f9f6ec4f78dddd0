"""The demonstration: the digits on 1 to 4 processes, by Evenly and by the usual recipe.

Both train the same network from the same weights. The usual recipe is torch's DistributedSampler
with DistributedDataParallel, the global batch divided by the process count, and metrics added up
over the ranks, as PyTorch's own tutorials show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenly
from evenly.crew import Crew

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


def rows(counts: tuple[int, ...]) -> Iterator[Row]:
    """Train at each process count, one after the other."""
    with Crew(max(counts), threads=1) as crew:
        for n in counts:
            ours, usual = (
                crew.run(program, size=n, timeout=300)[0] for program in (train_evenly, train_usual)
            )
            yield Row(processes=n, evenly=ours, usual=usual)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """The largest difference of any weight."""
    pairs = zip(one.weights, other.weights, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def train_evenly() -> Outcome:
    """With the parts of Evenly; the same text runs on any number of processes."""
    train, test = evenly.data.digits()
    with evenly.open_world(device="cpu"):
        net = _network()
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = evenly.Loader(train, batch_size=BATCH, shuffle=True, seed=0)
        for epoch in range(EPOCHS):
            total, used = torch.zeros(()), []
            for part in loader.epoch(epoch):
                x, y = part.data
                loss = F.cross_entropy(model(x), y)
                part.share(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                used.append(part.indices)
                if part.weight:
                    total += loss.detach() * part.weight
        right = torch.zeros(())
        for part in evenly.Loader(test, batch_size=BATCH).epoch(0):
            x, y = part.data
            right += (net(x).argmax(1) == y).sum()
        sums = evenly.all_reduce({"loss": total, "right": right})
        samples = evenly.all_gather(torch.cat(used))
        return _outcome(samples, sums["loss"] / len(train), sums["right"] / len(test), net)


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
