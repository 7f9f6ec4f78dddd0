"""What a checkpoint costs: how long training stands still, and the memory of going on from one.

The state is a model of one large and many small tensors with AdamW, about 300 MB in all. The
stall is the time of `Trainer.save` on the training thread. Memory is the peak of what the kernel
counts as resident (VmHWM, reset before), beyond what the rank holds when it has been loaded.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.callbacks import Callback
from evenly.crew import Crew

STEPS, EVERY = 12, 3


def trainer(folder: Path, async_save: bool, callbacks: list[Callback]) -> evenly.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 100_000, bias=False),
        nn.Linear(100_000, 180, bias=False),
        *(nn.Linear(180, 180) for _ in range(10)),
        nn.Linear(180, 10),
    )
    return evenly.Trainer(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
        batch_size=16,
        folder=folder,
        save_every=EVERY,
        keep=1,
        async_save=async_save,
        callbacks=callbacks,
        progress=False,
        device="cpu",
    )


def data() -> TensorDataset:
    return TensorDataset(torch.randn(1000, 64), torch.randint(10, (1000,)))


class Spent(Callback):
    """Seconds from one step's end to the next one's start, where there was a save."""

    ranks = "every"

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self._ended = 0.0

    def on_step_start(self, trainer: evenly.Trainer) -> None:
        if trainer.step and trainer.step % EVERY == 0:
            self.stalls.append(time.perf_counter() - self._ended)

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        if trainer.step % EVERY == EVERY - 1:
            time.sleep(3)  # so that the last save is done, as between saves of a real run
        self._ended = time.perf_counter()


def stalls(folder: Path, async_save: bool) -> float:
    spent = Spent()
    with evenly.open_world(device="cpu"):
        trainer(folder, async_save, [spent]).fit(data(), steps=STEPS)
    return statistics.median(spent.stalls)


def memory(field: str) -> float:
    """Megabytes, from what the kernel says about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(field)


def load(folder: Path) -> tuple[float, float, float]:
    """Seconds; the peak beyond what stays; the largest tensor; in megabytes."""
    with evenly.open_world(device="cpu"):
        made = trainer(folder, True, [])
        Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        made.fit(data(), steps=STEPS, resume="auto")
        seconds = time.perf_counter() - begin
        extra = memory("VmHWM") - memory("RssAnon") - memory("RssFile")
        return seconds, extra, max(p.nbytes for p in made.model.parameters()) / 1e6


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="evenly-benchmark-"))
    try:
        print(f"{'processes':>10}{'MB':>8}{'waiting s':>12}{'background s':>14}", end="")
        print(f"{'load s':>9}{'extra MB':>10}{'largest tensor MB':>19}")
        for size in (1, 2, 4):
            with Crew(size, threads=1) as crew:
                sync = max(crew.run(stalls, folder / f"sync-{size}", False, size=size))
                background = max(crew.run(stalls, folder / f"async-{size}", True, size=size))
                loads = crew.run(load, folder / f"async-{size}", size=size)
            (saved,) = (folder / f"async-{size}" / "checkpoints").iterdir()
            total = sum(file.stat().st_size for file in saved.iterdir()) / 1e6
            seconds, extra, largest = (max(values) for values in zip(*loads, strict=True))
            print(f"{size:>10}{total:>8.0f}{sync:>12.2f}{background:>14.3f}", end="")
            print(f"{seconds:>9.2f}{extra:>10.0f}{largest:>19.0f}", flush=True)
            for one in folder.iterdir():
                shutil.rmtree(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
