"""The live page behind the browser: what is read, what is sent, who is red, who is refused."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from evenly.cli import main
from evenly.record import FILE, Writer
from evenly.record.series import Series
from evenly.watch.follow import Follower
from evenly.watch.frames import change, frame
from evenly.watch.hub import Hub
from evenly.watch.ranks import Ranks, Tile
from evenly.watch.thinning import Thinned

pytest.importorskip("vl_convert", reason="vl-convert-python is missing: pip install '.[watch]'")
pytest.importorskip("starlette", reason="starlette is missing: pip install '.[watch]'")
HOST = socket.gethostname()


def launched(folder: Path, step: int = 0, processes: int = 2) -> Writer:
    writer = Writer(folder / FILE)
    writer.open(processes=processes, host="elsewhere", pid=1)
    writer.add(
        "start",
        step=step,
        epoch=0,
        position=step,
        total_steps=10_000,
        processes=processes,
        stages=["validation"],
        plan=None,
    )
    return writer


def steps(writer: Writer, first: int, last: int, **more: list[float]) -> None:
    numbers = list(range(first, last + 1))
    values = {"loss": [numbers, [2 / math.sqrt(step) for step in numbers]]}
    values |= {name: [numbers[-len(some) :], some] for name, some in more.items()}
    writer.add("values", values=values)


# --- fewer points


@given(
    chunks=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    holes=st.floats(0, 1),
)
def test_of_a_growing_series_the_ends_and_the_peaks_are_shown(
    chunks: list[int], seed: int, holes: float
) -> None:
    draws = np.random.default_rng(seed)
    series, thinned = Series(), Thinned(most=10)
    for count in chunks:
        values = draws.normal(size=count)
        values[draws.random(count) < holes] = math.nan
        series.extend(range(len(series), len(series) + count), values.tolist())
        places = thinned.places(series)
        assert places == sorted(set(places))
        assert len(places) <= 2 * 10 + 4
        assert {places[0], places[-1]} == {0, len(series) - 1}
        known = np.array(series.values)
        shown = known[places]
        if not np.isnan(known).all():
            assert np.nanmin(shown) == np.nanmin(known)
            assert np.nanmax(shown) == np.nanmax(known)


def test_points_that_are_shown_stay_so_that_updates_are_small() -> None:
    series, thinned = Series(), Thinned(most=100)
    before: set[int] = set()
    changed = 0
    for _ in range(2000):
        start = len(series)
        series.extend(range(start, start + 10), np.sin(np.arange(start, start + 10) ** 2).tolist())
        places = set(thinned.places(series))
        changed += len(places ^ before)
        before = places
    assert changed < 8 * 2000


# --- the record


def test_what_was_read_is_never_read_again(tmp_path: Path) -> None:
    writer = launched(tmp_path)
    steps(writer, 1, 100)
    follower = Follower(tmp_path)
    assert follower.look()
    assert not follower.look()
    size = writer.path.stat().st_size
    with writer.path.open("r+b") as file:
        file.seek(250)
        file.write(b"x" * (size - 251))
    steps(writer, 101, 150)
    assert follower.look()
    assert follower.run is not None
    assert len(follower.run.series["loss"]) == 150
    assert follower.run.damaged == 0


def test_a_restart_takes_points_back_and_a_new_record_is_a_new_run(tmp_path: Path) -> None:
    steps(launched(tmp_path), 1, 3000)
    follower = Follower(tmp_path)
    follower.look()
    follower.thinned()
    steps(launched(tmp_path, 1000), 1001, 1010)
    follower.look()
    thin = follower.thinned()
    assert thin is not None
    assert thin.series["loss"].steps[-1] == thin.step == 1010
    assert len(thin.launches) == 2
    (tmp_path / FILE).unlink()
    assert follower.look()
    assert follower.run is None
    steps(launched(tmp_path), 1, 5)
    follower.look()
    assert follower.run is not None
    assert follower.run.step == 5


def test_a_record_elsewhere_or_of_another_version_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    steps(launched(tmp_path / "elsewhere"), 1, 5)
    run = tmp_path / "run"
    run.mkdir()
    (run / FILE).symlink_to(tmp_path / "elsewhere" / FILE)
    hub = Hub(run)
    hub.update()
    assert b"leads out of the run's folder" in hub.whole()
    (run / FILE).unlink()
    (run / FILE).write_text('{"kind":"launch","time":1,"version":99}\n')
    hub.update()
    assert b"has version 99 of its format" in hub.whole()
    (run / FILE).unlink()
    (run / FILE).write_text('{"kind":"launch","time":1,"version":1}\n{"kind":"start","time":1}\n')
    hub.update()
    assert b'"state":"starting"' in hub.whole()


def shown(old: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """What page.js makes of a change."""
    new = {**copy.deepcopy(old), **{k: v for k, v in event.items() if k not in ("figures", "gone")}}
    for name in event.get("gone", []):
        del new["figures"][name]
    for name, figure in event["figures"].items():
        if "about" in figure:
            new["figures"][name] = figure
            continue
        own = new["figures"][name]
        own["words"] = figure.get("words", own["words"])
        for dataset, news in figure["data"].items():
            if "tails" not in news:
                own["data"][dataset] = news
                continue
            groups = own["data"][dataset]["groups"]
            for key, (kept, rows) in news["tails"].items():
                groups[key] = groups.get(key, [])[:kept] + rows
    return new


def test_changes_add_up_to_the_whole_page_through_growth_and_restarts(tmp_path: Path) -> None:
    follower, ranks = Follower(tmp_path), Ranks(tmp_path)
    page = frame(follower, ranks)
    assert page["head"]["state"] == "waiting"
    old, writer, sizes = page, launched(tmp_path), []
    for number in range(60):
        if number == 30:
            writer = launched(tmp_path, 1500, processes=1)
        first = 100 * number + 1 if number < 30 else 100 * (number - 15) + 1
        more = {"validation/loss": [1 / (number + 1)]} if number % 7 == 3 else {}
        more |= {"step_seconds": [0.01], "data_wait_seconds": [0.001 * number]}
        steps(writer, first, first + 99, **more, **({"late": [1.0]} if number > 40 else {}))
        follower.look()
        new = json.loads(json.dumps(frame(follower, ranks)))
        event = json.loads(json.dumps(change(old, new)))
        page, old = shown(page, event), new
        assert page == new
        sizes.append(len(json.dumps(event)))
    titles = [page["figures"][name]["about"]["title"] for name in page["order"]]
    assert titles == ["loss", "late", "Waiting for data, % of the step"]
    assert any(
        "2 to 1 processes" in mark["label"]
        for mark in page["figures"]["curve-0"]["about"]["legend"]
    )
    assert (
        page["head"]["facts"][-1] == ("restarts", "1") or ["restarts", "1"] in page["head"]["facts"]
    )
    assert np.median(sizes) < 6000 < len(json.dumps(page))


# --- ranks


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def row(rank: int, **fields: Any) -> dict[str, Any]:
    now = time.time()
    common = {"state": "moves", "phase": "step", "doing": "", "waits_for": [], "step": 3}
    common |= {"idle": 0.1, "last_beat": now, "host": HOST, "pid": os.getpid(), "stack": ""}
    times = {"step_seconds": 0.2, "own_seconds": 0.1, "data_seconds": 0.05, "memory": 10**9}
    return {"rank": rank, **common, **times, **fields}


def judged(
    folder: Path, *rows: dict[str, Any], state: str = "", age: float = 0.0, **table: Any
) -> list[Tile]:
    folder.mkdir(exist_ok=True)
    writer = launched(folder)
    if state:
        writer.add("end", step=1, epoch=0, state=state)
    found = {"version": 1, "time": time.time() - age, "report": "", "failure": None, **table}
    (folder / "ranks.json").write_text(json.dumps({**found, "ranks": rows}))
    follower = Follower(folder)
    follower.look()
    if age and follower.run is not None:
        follower.run.launches[-1]["time"] -= age
    return Ranks(folder).look(follower.run)


def test_each_rank_is_judged_by_what_is_known_of_it(tmp_path: Path, gone: int) -> None:
    now = time.time()
    tiles = judged(
        tmp_path,
        row(0),
        row(1, last_beat=now - 9),
        row(2, state="stuck", idle=61.0, stack="File x, line 1 in f"),
        row(3, pid=gone),
        row(4, waits_for=[2, 3], idle=9.0),
        {"rank": 5, "state": "unborn", "stack": ""},
        row(6, state="left", pid=gone),
        row(7, host="elsewhere", pid=gone),
        row(8, state="silent"),
    )
    assert [(tile.state, tile.tone) for tile in tiles] == [
        ("working", "good"),
        ("silent", "bad"),
        ("stuck", "bad"),
        ("dead", "bad"),
        ("waiting", "good"),
        ("starting", "calm"),
        ("ended", "calm"),
        ("working", "good"),
        ("silent", "bad"),
    ]
    assert "No sign of life for 9." in tiles[1].why
    assert tiles[2].why.startswith("It has not moved for 1 min 1 s")
    assert tiles[2].stack == "File x, line 1 in f"
    assert f"Process {gone} is gone." in tiles[3].why
    assert "For ranks 2, 3, since 9." in tiles[4].why
    facts = dict(tiles[0].facts)
    assert (facts["step time"], facts["data wait"], facts["memory"]) == (
        "200 ms",
        "50 ms",
        "1.00 GB",
    )


def test_a_table_that_is_old_is_no_word_unless_the_run_has_ended(tmp_path: Path, gone: int) -> None:
    old: dict[str, Any] = {"age": 30.0}
    running = judged(tmp_path / "1", row(0), row(1), **old)
    assert [(tile.state, tile.tone) for tile in running] == [("no word", "bad")] * 2
    assert "Nothing was heard of any rank for 30" in running[0].why
    ended = judged(tmp_path / "2", row(0, pid=gone), row(1, pid=gone), state="finished", **old)
    assert [(tile.state, tile.tone) for tile in ended] == [("ended", "calm")] * 2
    told = {"rank": 1, "state": "dead", "text": "rank 1 was killed by SIGKILL; rank 0 was stopped."}
    failed = judged(
        tmp_path / "3", row(0, pid=gone), row(1, pid=gone), state="failed", failure=told, **old
    )
    assert [(tile.state, tile.tone, tile.why) for tile in failed] == [
        ("ended", "calm", "It ended because another rank failed."),
        ("dead", "bad", "Was killed by SIGKILL."),
    ]


def test_a_run_that_nobody_watches_has_the_tile_of_its_recorder(tmp_path: Path) -> None:
    steps(launched(tmp_path, processes=1), 1, 7, step_seconds=[0.5])
    follower = Follower(tmp_path)
    follower.look()
    (tile,) = Ranks(tmp_path).look(follower.run)
    assert (tile.rank, tile.state, tile.tone) == (0, "working", "good")
    assert dict(tile.facts) == {"step": "7", "step time": "500 ms"}
    table = {"version": 1, "time": time.time() - 60, "ranks": [row(0), row(1)]}
    (tmp_path / "ranks.json").write_text(json.dumps(table))
    assert len(Ranks(tmp_path).look(follower.run)) == 1, "that is the table of an earlier launch"


# --- viewers


def test_many_viewers_share_one_reader_and_a_slow_one_gets_the_whole(tmp_path: Path) -> None:
    writer = launched(tmp_path)
    steps(writer, 1, 10)
    hub = Hub(tmp_path)
    looks = 0
    look = hub.follower.look

    def counted() -> bool:
        nonlocal looks
        looks += 1
        return look()

    hub.follower.look = counted  # type: ignore[method-assign]

    async def scene() -> None:
        hub.update()
        quick = [hub.events() for _ in range(20)]
        slow = hub.events()
        for viewer in (*quick, slow):
            assert (await anext(viewer)).startswith(b"event: whole")
        for number in range(1, 4):
            steps(writer, 10 * number + 1, 10 * number + 10)
            waiting = [asyncio.ensure_future(anext(viewer)) for viewer in quick]
            await asyncio.sleep(0)
            hub.update()
            events = await asyncio.wait_for(asyncio.gather(*waiting), 5)
            assert all(event.startswith(b"event: change") for event in events)
            assert len({id(event) for event in events}) == 1, "put together once"
        event = await anext(slow)
        assert event.startswith(b"event: whole")
        assert b'"40 of 10,000"' in event
        hub.close()
        with pytest.raises(StopAsyncIteration):
            await anext(slow)

    asyncio.run(scene())
    assert looks == 4


# --- the server


def test_only_the_page_is_served_and_only_to_its_own_name(tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx", reason="httpx is missing: pip install '.[dev]'")
    from evenly.watch.server import application

    steps(launched(tmp_path / "run"), 1, 5)

    async def answers(host: str, asked: list[tuple[str, str, str]]) -> list[Any]:
        transport = httpx.ASGITransport(app=application(Hub(tmp_path / "run"), host))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [
                await client.request(method, f"http://x{path}", headers={"Host": name})
                for method, path, name in asked
            ]

    def codes(host: str, *asked: tuple[str, str, str]) -> list[int]:
        return [answer.status_code for answer in asyncio.run(answers(host, list(asked)))]

    here = "127.0.0.1:8765"
    paths = ["/record.jsonl", "/../run/record.jsonl", "/%2e%2e/secret", "/run", "//etc/passwd"]
    assert codes("127.0.0.1", *(("GET", path, here) for path in paths)) == [404] * len(paths)
    methods = ["POST", "PUT", "DELETE", "PATCH"]
    assert codes("127.0.0.1", *((method, "/", here) for method in methods)) == [405] * 4
    good = ["localhost:8765", "127.0.0.1", "[::1]:8765", "LOCALHOST"]
    assert codes("127.0.0.1", *(("GET", "/", name) for name in good)) == [200] * 4
    bad = ["evil.example:8765", "", "127.0.0.1.evil.example", "10.0.0.5:8765", "localhost.evil"]
    assert codes("127.0.0.1", *(("GET", "/", name) for name in bad)) == [421] * 5
    wide = ["10.0.0.5:8765", HOST, "evil.example"]
    assert codes("0.0.0.0", *(("GET", "/", name) for name in wide)) == [200, 200, 421]
    (page,) = asyncio.run(answers("127.0.0.1", [("GET", "/", here)]))
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "access-control-allow-origin" not in page.headers
    assert "http" not in page.text, "nothing from elsewhere"


def test_wrong_paths_and_ports_and_missing_packages_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evenly.watch import server

    runner = CliRunner()
    (tmp_path / "file").write_text("")
    refused = runner.invoke(main, ["watch", str(tmp_path / "file")])
    assert refused.exit_code == 1
    assert "is a file. Name the run's folder" in refused.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = runner.invoke(main, ["watch", str(tmp_path), "--no-open", "--port", port])
    assert refused.exit_code == 1
    assert f"cannot be served at 127.0.0.1, port {port}" in refused.output
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    refused = runner.invoke(main, ["watch", str(tmp_path)])
    assert refused.exit_code == 1
    assert "pip install starlette uvicorn vl-convert-python" in refused.output


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "evenly", "watch", str(tmp_path / "run"), "--no-open"]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().split(" at ")[1].split()[0]
    process.kill()
    process.communicate()


def test_ctrl_c_ends_it_at_once_and_quietly_with_viewers_there(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = served
    answer = urllib.request.urlopen(f"{address}events", timeout=10)
    assert answer.readline() == b"event: whole\n"
    rest: list[bytes] = []
    viewer = threading.Thread(target=lambda: rest.extend(answer.readlines()))
    viewer.start()
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    assert time.monotonic() - begin < 2
    viewer.join(timeout=5)
    answer.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_help_loads_neither_torch_nor_the_server() -> None:
    program = (
        "import sys; from evenly.cli import main\n"
        "for words in (['--help'], ['watch', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'vl_convert'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import evenly.watch.hub, evenly.watch.server\n"
        "assert 'torch' not in sys.modules and 'starlette' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Show a run on a live page while it trains." in done.stdout
