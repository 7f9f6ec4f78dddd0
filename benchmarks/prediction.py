"""What predictions cost in time and memory: a million rows of 128 float32, on 4 processes.

Memory is the peak of what the kernel counts as resident (VmHWM, reset before), beyond what the
rank held with its model, data and world before predicting; the largest of the ranks.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.crew import Crew
from evenly.prediction import predict
from evenly.prediction.manifest import read_predictions

LENGTH, WIDTH, BATCH, SIZE = 1_000_000, 128, 4096, 4


def measured(out: Path | None, settings: dict[str, Any]) -> tuple[float, float]:
    """Seconds, and the growth of this rank's peak memory in megabytes."""
    with evenly.open_world(device="cpu"):
        torch.manual_seed(0)
        model = nn.Linear(1, WIDTH)
        x = torch.arange(LENGTH, dtype=torch.float32)
        loader = evenly.Loader(TensorDataset(x[:, None]), batch_size=BATCH)
        with torch.no_grad():
            model(x[: BATCH // SIZE, None])
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmHWM")
        evenly.barrier()
        begin = time.perf_counter()
        result = predict(
            loader.epoch(0), lambda part: model(part.data[0]), length=LENGTH, out=out, **settings
        )
        seconds = time.perf_counter() - begin
        after = memory("VmHWM")
        if isinstance(result, torch.Tensor):
            assert result.shape == (LENGTH, WIDTH)
        return seconds, (after - before) / 1e6


def memory(field: str) -> int:
    """Bytes, from what the kernel says about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def check(out: Path) -> None:
    """Some rows of the files, against one process's."""
    torch.manual_seed(0)
    model = nn.Linear(1, WIDTH)
    found = read_predictions(out)
    places = torch.from_numpy(np.random.default_rng(0).integers(0, LENGTH, 2000))
    with torch.no_grad():
        expected = model(places[:, None].float())
    torch.testing.assert_close(found[places], expected)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="evenly-benchmark-"))
    size = LENGTH * WIDTH * 4 / 1e6
    print(f"{size:.0f} MB of predictions, {SIZE} processes{'seconds':>16}{'peak MB':>12}")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("to disk, format='npy'", "npy", {"format": "npy"}),
        ("to disk, format='safetensors'", "safetensors", {"format": "safetensors"}),
        ("in memory, keep='first'", "", {"keep": "first"}),
        ("in memory, keep='all'", "", {"keep": "all"}),
    ]
    try:
        with Crew(SIZE, threads=1) as crew:
            for name, place, settings in cases:
                out = folder / place if place else None
                found = crew.run(measured, out, settings, size=SIZE)
                seconds, peak = (max(values) for values in zip(*found, strict=True))
                print(f"{name:42}{seconds:>12.1f}{peak:>12.0f}")
                if out is not None:
                    check(out)
                    shutil.rmtree(out)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
