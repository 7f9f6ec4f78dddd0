"""What a run was can be read from its record: while it runs, after a kill, without torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenly.errors import EvenlyWarning, StorageError
from evenly.plan import Plan
from evenly.record import FILE, Tail, Writer, read_run
from evenly.record.counts import Counts, from_slots, in_slots, together
from evenly.record.coverage import added, digest, plan_of, planned
from evenly.record.sampling import downsampled
from evenly.record.series import Series
from evenly.record.summary import best, find_runs, labels, summary

PLAN = {
    "length": 100,
    "batch_size": 8,
    "shuffle": True,
    "seed": 3,
    "tail": "keep",
    "permutation": 1,
}


def begun(folder: Path, **launch: Any) -> Writer:
    """A record with a launch in it, of a process that is no more unless told otherwise."""
    writer = Writer(folder / FILE)
    writer.open(**{"processes": 2, "host": "elsewhere", "pid": 1, **launch})
    return writer


def start(writer: Writer, step: int = 0, epoch: int = 0, processes: int = 2) -> None:
    fields = {"step": step, "epoch": epoch, "position": 0, "total_steps": 99}
    writer.add("start", **fields, processes=processes, stages=["validation"], plan=PLAN)


def values(writer: Writer, **series: list[float]) -> None:
    named = {n: [list(range(1, len(v) + 1)), v] for n, v in series.items()}
    writer.add("values", values=named)


# One value of each kind that a record may hold.
NUMBERS = st.one_of(st.floats(), st.integers(-(2**53), 2**53))
NAMES = st.text(min_size=1, max_size=8)
ENTRIES = st.lists(st.dictionaries(NAMES, st.lists(NUMBERS, max_size=4), max_size=3), max_size=6)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(entries=ENTRIES, share=st.floats(0, 1))
def test_a_record_cut_at_any_byte_loads_up_to_the_last_whole_line_and_goes_on(
    tmp_path: Path, entries: list[dict[str, list[float]]], share: float
) -> None:
    file = tmp_path / FILE
    file.unlink(missing_ok=True)
    writer = begun(tmp_path)
    start(writer)
    for entry in entries:
        values(writer, **entry)
    whole = file.read_bytes()
    at = round(share * len(whole))
    file.write_bytes(whole[:at])
    kept = whole[:at].count(b"\n")

    found = Tail(file).read()
    assert len(found) == kept
    assert [json.dumps(one) for one in found] == [
        json.dumps(json.loads(line)) for line in whole.splitlines()[:kept]
    ]
    if kept:
        assert len(read_run(tmp_path).starts) == (kept > 1)
    else:
        with pytest.raises(StorageError, match="no line of a launch"):
            read_run(tmp_path)

    again = begun(tmp_path, processes=3)
    start(again, step=0, processes=3)
    run = read_run(tmp_path)
    assert len(file.read_bytes().splitlines()) == kept + 2, "the half line is gone"
    assert (run.damaged, run.processes[-1]) == (0, 3)


def test_every_byte_of_a_record_is_a_place_where_it_may_be_cut(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    start(writer)
    values(writer, loss=[0.25, math.nan])
    writer.add("end", step=2, epoch=0, state="finished")
    whole = (tmp_path / FILE).read_bytes()
    for at in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole[:at])
        assert len(Tail(tmp_path / FILE).read()) == whole[:at].count(b"\n")


WRITE = """
import sys, time
from pathlib import Path
from evenly.record import Writer
step = 0
def more():
    return [{"kind": "values", "time": time.time(), "values": {"loss": [[step], [0.5]]}}]
writer = Writer(Path(sys.argv[1]), more)
writer.open(processes=1)
writer.start()
while True:
    step += 1
    print(step, time.time(), flush=True)
    time.sleep(0.01)
