"""A rank that is stuck, or slow, is named: who, since when, where, and what the others wait for."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evenly.errors import SettingError, StorageError
from evenly.watchdog import blackbox, stacks, table, words
from evenly.watchdog.activity import EVERYBODY, PHASES, Activity
from evenly.watchdog.beats import Beat
from evenly.watchdog.judge import Finding, Standing, judge
from evenly.watchdog.limits import Limits, checked, from_environment
from evenly.watchdog.pace import Patience, Straggler, stragglers

USUAL = Beat(
    rank=0,
    count=1,
    host="here",
    pid=7,
    world=1,
    phase="step",
    doing="",
    waits=None,
    epoch=1,
    position=3,
    step=13,
    made=13,
    moves=5,
    collectives=40,
    idle=0.1,
    allowed=0.0,
    report=60.0,
    timeout=600.0,
    folder="",
    own=None,
    data=None,
    samples=0,
    step_seconds=None,
    memory=None,
    gpu_memory=None,
)


def standings(*changes: Mapping[str, Any] | None) -> list[Standing]:
    """Ranks that differ from the usual by this; None has not opened the world."""
    return [
        Standing(rank, None, 100.0)
        if change is None
        else Standing(
            rank,
            dataclasses.replace(
                USUAL, rank=rank, **{k: v for k, v in change.items() if k != "silent"}
            ),
            change.get("silent", 0.0),
        )
        for rank, change in enumerate(changes)
    ]


def stuck(finding: Finding | None) -> list[int]:
    return [] if finding is None else [standing.rank for standing in finding.stuck]


WAITS = {"idle": 70.0, "collectives": 41}


def test_a_rank_that_did_not_enter_the_collective_is_stuck_and_the_others_wait_for_it() -> None:
    found = judge(standings(WAITS, {"idle": 71.0, "phase": "data", "doing": "step"}, WAITS))
    assert found is not None
    assert stuck(found) == [1]
    assert not found.end
    text = words.report(found, {1: "  File x"}, {})
    assert text == (
        "rank 1 has not moved for 71 s (process 7 on here): waiting for data, at step 3 of epoch 1."
        " Ranks 0, 2 wait for it in the exchange of gradients of step 3 of epoch 1.\n"
        "Stack of rank 1, the innermost call first:\n  File x"
    )


def test_nobody_is_reported_before_the_time_or_while_it_moves() -> None:
    assert judge(standings(WAITS, {"idle": 59.0}, WAITS)) is None
    assert judge(standings(WAITS, {"idle": 0.5, "phase": "evaluation"})) is None
    assert judge(standings({"idle": 900.0, "report": 0.0}, {"report": 0.0})) is None


def test_waiting_for_one_rank_is_told_from_being_stuck_and_chains_are_followed() -> None:
    section = {"idle": 70.0, "phase": "saving", "doing": "on_rank at a.py:1", "waits": 0}
    assert stuck(judge(standings({"idle": 80.0, "phase": "saving"}, section, section))) == [0]
    # 2 waits for 0's section, 0 waits in a collective that 1 has not entered
    chain = standings(WAITS, {"idle": 75.0, "phase": "callback"}, {**section})
    assert stuck(judge(chain)) == [1]


def test_the_run_is_ended_only_when_somebody_waits_and_a_step_was_made() -> None:
    long, waits = {"idle": 601.0, "phase": "callback"}, {"idle": 601.0, "collectives": 41}
    assert judge(standings(waits, long)).end  # type: ignore[union-attr]
    for change in ({"made": 0}, {"timeout": 0.0}, {"allowed": 3600.0}, {"timeout": 700.0}):
        found = judge(standings(waits, {**long, **change}))
        assert stuck(found) == [1]
        assert not found.end, change  # type: ignore[union-attr]
    # all in the same slow evaluation: reported, and left alone
    together = judge(standings({**long, "phase": "evaluation"}, {**long, "phase": "evaluation"}))
    assert stuck(together) == [0, 1]
    assert not together.end  # type: ignore[union-attr]
    assert "Nobody waits for another rank." in words.report(together, {}, {})  # type: ignore[arg-type]
    assert "may just take long" in words.outlook(together)  # type: ignore[arg-type]


def test_a_silent_rank_is_stuck_whatever_it_said_last() -> None:
    found = judge(standings(WAITS, {"silent": 65.0, "idle": 0.2, "collectives": 41, "waits": -1}))
    assert stuck(found) == [1]
    text = words.report(found, {}, {1: "its process is stopped"})  # type: ignore[arg-type]
    assert text.startswith(
        "rank 1 has given no sign of life for 65 s (process 7 on here): in the step, at step 3 of "
        "epoch 1 (its process is stopped)."
    )


def test_a_program_without_the_trainer_is_left_alone_unless_somebody_waits_for_it() -> None:
    own = {"idle": 999.0, "phase": "program", "made": 0}
    assert judge(standings(own, own)) is None
    assert stuck(judge(standings(own, {**own, "collectives": 41}))) == [0]
    assert judge(standings(None, None)) is None  # no world at all
    left = {"idle": 999.0, "phase": "left"}
    assert judge(standings(left, left)) is None


def test_a_rank_that_has_not_opened_the_world_is_named_once_another_has() -> None:
    opening = {"phase": "start-up", "doing": "open_world", "waits": EVERYBODY, "made": 0}
    found = judge(standings({**opening, "idle": 90.0, "collectives": 0, "step": 0}, None))
    assert found is not None
    assert (stuck(found), found.end) == ([1], False)
    assert words.report(found, {}, {}) == (
        "rank 1 has not opened the world 100 s after its start. Rank 0 waits for it in open_world."
    )
    # also one that left the first world and does not come to the second
    late = standings({**opening, "idle": 90.0, "world": 2}, {"phase": "left", "idle": 80.0})
    assert stuck(judge(late)) == [1]


def test_ranks_in_different_collectives_are_told_apart() -> None:
    barrier = {"idle": 70.0, "phase": "callback", "doing": "barrier", "waits": EVERYBODY}
    gather = {"idle": 70.0, "doing": "all_gather", "waits": EVERYBODY}
    found = judge(standings(gather, barrier, gather))
    assert found is not None
    assert found.apart
    text = words.report(found, {}, {})
    assert "ranks 0, 2 in the step (in all_gather)" in text
    assert "rank 1 in a callback (in barrier), at step 3 of epoch 1" in text
    assert "skipped a collective" in text


def test_every_phase_has_words() -> None:
    for phase in PHASES:
        [one] = standings({"phase": phase, "doing": "x"})
        assert words.where(one)


def test_a_straggler_is_named_with_what_slows_it() -> None:
    def timed(own: float, data: float, samples: int = 9) -> Beat:
        return dataclasses.replace(USUAL, own=own, data=data, samples=samples)

    found = stragglers({0: timed(0.17, 0.0), 1: timed(0.171, 0.0), 2: timed(0.312, 0.187)})
    assert found == [Straggler(2, 0.312, pytest.approx(0.1705), 0.187)]  # type: ignore[arg-type]
    assert words.slow(*found[0]) == (
        "rank 2 is 1.8x slower than the other ranks: 312 ms a step of its own against 170 ms, "
        "60% of it waiting for data. The others wait for it."
    )
    assert "computing, not data" in words.slow(2, 0.3, 0.1, 0.01)
    assert not stragglers({0: timed(0.17, 0.0), 1: timed(0.2, 0.0)})
    assert not stragglers({0: timed(0.001, 0.0), 1: timed(0.003, 0.0)})  # noise
    assert not stragglers({0: timed(0.1, 0.0), 1: timed(0.9, 0.0, samples=2)})
    patience = Patience()
    assert [bool(patience.due(found, now, 60)) for now in (0, 30, 60, 90, 600, 700)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_limits_come_from_the_program_then_from_variables_then_from_the_worlds_timeout() -> None:
    assert from_environment({}, waits=600.0) == Limits(60.0, 600.0)
    assert from_environment({}, waits=7200.0).timeout == 7200.0
    environ = {"EVENLY_HANG_REPORT": "5", "EVENLY_HANG_TIMEOUT": "0"}
    assert from_environment(environ) == Limits(5.0, 0.0)
    one = Activity()
    one.given = (2.0, None)
    assert one.limits(Limits(60.0, 600.0)) == Limits(2.0, 600.0)
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(SettingError, match="EVENLY_HANG_REPORT"):
            from_environment({"EVENLY_HANG_REPORT": wrong})
    with pytest.raises(SettingError, match="hang_timeout=True"):
        checked("hang_timeout", True)


def test_the_black_box_says_where_a_process_is_and_a_forked_one_leaves_it_alone(
    tmp_path: Path,
) -> None:
    one = Activity()
    one.record(str(tmp_path / "box"))
    one.at(1, 2, 3)
    with one.within("evaluation"):
        one.enter("data", "evaluation")
        inside = blackbox.look(tmp_path / "box")
    assert inside is not None
    assert (inside.phase, inside.around) == tuple(map(list(PHASES).index, ("data", "evaluation")))
    one.enter("saving")
    child = os.fork()
    if child == 0:
        one.enter("data")
        os._exit(0)
    os.waitpid(child, 0)
    found = blackbox.look(tmp_path / "box")
    assert found == (list(PHASES).index("saving"), 1, 2, 3, 0, 0)
    assert blackbox.look(tmp_path / "none") is None


def test_stacks_leave_out_what_is_ours_in_every_process() -> None:
    text = (
        "Thread 0x01 (most recent call first):\n"
        '  File "/x/evenly/watchdog/beats.py", line 1 in _run\n'
        '  File "/usr/lib/threading.py", line 2 in _bootstrap\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/home/ada/train.py", line 3 in loss\n'
        '  File "/x/evenly/worker.py", line 4 in main\n'
    )
    assert stacks.tidy(text) == '  File "/home/ada/train.py", line 3 in loss'
    assert "test_watchdog.py" in stacks.mine()
    assert stacks.state_of(os.getpid(), silent=False) == ""
    assert stacks.state_of(2**22 + 1, silent=True) == "its process is gone"


def test_the_table_of_ranks_is_json_and_versioned(tmp_path: Path) -> None:
    here = standings(WAITS, {"idle": 71.0, "phase": "data"}, {"phase": "left"})
    finding = judge(here)
    found = table.table(
        here, attempt="a", time=1000.0, finding=finding, stacks={1: "x"}, report="r"
    )
    table.write(str(tmp_path), found)
    read = table.read_ranks(tmp_path)
    assert read == json.loads(json.dumps(found))
    assert [row["state"] for row in read["ranks"]] == ["moves", "stuck", "left"]
    assert read["ranks"][0]["waits_for"] == [1]
    assert read["ranks"][1]["since"] == 929.0
    assert os.listdir(tmp_path) == ["ranks.json"]  # noqa: PTH208
    (tmp_path / "ranks.json").write_text('{"version": 2}')
    with pytest.raises(StorageError, match="version 2"):
        table.read_ranks(tmp_path)
    with pytest.raises(StorageError, match="no table"):
        table.read_ranks(tmp_path / "none")
