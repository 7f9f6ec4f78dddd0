"""How far the weights are from those of one process, by Evenly and by the usual recipe.

Three epochs of the digits at each process count and batch size, from the same initial weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenly
from evenly.crew import Crew

COUNTS = (2, 3, 4, 7)
BATCHES = (48, 64, 100)
EPOCHS = 3


def ours(batch_size: int, dtype: torch.dtype) -> list[Tensor]:
    net, train = start(dtype)
    with evenly.open_world(device="cpu"):
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = evenly.Loader(train, batch_size=batch_size, shuffle=True)
        for epoch in range(EPOCHS):
            for part in loader.epoch(epoch):
                x, y = part.data
                part.share(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def usual(batch_size: int, dtype: torch.dtype) -> list[Tensor]:
    net, train = start(dtype)
    with evenly.open_world(device="cpu") as world:
        model: nn.Module = nn.parallel.DistributedDataParallel(net) if world.size > 1 else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler: DistributedSampler[tuple[Tensor, ...]]
        sampler = DistributedSampler(train, world.size, world.rank, shuffle=True)
        loader = DataLoader(train, batch_size=batch_size // world.size, sampler=sampler)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer
    return [parameter.detach().clone() for parameter in net.parameters()]


def start(dtype: torch.dtype) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    x, y = evenly.data.digits()[0].tensors
    return net, TensorDataset(x.to(dtype), y)


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    print(f"{'':28}{'':>6}" + "".join(f"{f'{n} processes':>14}" for n in COUNTS))
    with Crew(max(COUNTS), threads=1) as crew:
        for name, program in (("Evenly", ours), ("DistributedSampler, DDP", usual)):
            for dtype in (torch.float64, torch.float32):
                for batch in BATCHES:
                    alone = crew.run(program, batch, dtype, size=1)[0]
                    cells = [
                        max(
                            largest_difference(weights, alone)
                            for weights in crew.run(program, batch, dtype, size=n)
                        )
                        for n in COUNTS
                    ]
                    label = f"{name}, {str(dtype).removeprefix('torch.')}"
                    print(f"{label:32}{batch:>4}" + "".join(f"{c:>14.1e}" for c in cells))


if __name__ == "__main__":
    main()
