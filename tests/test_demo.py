"""`evenly demo` shows what it claims."""

import os
import subprocess
import sys
from pathlib import Path

from evenly import demo
from evenly.report.bundle import installed


def test_the_demo_uses_every_sample_once_and_agrees_at_every_count() -> None:
    one, three = demo.rows((1, 3))
    for row in (one, three):
        assert (row.evenly.seen, row.evenly.duplicates, row.evenly.missing) == (1437, 0, 0)
    assert one.evenly.accuracy == three.evenly.accuracy
    assert demo.largest_difference(one.evenly, three.evenly) < 1e-6
    assert demo.largest_difference(one.usual, three.usual) > 1e-4


def test_the_command_prints_the_table_and_one_line_and_writes_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "evenly", "demo", "-n", "2,4", "-o", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    assert "Evenly used every sample exactly once at each count" in done.stdout
    assert "1,440" in done.stdout, "DistributedSampler repeats samples at 4 processes"
    if not installed():
        assert "pip install vl-convert-python" in done.stdout
        return
    assert str(folder / "report.html") in done.stdout
    page = (folder / "report.html").read_text()
    assert "Digits on 2 and 4 processes" in page
    assert "10 of 10 epochs used exactly the samples of their plan, each once." in page


def test_counts_that_are_no_counts_are_refused() -> None:
    for counts in ("0", "two"):
        command = [sys.executable, "-m", "evenly", "demo", "-n", counts]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "is not a list such as 1,2,4" in done.stderr
