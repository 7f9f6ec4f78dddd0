"""Over a whole run nothing listens beyond this machine, and no file that is read runs code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import evenly
from evenly.checkpoint import CheckpointFolder
from evenly.errors import EvenlyError
from test_launcher import Launched, start, write
from test_restarts import TRAINING
from trainings import digits, made

__all__ = ["start"]  # the fixture

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_nothing_listens_beyond_this_machine_during_a_whole_run(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    write(tmp_path / "training.py", TRAINING.rstrip() + "\n    trainer.predict(Data())\n")
    run = start("-n", "2", "training.py")
    listening: dict[int, set[str]] = {}
    while run.alive():
        for process in run.tree():
            try:
                found = process.net_connections("tcp")
            except psutil.Error:  # it has ended
                continue
            for connection in found:
                if connection.status == psutil.CONN_LISTEN:
                    listening.setdefault(process.pid, set()).add(connection.laddr.ip)
        time.sleep(0.02)
    assert run.end() == 0, run.errors()
    assert run.errors() == ""
    assert len(listening) >= 3  # the launcher's store, and gloo in each rank
    assert set.union(*listening.values()) <= LOOPBACK


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def planted(kind: str, mark: Path) -> bytes:
    """A file that runs code when it is unpickled, as pickle or as torch writes it."""
    code = pickle.dumps(Payload(mark))
    if kind == "pickle":
        return code
    file = mark.with_suffix(".pt")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3")
    return file.read_bytes()


def sealed_again(folder: Path) -> None:
    """The manifest made to fit its files, as somebody would who plants one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] |= {"bytes": len(content), "sha256": digest}
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    whole = json.dumps(rest, sort_keys=True).encode()
    manifest["sha256"] = hashlib.sha256(whole).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, at steps 2 and 4."""
    path = tmp_path_factory.mktemp("saved")
    with evenly.open_world():
        made(folder=path, save_every=2).fit(digits(), steps=4)
    return path


@pytest.mark.filterwarnings("ignore::evenly.errors.EvenlyWarning")
def go_on(folder: Path) -> int:
    """The step from which a run in this folder goes on, 0 where it is refused."""
    seen = []

    class Look(evenly.callbacks.Callback):
        def on_run_start(self, trainer: evenly.Trainer) -> None:
            seen.append(trainer.step)

    try:
        made(folder=folder, callbacks=[Look()]).fit(digits(), steps=4, resume="auto")
    except EvenlyError:
        return 0
    return seen[0]


@pytest.mark.filterwarnings("ignore::evenly.errors.EvenlyWarning")
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_planted_checkpoint_runs_no_code(
    saved: Path, tmp_path: Path, world: evenly.World, kind: str
) -> None:
    mark = tmp_path / "ran"
    names = [f.name for f in CheckpointFolder(saved / "checkpoints").all()[0].iterdir()]
    assert len(names) >= 3
    for name in names:
        folder = tmp_path / name
        shutil.copytree(saved, folder)
        newest = CheckpointFolder(folder / "checkpoints").all()[0]
        (newest / name).write_bytes(planted(kind, mark))
        if name != "manifest.json":
            sealed_again(newest)
        assert go_on(folder) in (0, 2), name
    assert not mark.exists()
    pickle.loads(planted("pickle", mark))
    assert mark.exists()  # the payload does what it says


@pytest.mark.filterwarnings("ignore::evenly.errors.EvenlyWarning")
def test_a_checkpoint_cannot_lead_out_of_its_folder(
    saved: Path, tmp_path: Path, world: evenly.World
) -> None:
    """By names in any of its JSON files, or by links, though all checksums fit."""
    for way in ("none", "names", "links"):
        folder, outside = tmp_path / way, tmp_path / f"outside-{way}"
        shutil.copytree(saved, folder)
        newest = CheckpointFolder(folder / "checkpoints").all()[0]
        shutil.copytree(newest, outside)
        if way == "none":
            sealed_again(newest)
            assert go_on(folder) == 4  # so it is not the manifest that is refused below
            continue
        tensors = [file.name for file in newest.glob("*.safetensors")]
        assert tensors
        for name in tensors:
            (newest / name).unlink()
            if way == "links":
                (newest / name).symlink_to(outside / name)
                continue
            for file in newest.glob("*.json"):
                elsewhere = json.dumps(f"../../../{outside.name}/{name}")
                file.write_text(file.read_text().replace(json.dumps(name), elsewhere))
        if way == "names":
            manifest = json.loads((newest / "manifest.json").read_text())
            manifest["files"] = {
                name: entry for name, entry in manifest["files"].items() if "/" not in name
            }
            (newest / "manifest.json").write_text(json.dumps(manifest))
            sealed_again(newest)
        assert go_on(folder) in (0, 2), way


def test_a_planted_folder_of_predictions_runs_no_code_and_reads_nothing_outside(
    tmp_path: Path, world: evenly.World
) -> None:
    folder, mark = tmp_path / "predictions", tmp_path / "ran"
    secret = tmp_path / "secret.npy"
    secret.write_bytes(bytes(4096))

    made().predict(digits(length=20), out=folder)
    evenly.read_predictions(folder)
    original = (folder / "manifest.json").read_text()
    manifest = json.loads(original)
    (name,) = manifest["files"]

    def refused(text: str) -> None:
        (folder / "manifest.json").write_text(text)
        with pytest.raises(EvenlyError):
            evenly.read_predictions(folder)

    (folder / "manifest.json").write_bytes(planted("pickle", mark))
    with pytest.raises(EvenlyError):
        evenly.read_predictions(folder)
    for escape in ("../secret.npy", str(secret)):
        refused(original.replace(json.dumps(name), json.dumps(escape)))
        refused(original.replace(f'"file": {json.dumps(name)}', f'"file": {json.dumps(escape)}'))
    for odd in ("os", "load", "__builtins__"):
        refused(original.replace('"dtype": "float64"', f'"dtype": "{odd}"'))
    refused("[]")
    refused(original.replace('"structure": 0', '"structure": {"tuple": [7], "fields": ["a b"]}'))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(planted("pickle", mark).ljust(len(content)))
    (folder / "manifest.json").write_text(original)
    evenly.read_predictions(folder)  # numbers, whatever they mean
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    refused(original)
    assert not mark.exists()
