"""The report, in a real browser: it draws, it answers, it fetches nothing, all can read it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evenly.cli import main
from evenly.errors import SettingError
from evenly.plan import Plan
from evenly.record import FILE, Writer, read_run
from evenly.record.coverage import planned, written
from evenly.report import page as made_page
from evenly.report import write_report

pytest.importorskip("vl_convert", reason="vl-convert-python is missing: pip install '.[report]'")

STEPS, EPOCH = 120, 40
PLAN = Plan(length=320, batch_size=8, shuffle=True, seed=1)


def write_run(folder: Path, shift: float = 0.0, *, wrong: bool = False) -> Path:
    """A run of 3 epochs, on 4 processes, killed at step 50 and gone on from 40 with 2."""
    writer = _launched(folder, 4, 0)
    _steps(writer, 1, 50, shift)
    _epoch(writer, 0, 4, wrong=wrong)
    writer = _launched(folder, 2, 40)
    _steps(writer, 41, STEPS, shift)
    for epoch in (1, 2):
        _epoch(writer, epoch, 2)
    matrix = [[8, 1, 0], [0, 9, 0], [2, 0, 4]]
    writer.add(
        "evaluation", stage="test", step=STEPS, epoch=3, values={"loss": 0.5, "confusion": matrix}
    )
    writer.add("values", values={"test/loss": [[STEPS], [0.5]]})
    writer.add("end", step=STEPS, epoch=3, state="finished")
    return folder


def _launched(folder: Path, processes: int, step: int) -> Writer:
    writer = Writer(folder / FILE)
    writer.open(processes=processes, host="elsewhere", pid=1, torch="2.13")
    writer.add("settings", batch_size=8, seed=1, optimizer={"name": "SGD", "lr": 0.1})
    writer.add(
        "start",
        step=step,
        epoch=step // EPOCH,
        position=0,
        total_steps=STEPS,
        processes=processes,
        stages=["validation"],
        plan={
            **{name: getattr(PLAN, name) for name in ("length", "batch_size", "shuffle", "seed")},
            "tail": "keep",
            "permutation": 1,
        },
    )
    return writer


def _steps(writer: Writer, first: int, last: int, shift: float) -> None:
    steps = list(range(first, last + 1))
    series = {
        "loss": [2 / math.sqrt(step) + shift for step in steps],
        "learning_rate": [0.1 / step for step in steps],
        "samples_per_second": [1000.0 + step for step in steps],
        "step_seconds": [0.01] * len(steps),
        "data_wait_seconds": [0.001] * len(steps),
    }
    writer.add("values", values={name: [steps, values] for name, values in series.items()})


def _epoch(writer: Writer, epoch: int, ranks: int, *, wrong: bool = False) -> None:
    step = (epoch + 1) * EPOCH
    numbers = {"train/loss": 1 / (epoch + 1), "validation/loss": 1.1 / (epoch + 1)}
    numbers |= {"validation/accuracy": 0.5 + epoch / 10}
    writer.add("values", values={name: [[step], [value]] for name, value in numbers.items()})
    count, digest = planned(PLAN, epoch)
    writer.add(
        "coverage",
        step=step,
        epoch=epoch,
        samples=count,
        whole=True,
        digest=written(digest + wrong),
    )
    alone = [0.001] * (ranks - 1) + [0.008]
    writer.add(
        "ranks",
        step=step,
        steps=EPOCH,
        alone_seconds=alone,
        alone_longest=alone,
        step_seconds=[0.01] * ranks,
        data_wait_seconds=[0.0005] * ranks,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("runs")
    return [write_run(parent / "one"), write_run(parent / "two", 1e-6)]


@pytest.fixture(scope="module")
def overlay(runs: list[Path]) -> Path:
    return write_report(runs, runs[0].parent / "overlay.html", title="One against two")


@pytest.fixture(scope="module")
def single(runs: list[Path]) -> Path:
    return write_report(runs[:1], runs[0].parent / "single.html")


@dataclass
class Opened:
    """A page that is drawn, and everything it said or asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    contexts = []

    def opened(file: Path, width: int = 1280, scheme: str = "light") -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        shown = Opened(context.new_page())
        shown.page.on("console", lambda message: shown.said.append(message.text))
        shown.page.on("pageerror", lambda error: shown.said.append(str(error)))
        shown.page.on("request", lambda request: shown.asked.append(request.url))
        shown.page.goto(file.as_uri())
        shown.page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
        return shown

    yield opened
    for context in contexts:
        context.close()


