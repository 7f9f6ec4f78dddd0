"""Predictions on disk: whole, in order and readable by anyone, or not there at all."""

import errno
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import evenly
from evenly.errors import LaunchError, SettingError, StorageError
from evenly.prediction.manifest import read_predictions
from evenly.prediction.rows import Rows
from evenly.testing import run_ranks
from evenly.tree import map_leaves
from test_prediction import (
    OwnError,
    alone,
    collect,
    nested,
    ragged,
    refused,
    same,
    tensor,
    wrong_on_rank,
)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place for predictions; afterwards it is the only thing beside it, if it is there."""
    yield tmp_path / "out"
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "other"}


def loaded(path: Path) -> Any:
    return map_leaves(
        lambda leaf: list(leaf) if isinstance(leaf, Rows) else leaf, read_predictions(path)
    )


def with_lists(part: evenly.Part) -> Any:
    return {"x": tensor(part), **ragged(part)}


def as_float32(leaf: Any) -> Any:
    half = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16
    return leaf.float() if half else leaf


@pytest.mark.parametrize("format", ["npy", "safetensors"])
@pytest.mark.parametrize("function", [tensor, nested, ragged])
@pytest.mark.parametrize(("size", "length"), [(1, 29), (3, 29), (3, 2)])
def test_what_is_read_back_is_what_was_predicted(
    out: Path, function: Any, size: int, length: int, format: str
) -> None:
    run_ranks(collect, size, function, length, out=out, format=format)
    expected = alone(function, length)
    if format == "npy" and function is nested:
        expected = map_leaves(as_float32, expected)
    found = loaded(out)
    if function is nested:
        assert found["pair"]._fields == ("low", "high")
        found["pair"] = type(expected["pair"])(*found["pair"])
    assert same(found, expected)


@pytest.mark.parametrize("size", [2, 7])
def test_any_number_of_processes_and_any_order_give_the_same_files(
    out: Path, tmp_path: Path, size: int
) -> None:
    collect(with_lists, 29, out=out)
    other = tmp_path / "other"
    run_ranks(collect, size, with_lists, 29, 20, out=other, loader={"shuffle": True})
    for file in sorted(out.iterdir()):
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_a_write_that_the_system_takes_in_bites_is_whole(out: Path) -> None:
    write = os.pwrite
    bites = mock.patch("os.pwrite", lambda file, data, place: write(file, data[:7], place))
    with bites:
        collect(with_lists, 29, out=out)
    assert same(loaded(out), alone(with_lists, 29))


def test_tensors_in_one_file_start_where_their_types_may(out: Path) -> None:
    collect(nested, 29, out=out, format="safetensors")
    columns = json.loads((out / "manifest.json").read_text())["columns"]
    for column in (column for column in columns if column["kind"] == "tensor"):
        assert column["offset"] % getattr(torch, column["dtype"]).itemsize == 0


def test_lines_are_put_in_order_block_by_block(out: Path) -> None:
    with mock.patch("evenly.prediction.rows._BLOCK", 5):
        collect(ragged, 29, out=out)
    assert same(loaded(out), alone(ragged, 29))


def test_numpy_json_and_safetensors_read_the_files(out: Path, tmp_path: Path) -> None:
    run_ranks(collect, 2, with_lists, 29, out=out)
    assert np.array_equal(np.load(out / "x.npy"), alone(tensor, 29).numpy())
    lines = (out / "text.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == alone(ragged, 29)["text"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["version"], manifest["rows"]) == (1, 29)
    assert manifest["columns"][0]["shape"] == [29, 2]
    assert manifest["columns"][0]["dtype"] == "float32"
    run_ranks(collect, 2, nested, 29, out=tmp_path / "other", format="safetensors")
    found = load_file(tmp_path / "other" / "predictions.safetensors")
    assert same(found["pair.low"], alone(nested, 29)["pair"].low)
    assert same(found["inside.whole.0"], alone(nested, 29)["inside"]["whole"][0])


def test_entries_on_disk_are_read_one_by_one(out: Path) -> None:
    collect(ragged, 29, out=out)
    rows = read_predictions(out)["text"]
    expected = alone(ragged, 29)["text"]
    assert (len(rows), rows[3], rows[-1], rows[4:9]) == (
        29,
        expected[3],
        expected[-1],
        expected[4:9],
    )
    with pytest.raises(IndexError):
        rows[29]


def test_changing_what_was_read_changes_no_file(out: Path) -> None:
    collect(tensor, 29, out=out)
    read_predictions(out).zero_()
    assert same(read_predictions(out), alone(tensor, 29))


def test_names_that_no_file_system_takes_are_changed_and_stay_apart(out: Path) -> None:
    def function(part: evenly.Part) -> Any:
        x = part.data[0]
        return {"a/b": x, "a_b": x + 1, "A_b": x + 2, "..": x + 3, 7: x + 4, "": x + 5}

    collect(function, 29, out=out)
    assert same(read_predictions(out), alone(function, 29))
    assert {"a_b.npy", "a_b-2.npy", "A_b-3.npy"} <= {file.name for file in out.iterdir()}


def must_not_run(part: evenly.Part) -> Any:
    raise OwnError("computed before the folder was looked at")


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_output_that_exists_is_refused_before_anything_is_computed(out: Path, kind: str) -> None:
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("precious")
    else:
        out.symlink_to("nowhere")
    for text in run_ranks(refused, 2, must_not_run, out=out):
        assert re.match(r"SettingError: out='.*out' exists.*Give another folder", text)
    assert kind != "file" or out.read_text() == "precious"


def without_room(rank: int, step: int) -> Callable[[evenly.Part], Any]:
    """From a step on, files of one rank may not grow: what a full disk does, by the kernel."""

    def function(part: evenly.Part) -> Any:
        if part.world.rank == rank and part.step == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        return {"x": tensor(part), "text": [f"{float(x)}" * 9 for x in part.data[0]]}

    return function


def refused_without_room(rank: int, step: int, out: Path) -> str:
    try:
        return refused(without_room(rank, step), 60, out=out)
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (1, 4), (2, 9)])
def test_a_disk_that_fills_up_on_one_rank_is_an_error_on_all(
    out: Path, rank: int, step: int
) -> None:
    for text in run_ranks(refused_without_room, 3, rank, step, out):
        assert text.startswith(f"StorageError: rank {rank} could not")
        assert os.strerror(errno.EFBIG) in text
    assert not out.exists()


def test_too_little_space_is_seen_before_the_second_batch(out: Path) -> None:
    usage = shutil.disk_usage(out.parent)._replace(free=100)
    function = wrong_on_rank(0, 1, OwnError("computed"))
    with mock.patch("shutil.disk_usage", return_value=usage):
        with pytest.raises(StorageError, match=r"take 244 bytes and .* has 100 left"):
            collect(function, 29, out=out)


@pytest.mark.parametrize("step", [0, 3])
def test_a_function_that_raises_leaves_nothing(out: Path, step: int) -> None:
    for text in run_ranks(refused, 2, wrong_on_rank(1, step, OwnError("oh")), 24, out=out):
        assert text == "OwnError: oh"
    assert not out.exists()


def failing_at(name: str, out: Path) -> str:
    with mock.patch(f"evenly.prediction.folder.{name}", side_effect=OSError(errno.EIO, "broken")):
        return refused(with_lists, out=out)


@pytest.mark.parametrize("name", ["create", "RowWriter.place", "write_manifest", "sync_folder"])
def test_a_failure_at_the_start_or_the_very_end_leaves_nothing_either(out: Path, name: str) -> None:
    for text in run_ranks(failing_at, 2, name, out):
        assert re.match(r"StorageError: rank \d could not .*broken", text)
    assert not out.exists()


def test_a_folder_whose_name_may_not_survive_a_power_cut_is_taken_back(out: Path) -> None:
    effects = [None, OSError(errno.EIO, "broken")]
    with mock.patch("evenly.prediction.folder.sync_folder", side_effect=effects):
        with pytest.raises(StorageError, match="broken"):
            collect(tensor, 12, out=out)
    assert not out.exists()


def killed(part: evenly.Part) -> Any:
    if part.world.rank == 1 and part.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return ragged(part)


def test_a_rank_that_is_killed_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        run_ranks(collect, 2, killed, 24, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def end_here(part: evenly.Part) -> Any:
    if part.step == 2:
        os._exit(9)
    return ragged(part)


def test_what_a_killed_run_leaves_is_not_read_and_not_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        run_ranks(collect, 1, end_here, 24, out=tmp_path / "out")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.partial-")
    with pytest.raises(StorageError, match="no finished predictions"):
        read_predictions(left)
    collect(ragged, 24, out=tmp_path / "out")
    assert same(loaded(tmp_path / "out"), alone(ragged, 24))


def test_a_folder_that_is_not_whole_or_not_ours_is_refused(out: Path) -> None:
    with pytest.raises(StorageError, match="no finished predictions"):
        read_predictions(out)
    collect(tensor, 29, out=out)
    manifest = out / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(StorageError, match=r"of version 2; this Evenly reads .* of version 1"):
        read_predictions(out)
    manifest.write_text(text)
    os.truncate(out / "predictions.npy", 100)
    with pytest.raises(StorageError, match="has 100 bytes and should have 360"):
        read_predictions(out)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": "csv"}, "format='csv'; choose from npy, safetensors, parquet"),
        ({"keep": "first"}, "keep='first' is for predictions in memory"),
        ({"out": None, "format": "safetensors"}, "give out= as well"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    out: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        collect(must_not_run, 12, **{"out": out, **settings})


def test_types_and_keys_that_a_format_lacks_are_refused(out: Path) -> None:
    with pytest.raises(SettingError, match=r"no type for torch\.complex128"):
        collect(lambda part: part.data[0].to(torch.complex128), 12, out=out, format="safetensors")
    with pytest.raises(SettingError, match=r"key \(1, 2\) of type tuple"):
        collect(lambda part: {(1, 2): part.data[0]}, 12, out=out)
    with pytest.raises(SettingError, match="view_as_real"):
        collect(lambda part: list(part.data[0].to(torch.complex64)), 12, out=out)


def test_parquet_without_pyarrow_says_what_to_install(out: Path) -> None:
    with mock.patch("evenly.prediction.parquet.find_spec", return_value=None):
        with pytest.raises(SettingError, match=r"pip install pyarrow$"):
            collect(must_not_run, 12, out=out, format="parquet")


def test_a_parquet_file_has_a_column_for_each_leaf(out: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    collect(with_lists, 29, out=out, format="parquet")
    table = parquet.read_table(out / "predictions.parquet").to_pydict()
    assert table["x"] == alone(tensor, 29).tolist()
    assert table["text"] == alone(ragged, 29)["text"]
    assert table["bits"] == [bits.tolist() for bits in alone(ragged, 29)["bits"]]
    with pytest.raises(SettingError, match=r"pyarrow\.parquet\.read_table"):
        read_predictions(out)
