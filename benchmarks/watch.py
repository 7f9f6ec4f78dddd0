"""What an update of the live page costs the server when a run has 1,000,000 logged points.

Written as the Recorder does, half a second of steps to a line. For a run of some points and for
one of a million: the first load (reading, and the event that a new viewer gets), then updates while
half a second of steps comes at a time, their time and their size. The same with 20 numbers logged
at every step, 50,000 steps. Where there is a Chromium, what an update costs the page.
"""

import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evenly.record import FILE, Writer
from evenly.watch.hub import Hub

EACH, UPDATES = 100, 100
BROWSER = "/usr/bin/chromium"


def write_steps(writer: Writer, begin: int, end: int, names: int) -> None:
    steps = list(range(begin, end))
    values = [2 / math.sqrt(step) + 0.1 * math.sin(step * step) for step in steps]
    found = {"loss": [steps, values]}
    for number in range(1, names):
        found[f"number {number}"] = [steps, [value * number for value in values]]
    found["samples_per_second"] = [steps[-1:], [1000.0]]
    found["step_seconds"] = [steps[-1:], [0.005]]
    found["data_wait_seconds"] = [steps[-1:], [0.001]]
    writer.add("values", values=found)


def write_run(folder: Path, steps: int, names: int) -> Writer:
    writer = Writer(folder / FILE)
    writer.open(processes=4, host="elsewhere", pid=0)
    writer.add("start", step=0, epoch=0, position=0, total_steps=2 * steps, processes=4, stages=[])
    writer.start()
    for begin in range(1, steps + 1, EACH):
        write_steps(writer, begin, begin + EACH, names)
    writer.stop()
    return writer


def measure(steps: int, names: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        writer = write_run(Path(parent) / "run", steps, names)
        size = writer.path.stat().st_size
        hub = Hub(writer.path.parent)
        began, looks = time.perf_counter(), 0
        while hub.update() == b"" or hub.follower.share < 1:
            looks += 1
        read = time.perf_counter() - began
        began = time.perf_counter()
        whole = len(hub.whole())
        made = time.perf_counter() - began
        seconds, sizes = [], []
        for number in range(UPDATES):
            begin = steps + 1 + number * EACH
            write_steps(writer, begin, begin + EACH, names)
            sizes.append(len(hub.update()))
            seconds.append(hub.seconds)
        assert hub.follower.run is not None
        points = sum(map(len, hub.follower.run.series.values()))
        print(
            f"{points:9,} points, {size / 1e6:3.0f} MB: read in {read:.2f} s ({looks + 1} looks), "
            f"first event {whole / 1e3:,.0f} kB in {1e3 * made:.0f} ms; an update "
            f"{1e3 * statistics.median(seconds):.0f} ms (at most {1e3 * max(seconds):.0f}), "
            f"{statistics.median(sizes) / 1e3:.1f} kB (at most {max(sizes) / 1e3:.0f})"
        )


def measure_page(steps: int, names: int) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as parent, sync_playwright() as playwright:
        writer = write_run(Path(parent) / "run", steps, names)
        command = [sys.executable, "-m", "evenly", "watch", str(writer.path.parent), "--no-open"]
        server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].split()[0]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(address)
        page.wait_for_selector("#throughput-chart[data-drawn=yes]", timeout=60_000)
        page.wait_for_selector(f"#facts:has-text('{steps:,} of')", timeout=60_000)
        loaded, took = time.perf_counter() - began, []
        for number in range(10):
            begin = steps + 1 + number * EACH
            write_steps(writer, begin, begin + EACH, names)
            page.wait_for_selector(f"#facts:has-text('{begin + EACH - 1:,} of')", timeout=60_000)
            page.wait_for_timeout(300)
            took.append(float(page.get_attribute("body", "data-took") or 0))
        browser.close()
        server.terminate()
        server.communicate()
    print(
        f"in Chromium, {steps:,} steps of {names} numbers: all there after {loaded:.1f} s; an "
        f"update {statistics.median(took):.0f} ms (at most {max(took):.0f})"
    )


def main() -> None:
    assert "torch" not in sys.modules
    for steps, names in ((10_000, 1), (1_000_000, 1), (50_000, 20)):
        measure(steps, names)
    assert "torch" not in sys.modules
    if Path(BROWSER).exists():
        for steps, names in ((1_000_000, 1), (50_000, 20)):
            measure_page(steps, names)


if __name__ == "__main__":
    main()
