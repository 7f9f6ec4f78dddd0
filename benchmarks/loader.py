"""What the loader costs per step, beside torch's DataLoader, in one process without workers.

Medians of 7 interleaved epochs of 40,000 samples in steps of 64.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenly

LENGTH, BATCH = 40_000, 64


class Plain(Dataset[Any]):
    """Reads one sample at a time and draws nothing."""

    def __init__(self) -> None:
        self.x = torch.rand(LENGTH, 64)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index


class Drawing(Plain):
    """Adds noise from torch's global generator, as a transform would."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + torch.rand(()), index


def by_torch(dataset: Any) -> Callable[[int], Iterator[Any]]:
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return lambda _: iter(loader)


def by_evenly(dataset: Any) -> Callable[[int], Iterator[Any]]:
    loader = evenly.Loader(dataset, batch_size=BATCH, shuffle=True, workers=0)
    return loader.epoch


def microseconds(epoch: Iterator[Any]) -> float:
    begin, steps = time.perf_counter(), 0
    for _ in epoch:
        steps += 1
    return (time.perf_counter() - begin) / steps * 1e6


def main() -> None:
    print(f"{'microseconds a step':36}{'DataLoader':>12}{'Evenly':>12}")
    memory = TensorDataset(torch.rand(LENGTH, 64), torch.arange(LENGTH))
    cases = [("tensors in memory", memory), ("sample by sample", Plain()), ("drawing", Drawing())]
    with evenly.open_world(device="cpu"):
        for name, dataset in cases:
            ways = by_torch(dataset), by_evenly(dataset)
            times: list[list[float]] = [[], []]
            for epoch in range(7):
                for way, found in zip(ways, times, strict=True):
                    found.append(microseconds(way(epoch)))
            torchs, ours = (statistics.median(found) for found in times)
            print(f"{name:36}{torchs:>12.0f}{ours:>12.0f}")


if __name__ == "__main__":
    main()