def _paths(page: Any, figure: str) -> int:
    """Lines that were really drawn: paths with many points."""
    found: int = page.evaluate(
        """(name) => [...document.querySelectorAll(`#${name} svg .mark-line path`)]
             .filter((path) => (path.getAttribute("d") ?? "").length > 20).length""",
        figure,
    )
    return found


def test_all_charts_are_drawn_quietly_and_nothing_is_fetched(show: Any, overlay: Path) -> None:
    shown = show(overlay)
    names = shown.page.eval_on_selector_all("figure", "all => all.map((one) => one.id)")
    assert {"curve-0", "difference", "rate", "throughput", "wait", "ranks-0", "confusion-1"} <= {
        *names
    }
    for name in names:
        assert shown.page.locator(f"#{name} svg").count() == 1, name
    titles = shown.page.eval_on_selector_all("h3", "all => all.map((one) => one.textContent)")
    each = names[titles.index("loss of each step")]
    assert _paths(shown.page, each) == 2, "a line for each run"
    assert shown.said == []
    assert shown.asked == [overlay.as_uri()]


def test_the_pointer_shows_the_numbers_of_a_step(show: Any, single: Path) -> None:
    shown = show(single)
    chart = shown.page.locator("#curve-0-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    for share in (0.5, 0.6):
        shown.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * 0.5)
    tip = shown.page.locator("#vg-tooltip-element.visible")
    tip.wait_for(timeout=5000)
    words = tip.inner_text()
    found = re.search(r"step\s+(\d+)", words)
    assert found is not None, words
    step = int(found[1])
    assert 40 < step < 100
    assert f"{2 / math.sqrt(step):.6g}" in words
    assert "undefined" not in words
    assert "null" not in words
    assert shown.said == []


def _shown_steps(page: Any, figure: str) -> list[str]:
    """What stands at the axes, in no order: labels that come back come last."""
    labels: list[str] = page.eval_on_selector_all(
        f"#{figure} svg .role-axis-label text", "all => all.map((one) => one.textContent)"
    )
    return sorted(labels)


def test_the_keyboard_zooms_all_charts_together_and_back(show: Any, single: Path) -> None:
    page = show(single).page
    before = _shown_steps(page, "throughput")
    button = page.get_by_role("button", name="Zoom in: loss")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    after = _shown_steps(page, "throughput")
    assert "0" in before
    assert "0" not in after
    page.get_by_role("button", name="Show all steps: loss").press("Enter")
    page.wait_for_timeout(300)
    assert _shown_steps(page, "throughput") == before


def test_restarts_and_resizes_are_marked_on_the_curves(show: Any, single: Path) -> None:
    page = show(single).page
    assert "step 40: 4 to 2 processes" in page.locator("#curve-0 .legend").inner_text()
    rules = page.eval_on_selector_all(
        "#curve-0 svg .mark-rule line", "all => all.map((o) => o.getAttribute('stroke-dasharray'))"
    )
    assert "2,3" in rules
    assert "gone on on 2 processes (before: 4)" in page.locator("#events").inner_text()


