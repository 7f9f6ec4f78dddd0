"""The live page in a real browser: it grows, it answers, it shows who is dead, and it is quiet."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evenly.record import FILE, Writer
from evenly.watchdog.table import read_ranks

pytest.importorskip("vl_convert", reason="vl-convert-python is missing: pip install '.[watch]'")
pytest.importorskip("starlette", reason="starlette is missing: pip install '.[watch]'")
PROGRAM = str(Path(__file__).with_name("watched.py"))
EVIL = "<img src=x onerror=window.hacked=1>"


@dataclass
class Watched:
    """A page that follows a folder, and everything it said or asked for."""

    page: Any
    address: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def updated(self, times: int = 2) -> None:
        """Wait until what is in the folder now is on the page."""
        count = int(self.page.locator("body").get_attribute("data-updates") or 0)
        self.page.wait_for_function(
            f"Number(document.body.dataset.updates ?? 0) >= {count + times}", timeout=20_000
        )

    def steps(self, figure: str) -> list[float]:
        """What stands at the axis of the steps."""
        self.page.locator(f"#{figure}").scroll_into_view_if_needed()
        self.page.wait_for_timeout(300)  # charts out of sight are left alone
        found: list[str] = self.page.evaluate(
            """(name) => [...document.querySelectorAll(`#${name} svg .role-axis`)]
                 .filter((axis) => axis.textContent.includes("step"))
                 .flatMap((axis) => [...axis.querySelectorAll(".role-axis-label text")])
                 .map((label) => label.textContent)""",
            figure,
        )
        return sorted(float(text.replace(",", "")) for text in found)

    def quiet(self) -> None:
        """It said nothing, and asked its own server alone."""
        assert self.said == []
        assert {url for url in self.asked if not url.startswith("data:")} == {
            f"{self.address}{path}" for path in ("", "page.css", "page.js", "charts.js", "events")
        }


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[[Path], Watched]]:
    ends: list[Callable[[], Any]] = []

    def opened(folder: Path) -> Watched:
        command = [sys.executable, "-m", "evenly", "watch", str(folder), "--no-open", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ends.extend([server.communicate, server.terminate])  # in the order from the last
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].split()[0]
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        ends.append(context.close)
        found = Watched(context.new_page(), address)
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(address)
        found.page.wait_for_selector("body[data-updates]", timeout=20_000)
        return found

    yield opened
    for end in reversed(ends):
        end()


def begin(folder: Path, step: int, processes: int) -> Writer:
    writer = Writer(folder / FILE)
    writer.open(processes=processes, host="elsewhere", pid=1)
    writer.add(
        "start",
        step=step,
        epoch=0,
        position=step,
        total_steps=1000,
        processes=processes,
        stages=["validation"],
        plan=None,
    )
    return writer


def write_steps(writer: Writer, first: int, last: int) -> None:
    numbers = list(range(first, last + 1))
    values = {
        "loss": [numbers, [2 / math.sqrt(step) for step in numbers]],
        "validation/loss": [[last], [1.5 / math.sqrt(last)]],
        "samples_per_second": [numbers, [1000.0 + step for step in numbers]],
        f"validation/{EVIL}": [numbers[-2:], [0.5, 0.25]],
    }
    writer.add("values", values=values)


def write_ranks(folder: Path, **second: Any) -> None:
    common = {"state": "moves", "phase": "step", "doing": "", "waits_for": [], "step": 60}
    common |= {"idle": 0.1, "last_beat": time.time(), "host": socket.gethostname()}
    common |= {"step_seconds": 0.2, "own_seconds": 0.1, "data_seconds": 0.05, "memory": 5 * 10**8}
    common |= {"pid": os.getpid(), "stack": ""}
    rows = [{**common, "rank": 0}, {**common, "rank": 1, **second}]
    table = {"version": 1, "time": time.time(), "report": "", "failure": None, "ranks": rows}
    (folder / "ranks.json").write_text(json.dumps(table))


def hovered(page: Any, share: float) -> str:
    """What the pointer shows at a place of the first chart."""
    box = page.locator("#curve-0-chart").bounding_box()
    for part in (share - 0.02, share):
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * 0.5)
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for(timeout=5000)
    found: str = tip.inner_text()
    return found


def test_the_page_waits_then_grows_with_the_run_and_keeps_zoom_and_pointer(
    watch: Callable[[Path], Watched], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    watched = watch(run)
    page = watched.page
    assert page.inner_text("#state") == "waiting"
    assert f"There is no record in {run} yet." in page.inner_text("#message")

    writer = begin(run, 0, 2)
    write_steps(writer, 1, 30)
    write_steps(writer, 31, 60)
    write_ranks(run)
    page.wait_for_selector("#rank-0[data-tone=good]", timeout=20_000)
    page.wait_for_selector("#curve-0-chart[data-drawn=yes]", timeout=20_000)
    watched.updated()
    assert page.inner_text("#state") == "running"
    assert "60 of 1,000" in page.inner_text("#facts")
    assert watched.steps("curve-0")[-1] in range(50, 61)
    page.evaluate("window.first = document.querySelector('#curve-0 svg')")

    # Pointing, and more steps under the pointer.
    words = hovered(page, 0.5)
    step = int(re.search(r"step\s+(\d+)", words)[1])  # type: ignore[index]
    assert f"{2 / math.sqrt(step):.6g}" in words
    write_steps(writer, 61, 100)
    write_ranks(run)
    watched.updated()
    assert watched.steps("curve-0")[-1] in range(90, 102)
    page.wait_for_timeout(300)
    assert page.locator("#vg-tooltip-element.visible").count() == 1, "the pointer still shows"
    assert page.evaluate("window.first === document.querySelector('#curve-0 svg')"), "in place"
    assert int(re.search(r"step\s+(\d+)", hovered(page, 0.95))[1]) > 80  # type: ignore[index]
    drawn = page.evaluate(
        """() => [...document.querySelectorAll("#curve-0 svg .mark-line path")]
             .map((path) => (path.getAttribute("d") ?? "").split("L").length)"""
    )
    assert max(drawn) == 100

    # A stuck rank: red, with words and its stack, told to those who listen.
    write_ranks(run, state="stuck", idle=61.0, stack="  File 'corpus.py', line 88 in __getitem__")
    watched.updated()
    tile = page.locator("#rank-1")
    assert tile.get_attribute("data-tone") == "bad"
    assert tile.locator(".badge").inner_text() == "stuck"
    assert "line 88 in __getitem__" in tile.locator("pre").inner_text()
    assert re.match(r"The run is running\..* Rank 1: stuck\.", page.text_content("#summary"))
    assert page.locator("#summary").get_attribute("aria-live") == "polite"
    assert page.title().startswith("⚠ run: running")

    # Zooming by the keyboard survives an update; a restart is marked.
    page.get_by_role("button", name="Zoom in: loss").first.press("Enter")
    page.wait_for_timeout(300)
    zoomed = watched.steps("throughput")
    assert zoomed[0] > 10
    writer = begin(run, 80, 1)
    write_steps(writer, 81, 140)
    watched.updated()
    assert watched.steps("throughput") == zoomed == watched.steps("curve-0")
    assert "step 80: 2 to 1 processes" in page.inner_text("#curve-0 .legend")
    assert "gone on on 1 process (before: 2)" in page.inner_text("#events")
    page.get_by_role("button", name="Show all steps: loss").press("Enter")
    page.wait_for_timeout(300)
    assert watched.steps("throughput")[0] == 0
    assert watched.steps("curve-0")[-1] in range(120, 142)

    check_access(page)
    page.set_viewport_size({"width": 360, "height": 800})
    page.emulate_media(color_scheme="dark")
    watched.updated(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper)[:3])) < 300
    assert page.evaluate("window.hacked") is None
    watched.quiet()


def check_access(page: Any) -> None:
    """What those need who use the keyboard, or listen."""
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    levels = page.eval_on_selector_all(
        "h1,h2,h3", "all => all.map((one) => Number(one.tagName[1]))"
    )
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.get_by_role("list").filter(has=page.locator("#rank-0")).count() == 1
    for chart in page.locator("[role=img]").all():
        assert len(chart.get_attribute("aria-label")) > 40
    for table in page.locator("main table").all():
        assert table.locator("caption").count() == 1
        assert table.locator("thead th[scope=col]").count() > 1
    names = page.eval_on_selector_all(
        "button", "all => all.map((one) => one.ariaLabel || one.textContent)"
    )
    assert all(names)
    assert len(set(names)) == len(names)
    page.evaluate("document.activeElement.blur()")
    page.reload()
    page.wait_for_selector("body[data-updates]", timeout=20_000)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the run"


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    run = str(tmp_path / "run")
    command = [sys.executable, "-m", "evenly", "run", "-n", "2", PROGRAM, run, "0.02"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        yield process
        process.terminate()
        process.wait(timeout=30)


def red_after(watched: Watched, number: int, pid: int) -> float:
    """Send a signal to rank 1, and see how long its tile takes to turn red."""
    sent = time.monotonic()
    os.kill(pid, number)
    watched.page.wait_for_selector("#rank-1[data-tone=bad]", timeout=15_000)
    return time.monotonic() - sent


def test_a_stopped_rank_and_a_killed_rank_of_a_real_run_turn_red(
    watch: Callable[[Path], Watched], training: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    watched = watch(run)
    page = watched.page
    page.wait_for_selector("#curve-0-chart[data-drawn=yes]", timeout=60_000)
    page.wait_for_selector("#rank-1[data-tone=good]", timeout=30_000)
    for word in ("step", "phase", "step time", "data wait", "memory", "heartbeat"):
        assert word in page.inner_text("#rank-1 dl")
    line = "document.querySelector('#curve-0 svg .mark-line path')"
    length = f"({line}?.getAttribute('d')?.length ?? 0)"
    before = page.evaluate(length)
    page.wait_for_function(f"{length} > {before}", timeout=10_000)
    pid = read_ranks(run)["ranks"][1]["pid"]

    assert red_after(watched, signal.SIGSTOP, pid) < 8
    assert page.inner_text("#rank-1 .badge") == "silent"
    assert "stopped, as by SIGSTOP" in page.inner_text("#rank-1")
    os.kill(pid, signal.SIGCONT)
    page.wait_for_selector("#rank-1[data-tone=good]", timeout=10_000)

    assert red_after(watched, signal.SIGKILL, pid) < 5
    assert page.inner_text("#rank-1 .badge") == "dead"
    page.wait_for_selector("#state:text('failed')", timeout=10_000)
    assert "Rank 1 was killed by SIGKILL" in page.inner_text("#message")
    assert page.text_content("#summary") == "The run has failed. Rank 1: dead."
    assert page.locator("#rank-0").get_attribute("data-tone") == "calm"
    assert training.wait(timeout=20) == 137
    watched.quiet()