assert "torch" not in sys.modules
"""


def test_a_kill_loses_at_most_the_last_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE, str(tmp_path / FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        began = {int(step): float(t) for step, t in _lines(process, 2.0)}
        killed = time.time()
        process.kill()
    last = read_run(tmp_path).series["loss"].steps[-1]
    assert killed - began[last] < 1.0
    assert last > 50, "it was written while the process ran"


def _lines(process: subprocess.Popen[str], seconds: float) -> list[list[str]]:
    assert process.stdout is not None
    end, found = time.time() + seconds, []
    while time.time() < end:
        found.append(process.stdout.readline().split())
    return found


def test_a_reader_goes_on_where_it_was_and_leaves_half_a_line_for_later(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    file = tmp_path / FILE
    tail = Tail(file)
    assert [entry["kind"] for entry in tail.read()] == ["launch"]
    with file.open("ab") as opened:
        opened.write(b'{"kind":"values","time":1,')
    assert tail.read() == []
    with file.open("ab") as opened:
        opened.write(b'"values":{}}\n')
    assert [entry["kind"] for entry in Tail(file, tail.offset).read()] == ["values"]
    writer.add("end", state="finished")
    assert [entry["kind"] for entry in tail.read(limit=1)] == ["values"]
    assert [entry["kind"] for entry in tail.read()] == ["end"]
    file.write_bytes(b"")
    with pytest.raises(StorageError, match="was replaced"):
        tail.read()


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    start(writer)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\x00\xff not json\n[1]\n{}\n" + b'{"kind":"values","time":1,"values":7}\n')
    values(writer, loss=[1.0, 2.0])
    run = read_run(tmp_path)
    assert run.damaged == 4
    assert list(run.series["loss"].values) == [1.0, 2.0]


def test_numbers_that_json_does_not_have_come_back(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    values(writer, loss=[math.nan, math.inf, -math.inf, 1e-300])
    for line in (tmp_path / FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = list(read_run(tmp_path).series["loss"].values)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 1e-300]


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind":"launch","version":2,"time":1}\n')
    with pytest.raises(StorageError, match="version 2 of its format and this Evenly reads 1"):
        read_run(tmp_path)
    with pytest.raises(StorageError, match="holds no run record"):
        read_run(tmp_path / "nowhere")


def test_a_full_disk_is_told_once_and_what_was_not_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begun(tmp_path)
    file = tmp_path / FILE
    before = file.read_bytes()

    class Full:
        """A file that takes ten bytes of what it is given."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._inner.close()

        def write(self, data: bytes) -> int:
            self._inner.write(data[:10])
            raise OSError(28, "No space left on device")

    opens = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: Full(opens(path, *a, **k)))
    with pytest.warns(EvenlyWarning, match="cannot be written.*No space left"):
        start(writer)
    values(writer, loss=[1.0])  # no second warning, which would be an error here
    monkeypatch.undo()
    assert file.read_bytes() == before, "no half line is left"
    writer.flush()
    assert list(read_run(tmp_path).series["loss"].values) == [1.0]