def test_those_who_do_not_see_the_charts_get_words_and_tables(show: Any, overlay: Path) -> None:
    page = show(overlay).page
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    levels = page.eval_on_selector_all(
        "h1,h2,h3", "all => all.map((one) => Number(one.tagName[1]))"
    )
    assert all(after - before <= 1 for before, after in pairwise(levels))
    charts = page.locator("[role=img]")
    assert charts.count() == page.locator("figure").count()
    for label in charts.evaluate_all("all => all.map((one) => one.ariaLabel)"):
        assert len(label) > 40, label
    for table in page.locator("table").all():
        assert table.locator("caption").count() == 1
        assert table.locator("thead th[scope=col]").count() > 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the runs"
    names = page.eval_on_selector_all(
        "button", "all => all.map((one) => one.ariaLabel || one.textContent)"
    )
    assert all(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_follows_the_theme(show: Any, overlay: Path, scheme: str) -> None:
    page = show(overlay, 360, scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    def dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return bool(sum(map(int, re.findall(r"\d+", colour)[:3])) < 300)

    for expected in (scheme == "dark", scheme == "light"):
        assert dark() == expected
        page.emulate_media(media="print")
        assert not dark(), "paper is white"
        page.emulate_media(media="screen")
        page.locator("#theme").click()


def test_the_words_and_numbers_of_the_page(runs: list[Path], overlay: Path) -> None:
    text = overlay.read_text()
    assert "<h1>One against two</h1>" in text
    assert "6 of 6 epochs used exactly the samples of their plan, each once." in text
    assert "two: at most 1.0e-06" in text
    assert "Rank 1 held up the others most" in text or "Rank 3 held up the others most" in text
    assert len(text) < 2_000_000
    assert "http://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_a_wrong_digest_is_shouted(tmp_path: Path) -> None:
    text = made_page([read_run(write_run(tmp_path / "run", wrong=True))])
    assert "1 of 3 epochs did NOT use the samples of their plan." in text
    assert "DIFFERENT" in text


def test_a_record_cannot_put_code_into_the_page(show: Any, tmp_path: Path) -> None:
    evil = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
    folder = write_run(tmp_path / "<b>run</b>")
    writer = Writer(folder / FILE)
    writer.add("settings", note=evil, **{evil: evil})
    writer.add("values", values={f"validation/{evil}": [[40, 80], [1.0, 2.0]]})
    shown = show(write_report([folder], tmp_path / "page.html", title=evil))
    assert shown.page.evaluate("window.hacked") is None
    assert shown.said == []
    assert evil in shown.page.locator("#settings").inner_text()


def test_an_odd_run_still_has_a_page(show: Any, tmp_path: Path) -> None:
    """No step made, and only nan."""
    bare = tmp_path / "bare"
    Writer(bare / FILE).open(processes=1)
    odd = tmp_path / "odd"
    writer = _launched(odd, 1, 0)
    writer.add("values", values={"loss": [[1, 2, 3], [math.nan] * 3]})
    writer.add("values", values={"x": [[1, 2], [math.inf, 1.0]]})
    shown = show(write_report([bare, odd], tmp_path / "page.html"))
    assert shown.said == []
    assert "No epoch was finished" in shown.page.locator("#coverage").inner_text()


def test_a_missing_package_is_told_with_the_command(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from evenly.report import bundle

    bundle.javascript.cache_clear()
    monkeypatch.setattr(bundle, "installed", lambda: False)
    with pytest.raises(SettingError, match="pip install vl-convert-python"):
        made_page([read_run(runs[0])])


def test_the_commands_list_runs_and_write_the_page(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    listed = runner.invoke(main, ["runs", str(runs[0].parent), "-m", "validation/accuracy"])
    assert listed.exit_code == 0, listed.output
    for word in ("one", "two", "finished", "4→2", "120", "0.7", "validation/accuracy"):
        assert word in listed.output
    unknown = runner.invoke(main, ["runs", str(runs[0].parent), "-m", "speed"])
    assert unknown.exit_code == 2
    assert "no run has 'speed'" in unknown.output
    nothing = runner.invoke(main, ["runs", str(tmp_path)])
    assert nothing.exit_code == 1
    assert "no run record below" in nothing.output
    wrote = runner.invoke(main, ["report", *map(str, runs), "-o", str(tmp_path / "all.html")])
    assert wrote.exit_code == 0, wrote.output
    assert f"wrote {tmp_path / 'all.html'}" in wrote.output
    refused = runner.invoke(main, ["report", str(tmp_path)])
    assert refused.exit_code == 1
    assert "holds no run record" in refused.output


def test_listing_runs_needs_no_torch(runs: list[Path]) -> None:
    program = (
        "import sys; from evenly.cli import main\n"
        f"main(['runs', {str(runs[0].parent)!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"state": "finished"' in done.stdout
