"""A training loop in plain torch, right as it stands, in which a fault can be planted by name."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import evenly
from evenly.tracing.hook import Trace

SAMPLES, BATCH, STEPS = 200, 64, 8
"""Two epochs of four steps, the last of each of 8 samples."""


class Edge(nn.Module):
    """A network in which one activation can be put on either side of zero, very near to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 32), nn.Linear(32, 10)
        self.side = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        shift = torch.zeros_like(hidden)
        if self.side:
            shift[0, 0] = self.side - hidden[0, 0].detach()
        found: Tensor = self.outer(F.relu(hidden + shift))
        return found


class Chaos(nn.Module):
    """Its training amplifies rounding by about ten in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.sin(30 * self.inner(x)))
        return found


def network(fault: str) -> nn.Module:
    if fault == "grown rounding":
        return Chaos()
    if fault == "an activation tips":
        return Edge()
    layers: list[nn.Module] = [nn.Linear(64, 32), nn.ReLU()]
    if fault == "BatchNorm":
        layers.insert(1, nn.BatchNorm1d(32))
    if fault in ("SyncBatchNorm", "amplified rounding"):
        layers.insert(1, evenly.SyncBatchNorm(32))
    if fault == "random layers":
        layers.append(nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(32, 10))


class Functional(nn.Module):
    """Dropout that no layer shows."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(F.dropout(x, 0.2, self.training))
        return found


def batches(fault: str, rank: int, size: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
    """This rank's samples of each step, and how many the step has."""
    seed = 100 * epoch + (size if fault == "order of samples" else 0)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
    batch = BATCH * size if fault == "batch size" else BATCH
    if fault in ("samples repeated", "samples repeated, not told"):
        data = list(range(SAMPLES - 1))
        sampler: DistributedSampler[int] = DistributedSampler(data, size, rank, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        own = torch.tensor(list(sampler))
        for part in own.split(BATCH // size):
            yield part, len(part) * size
        return
    for whole in order.split(batch):
        if fault == "number of steps" and size > 1 and len(whole) < BATCH:
            return
        if fault == "samples missing" and len(whole) < BATCH:
            length = len(whole) // (2 * size) * 2 - (size > 1)
            yield whole[rank * length : (rank + 1) * length], length * size
            continue
        start, stop = evenly.split(len(whole), rank, size)
        if fault == "mean of means" and len(whole) < BATCH and size > 1:
            start, stop = (0, 6) if rank == 0 else (6, 8)
        yield whole[start:stop], len(whole)


def train(fault: str = "", dtype: torch.dtype = torch.float32) -> None:
    """Train, measure and predict; each fault shows on more than one process."""
    torch.set_num_threads(1)
    x, y = evenly.data.digits()[0].tensors
    x = x.to(dtype)
    with evenly.open_world(device="cpu") as world:
        rank, size = world.rank, world.size
        seed = {"ranks start apart": rank, "initial weights": size}.get(fault, 0)
        torch.manual_seed(seed)
        net = network(fault).to(dtype)
        if fault == "random layers, not shown":
            net = Functional(net)
        by_hand = ("ranks start apart", "gradients not exchanged", "gradients are summed")
        model = net
        if size > 1 and fault not in by_hand:
            model = DistributedDataParallel(net, process_group=world.group)
        rate = 0.1 * (size if fault == "learning rate" else 1)
        rate *= 1 + rank if fault == "settings by rank" else 1
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        if fault == "amplified rounding":  # by the bias before BatchNorm, whose gradient is zero
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-12)
        watch = evenly.trace(model, optimizer)
        torch.manual_seed(rank)
        step = 0
        for epoch in range(2):
            for indices, count in batches(fault, rank, size, epoch):
                step += 1
                inputs, target = x[indices], y[indices]
                if fault == "augmentation":
                    inputs = inputs + 0.1 * torch.randn(inputs.shape, dtype=dtype)
                if isinstance(net, Edge):
                    there = step == 3 and rank == 0
                    net.side = (1e-6 if size == 1 else -1e-6) if there else 0.0
                scores = model(inputs)
                loss = loss_of(fault, scores, target, len(indices) * size / count)
                optimizer.zero_grad()
                loss.backward()
                if fault == "gradients are summed" and size > 1:
                    for parameter in net.parameters():
                        dist.all_reduce(parameter.grad, group=world.group)
                if fault != "samples repeated, not told":
                    watch.samples(indices)
                    watch.loss(F.cross_entropy(scores.detach(), target), len(indices))
                optimizer.step()
                if fault == "ranks part" and step == 3 and rank == 1:
                    with torch.no_grad():
                        next(net.parameters()).add_(1e-3)
                if watch.done:
                    break
        del model, optimizer
        evaluate(fault, watch, net.eval(), rank, size)


def loss_of(fault: str, scores: Tensor, target: Tensor, share: float) -> Tensor:
    """This rank's share of the mean over the step, unless a fault says otherwise."""
    if fault == "loss is a sum":
        return F.cross_entropy(scores, target, reduction="sum") / 64
    if fault in ("mean of means", "gradients are summed"):
        return F.cross_entropy(scores, target)
    if fault == "denominator":
        return F.cross_entropy(scores, target, weight=torch.arange(1.0, 11.0, dtype=scores.dtype))
    return F.cross_entropy(scores, target) * share


@torch.no_grad()
def evaluate(fault: str, watch: Trace, net: nn.Module, rank: int, size: int) -> None:
    x, y = evenly.data.digits()[1].tensors
    x = x.to(next(net.parameters()).dtype)
    cuts = [0, 61, 201, 360] if size == 3 else [0, 100, 360]
    start, stop = (0, 360) if size == 1 else (cuts[rank], cuts[rank + 1])
    own = net(x[start:stop])
    right = (own.argmax(1) == y[start:stop]).double()
    mean = evenly.all_reduce(right.sum()) / 360
    if fault == "metric not synced":
        mean = right.mean()
    if fault == "evaluation":
        mean = evenly.all_reduce(right.mean(), "mean")
    if fault != "metric not synced, of one rank":
        watch.metric("accuracy", mean)
    elif rank == 0:
        watch.metric("accuracy", right.mean())
    every = net(x)
    if fault == "order of predictions":
        every = net(x[rank::size])
    if fault == "predictions repeated":
        every = net(x[: 180 + size] if rank == 0 else x[180:])
    watch.predictions(every)
