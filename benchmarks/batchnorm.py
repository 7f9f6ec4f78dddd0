"""What the split of a batch does to BatchNorm, what SyncBatchNorm makes of it, and its cost.

First: how far the weights and statistics are from those of one process, after three epochs of the
digits. Then: one layer's forward and backward pass on two processes, with and without meetings.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly
from evenly.crew import Crew
from evenly.layers import SyncBatchNorm

COUNTS = (2, 3, 4, 7)
EPOCHS = 3
SHAPES = ((32, 64), (32, 64, 14, 14), (32, 64, 56, 56))


def train(sync: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    net = (SyncBatchNorm.convert(net) if sync else net).to(dtype)
    x, y = evenly.data.digits()[0].tensors
    with evenly.open_world(device="cpu"):
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = evenly.Loader(TensorDataset(x.to(dtype), y), batch_size=100, shuffle=True)
        for epoch in range(EPOCHS):
            for part in loader.epoch(epoch):
                samples, labels = part.data
                part.share(F.cross_entropy(model(samples), labels)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [value for value in net.state_dict().values() if value.is_floating_point()]


def milliseconds(sync: bool, shape: tuple[int, ...], repeats: int = 30) -> float:
    """The median over repeats of a forward and backward pass."""
    with evenly.open_world():
        kinds = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}
        norm: nn.Module = kinds[len(shape)](shape[1])
        norm = SyncBatchNorm.convert(norm) if sync else norm
        x = torch.randn(shape, requires_grad=True)
        times = []
        for _ in range(repeats):
            evenly.barrier()
            start = time.perf_counter()
            norm(x).sum().backward()
            times.append(time.perf_counter() - start)
        return 1e3 * sorted(times)[repeats // 2]


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    with Crew(max(COUNTS), threads=1) as crew:
        print(f"{'':28}" + "".join(f"{f'{n} processes':>14}" for n in COUNTS))
        for dtype in (torch.float64, torch.float32):
            alone = crew.run(train, False, dtype, size=1)[0]
            for sync in (False, True):
                runs = [crew.run(train, sync, dtype, size=n) for n in COUNTS]
                cells = [max(largest_difference(w, alone) for w in weights) for weights in runs]
                kind = "SyncBatchNorm" if sync else "nn.BatchNorm"
                label = f"{kind}, {str(dtype).removeprefix('torch.')}"
                print(f"{label:28}" + "".join(f"{cell:>14.1e}" for cell in cells))
        print()
        print(f"{'one layer, 2 processes':28}{'nn.BatchNorm':>16}{'SyncBatchNorm':>16}")
        for shape in SHAPES:
            cells = [max(crew.run(milliseconds, sync, shape, size=2)) for sync in (False, True)]
            print(f"{shape!s:28}" + "".join(f"{cell:>13.2f} ms" for cell in cells))


if __name__ == "__main__":
    main()
