"""How long a report of 1,000,000 logged points takes, and how large it is.

Written as the Recorder does, half a second of steps to a line: one run with the loss of a million
steps; the same with slow steps, each a line of its own; and four runs with a quarter of a million
each. Reading, downsampling, checking the samples
of each epoch against the plan, and making the page.
"""

import math
import sys
import tempfile
import time
from pathlib import Path

from evenly.plan import Plan
from evenly.record import FILE, Writer
from evenly.record.coverage import planned, written
from evenly.report import write_report

POINTS, EPOCH = 1_000_000, 10_000


def write_run(folder: Path, steps: int, each: int) -> None:
    plan = Plan(length=EPOCH * 64, batch_size=64, shuffle=True)
    writer = Writer(folder / FILE)
    writer.open(processes=4, host="elsewhere", pid=0)
    fields = {"length": plan.length, "batch_size": 64, "shuffle": True, "seed": 0, "tail": "keep"}
    writer.add(
        "start",
        step=0,
        epoch=0,
        position=0,
        total_steps=steps,
        processes=4,
        stages=["validation"],
        plan={**fields, "permutation": 1},
    )
    writer.start()
    for begin in range(1, steps + 1, each):
        line = list(range(begin, min(begin + each, steps + 1)))
        losses = [2 / math.sqrt(step) + 0.1 * math.sin(step * step) for step in line]
        writer.add("values", values={"loss": [line, losses]})
    for epoch in range(steps // EPOCH):
        step = (epoch + 1) * EPOCH
        writer.add("values", values={"validation/loss": [[step], [1 / (epoch + 1)]]})
        count, digest = planned(plan, epoch)
        writer.add("coverage", step=step, epoch=epoch, samples=count, digest=written(digest))
        seconds = [0.01, 0.01, 0.011, 0.01]
        names = ("step_seconds", "alone_seconds", "alone_longest", "data_wait_seconds")
        writer.add("ranks", step=step, steps=EPOCH, **dict.fromkeys(names, seconds))
    writer.add("end", step=steps, epoch=steps // EPOCH, state="finished")
    writer.stop()


def main() -> None:
    assert "torch" not in sys.modules
    for count, each in ((1, 1500), (1, 1), (4, 1500)):
        with tempfile.TemporaryDirectory() as parent:
            folders = [Path(parent) / f"run {number + 1}" for number in range(count)]
            for folder in folders:
                write_run(folder, POINTS // count, each)
            size = sum((folder / FILE).stat().st_size for folder in folders)
            begin = time.perf_counter()
            page = write_report(folders, Path(parent) / "report.html")
            seconds = time.perf_counter() - begin
            print(
                f"{count} x {POINTS // count:,} points, {each:,} a line, {size / 1e6:.0f} MB: "
                f"report in {seconds:.1f} s, {page.stat().st_size / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
