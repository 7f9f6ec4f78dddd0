"""How far the Trainer is from one process: the weights, and the loss of every step.

Three epochs of the digits at 2, 3, 4 and 7 processes, for batches of 48, 64 and 100, with clipping
and without, in micro-batches of 7 and whole: the largest difference over all of these.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly
from evenly.crew import Crew

COUNTS = (2, 3, 4, 7)
CASES = list(itertools.product((48, 64, 100), (None, 0.5), (None, 7)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


Outcome = tuple[list[Tensor], list[float]]


def train_all(optimizer: Any, dtype: torch.dtype) -> list[Outcome]:
    found = []
    x, y = evenly.data.digits()[0].tensors
    with evenly.open_world(device="cpu"):
        for batch_size, clip_norm, microbatch in CASES:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
            trainer = evenly.Trainer(
                model=net,
                loss=F.cross_entropy,
                optimizer=optimizer,
                batch_size=batch_size,
                clip_norm=clip_norm,
                microbatch=microbatch,
                progress=False,
            )
            history = trainer.fit(TensorDataset(x.to(dtype), y), epochs=3)
            weights = [parameter.detach().clone() for parameter in net.parameters()]
            found.append((weights, list(history["loss"].values)))
    return found


def largest(ones: list[Outcome], others: list[Outcome]) -> tuple[float, float]:
    weights = [
        float((a - b).abs().max())
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one[0], other[0], strict=True)
    ]
    losses = [
        abs(a - b)
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one[1], other[1], strict=True)
    ]
    return max(weights), max(losses)


def main() -> None:
    print(f"{'weights / loss of a step':24}" + "".join(f"{f'{n} processes':>20}" for n in COUNTS))
    with Crew(max(COUNTS), threads=1) as crew:
        for optimizer, dtype in itertools.product((sgd, adamw), (torch.float64, torch.float32)):
            alone = crew.run(train_all, optimizer, dtype, size=1, timeout=600)[0]
            cells = []
            for n in COUNTS:
                ranks = crew.run(train_all, optimizer, dtype, size=n, timeout=600)
                gaps = [largest(rank, alone) for rank in ranks]
                weights, losses = (max(column) for column in zip(*gaps, strict=True))
                cells.append(f"{weights:.1e} / {losses:.1e}")
            label = f"{optimizer.__name__}, {str(dtype).removeprefix('torch.')}"
            print(f"{label:24}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