def test_a_run_that_went_on_has_each_step_once(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    start(writer)
    values(writer, loss=[1.0, 2.0, 3.0, 4.0, 5.0])
    writer.add("coverage", step=4, epoch=0, samples=100, digest="0", whole=True)
    writer.add("evaluation", stage="validation", step=4, epoch=1, values={"loss": 1.0})
    again = begun(tmp_path, processes=4)
    start(again, step=3, epoch=0, processes=4)
    again.add("values", values={"loss": [[4, 5], [4.5, 5.5]]})
    run = read_run(tmp_path)
    assert list(run.series["loss"].steps) == [1, 2, 3, 4, 5]
    assert list(run.series["loss"].values) == [1.0, 2.0, 3.0, 4.5, 5.5]
    assert (run.redone, run.coverage, run.evaluations) == (2, [], [])
    assert run.processes == [2, 4]


def test_the_state_of_a_run(tmp_path: Path) -> None:
    import socket

    def state(name: str, end: dict[str, Any] | None, **launch: Any) -> str:
        writer = begun(tmp_path / name, **launch)
        start(writer)
        if end is not None:
            writer.add("end", step=1, epoch=0, **end)
        return read_run(tmp_path / name).state

    assert state("a", {"state": "finished"}) == "finished"
    assert state("b", {"state": "failed", "error": "ValueError: no"}) == "failed"
    here = {"host": socket.gethostname()}
    assert state("c", None, **here, pid=os.getpid()) == "running"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert state("d", None, **here, pid=gone.pid) == "killed"
    file = tmp_path / "elsewhere" / FILE
    assert state("elsewhere", None) == "running"
    os.utime(file, (0, time.time() - 60))
    assert read_run(file).state == "killed"
    runs, problems = find_runs([tmp_path])
    assert (len(runs), problems) == (5, [])
    assert set(labels(runs)) == {"a", "b", "c", "d", "elsewhere"}


def test_best_is_the_smallest_loss_and_the_largest_accuracy() -> None:
    series = Series()
    series.extend([1, 2, 3, 4], [0.5, math.nan, 0.2, 0.9])
    assert best("validation/loss", series) == (0.2, 3)
    assert best("validation/accuracy", series) == (0.9, 4)
    nothing = Series()
    nothing.add(1, math.nan)
    assert best("loss", nothing) is None


@settings(deadline=None)
@given(
    y=st.lists(st.floats(allow_infinity=False, width=32), min_size=1, max_size=400),
    limit=st.integers(4, 60),
)
def test_downsampling_keeps_the_ends_and_the_extremes(y: list[float], limit: int) -> None:
    steps, kept = downsampled(range(10, 10 + len(y)), y, limit)
    assert len(kept) <= max(limit, 0)
    assert (steps[0], steps[-1]) == (10, 9 + len(y))
    assert list(steps) == sorted(set(steps.tolist()))
    np.testing.assert_array_equal(kept, [y[step - 10] for step in steps])
    known = [value for value in y if not math.isnan(value)]
    if known:
        assert np.nanmin(kept) == min(known)
        assert np.nanmax(kept) == max(known)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 40),
    size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    tail=st.sampled_from(["keep", "drop"]),
)
def test_what_ranks_load_has_the_digest_of_the_plan(
    length: int, batch: int, size: int, epoch: int, tail: Any
) -> None:
    plan = Plan(length=length, batch_size=batch, shuffle=True, seed=5, tail=tail)
    told = []
    for rank in range(size):
        counts = Counts()
        for step, indices in plan.walk(epoch, rank=rank, size=size):
            counts.add(step, indices, seconds=2.0, alone=1.0, data_wait=0.5)
        told.append(in_slots(counts.taken(), rank, size))
    ranks = from_slots([max(column) for column in zip(*told, strict=True)], size)
    found = together(ranks)
    assert (found.samples, found.digest) == planned(plan, epoch)
    assert found.steps == plan.steps
    if found.steps:
        assert (found.seconds, found.alone) == ([2.0] * size, [1.0] * size)


def test_any_other_set_of_samples_has_another_digest() -> None:
    plan = plan_of(PLAN)
    assert plan is not None
    _, right = planned(plan, 0)
    steps = np.concatenate([np.full(plan.count(s), s) for s in range(plan.steps)])
    samples = np.concatenate([indices for _, indices in plan.walk(0)])
    assert digest(steps, samples) == right
    assert added(digest(steps[:7], samples[:7]), digest(steps[7:], samples[7:])) == right
    missing = digest(steps[1:], samples[1:])
    twice = added(right, digest(steps[:1], samples[:1]))
    other = samples.copy()
    other[[0, -1]] = other[[-1, 0]]  # the same samples, two of them in each other's step
    assert len({right, missing, twice, digest(steps, other)}) == 4
    assert planned(plan, 1)[1] != right
    assert plan_of({**PLAN, "permutation": 0}) is None


def test_a_summary_is_plain_json(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    start(writer)
    writer.add("values", values={"validation/loss": [[3, 6], [0.5, math.nan]]})
    writer.add("end", step=6, epoch=2, state="stopped")
    found = json.loads(json.dumps(summary(read_run(tmp_path)), allow_nan=False))
    assert found["values"] == {"validation/loss": {"last": None, "best": 0.5, "best_step": 3}}
    assert (found["state"], found["processes"], found["steps"]) == ("stopped", [2], 6)
