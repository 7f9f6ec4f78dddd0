"""`evenly demo` shows what it claims."""

import os
import subprocess
import sys

from evenly import demo


def test_the_demo_uses_every_sample_once_and_agrees_at_every_count() -> None:
    one, three = demo.rows((1, 3))
    for row in (one, three):
        assert (row.evenly.seen, row.evenly.duplicates, row.evenly.missing) == (1437, 0, 0)
    assert one.evenly.accuracy == three.evenly.accuracy
    assert demo.largest_difference(one.evenly, three.evenly) < 1e-6
    assert demo.largest_difference(one.usual, three.usual) > 1e-4


def test_the_command_prints_the_table_and_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evenly", "demo", "-n", "2,4"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    assert "Evenly used every sample exactly once at each count" in done.stdout
    assert "1,440" in done.stdout, "DistributedSampler repeats samples at 4 processes"


def test_counts_that_are_no_counts_are_refused() -> None:
    for counts in ("0", "two"):
        command = [sys.executable, "-m", "evenly", "demo", "-n", counts]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "is not a list such as 1,2,4" in done.stderr
