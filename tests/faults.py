"""Training programs for fault tests, and a nursery that starts their ranks quickly.

Importing torch takes seconds, so the nursery is a process that has imported it and forks ranks on
request, as a scheduler without a launcher of ours would start them: with variables alone. Faults
are planned by what the program says about its progress, in files of its folder.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenly
from evenly.callbacks import Callback
from evenly.lifeline import die_with_parent
from trainings import digits, made

STEPS = 322  # 14 epochs of 23
PARTIAL = "*.partial-*"


class Witness(Callback):
    """Writes down what each rank does when: (run, rank, size, step, its samples), and the phase
    it is in. A line is one write, so that a kill leaves it whole or not there.
    """

    ranks = "every"

    def __init__(self, folder: Path, *, slow: float = 0.0, pause: float = 0.0) -> None:
        self._folder, self._slow, self._pause = folder, slow, pause
        self._file = -1
        self._who = (0, 1)

    def on_run_start(self, trainer: evenly.Trainer) -> None:
        self._who = (trainer.world.rank, trainer.world.size)
        name = self._folder / f"witness-{os.environ.get('RUN', '0')}-{self._who[0]}"
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._say("run", trainer.step)

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        assert trainer.part is not None
        self._say("step", trainer.step, *trainer.part.indices.tolist())
        if self._slow:
            time.sleep(self._slow)

    def on_evaluation_start(self, trainer: evenly.Trainer, stage: str) -> None:
        self._say("evaluation", trainer.step)
        end = time.monotonic() + self._pause
        while time.monotonic() < end:
            time.sleep(0.01)

    def _say(self, phase: str, *numbers: int) -> None:
        words = [phase, self._who[0], self._who[1], *numbers]
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def marathon(
    folder: Path,
    *,
    steps: int = STEPS,
    save_every: int = 9,
    slow: float = 0.0,
    pause: float = 0.0,
    idle: str = "",
    timeout: float = 30,
    pieces: int | None = None,
) -> None:
    """The digits, in float64, with evaluation; rank 0 writes the weights when it is done.

    ``slow`` seconds a step and a ``pause`` in each evaluation; ``idle`` for 20 s "before" the world
    is open, or "after".
    """
    torch.set_num_threads(1)
    if idle == "before":
        _idle(folder)
    trainer = made(
        callbacks=[Witness(folder, slow=slow, pause=pause)],
        folder=folder / "run",
        save_every=save_every,
        keep=2,
        timeout=timeout,
        pieces=pieces,
    )
    if idle == "after":
        _idle(folder)
    trainer.fit(digits(), digits(length=99), steps=steps, validate_every=20, resume="auto")
    if trainer.world.rank == 0:
        history = {name: list(series.values) for name, series in trainer.history.items()}
        result = {"weights": trainer.model.state_dict(), "history": history}
        torch.save(result, folder / "result.new")
        (folder / "result.new").rename(folder / "result.pt")


def _idle(folder: Path) -> None:
    (folder / f"idle-{os.environ.get('RANK', '0')}").touch()
    time.sleep(20)


class Numbered(nn.Module):
    """Tensors that all hold the number of steps made, so that a mix of two steps shows."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        width = max(1, int(megabytes * 2**20 / 8 / 8))  # eight tensors of float64
        self.tensors = nn.ParameterList(
            nn.Parameter(torch.zeros(width, dtype=torch.float64)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * 0 + torch.stack([-tensor.sum() for tensor in self.tensors]).sum()


def numbered(
    folder: Path, *, steps: int, save_every: int, megabytes: float = 1.0, **options: Any
) -> None:
    """Each step adds one to every number of the model."""
    torch.set_num_threads(1)
    trainer = evenly.Trainer(
        model=Numbered(megabytes),
        step=lambda model, batch: evenly.Output(loss=evenly.Total(model(batch[0]), 1)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        batch_size=8,
        shuffle=False,
        callbacks=[Witness(folder)],
        folder=folder / "run",
        save_every=save_every,
        check_loss=False,
        progress=False,
        timeout=12,
        **options,
    )
    trainer.fit(digits(length=8), steps=steps, resume="auto")


PROGRAMS: dict[str, Callable[..., None]] = {"marathon": marathon, "numbered": numbered}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """The ranks of one run that the nursery started."""

    def __init__(self, nursery: Nursery, run: int, pids: list[int], log: Path) -> None:
        self._nursery, self.run, self.pids, self._log = nursery, run, pids, log
        self.codes: dict[int, int] = {}

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        # A process that has ended stays until the nursery is asked about it: no pid is reused.
        for rank in ranks:
            if self.pids[rank] not in self.codes:
                os.kill(self.pids[rank], number)

    def running(self) -> list[int]:
        alive = [pid for pid in self.pids if pid not in self.codes]
        self.codes |= {int(p): c for p, c in self._nursery.ask(poll=alive).items()}
        return [pid for pid in alive if pid not in self.codes]

    def whole(self) -> bool:
        """Whether none has ended."""
        return len(self.running()) == len(self.pids)

    def wait(self, limit: float = 60.0) -> list[int]:
        """The exit codes in the order of ranks; whoever has not ended by then hangs."""
        deadline = time.monotonic() + limit
        while running := self.running():
            if time.monotonic() > deadline:
                for pid in running:
                    os.kill(pid, signal.SIGABRT)  # its stack goes to the log
                time.sleep(2)
                raise AssertionError(f"{len(running)} ranks hang after {limit} s: {self.log()}")
            time.sleep(0.01)
        return [self.codes[pid] for pid in self.pids]

    def log(self) -> str:
        return self._log.read_text()


class Nursery:
    """The process that forks ranks; it and they end with the test."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._runs = 0

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, program: str, size: int, folder: Path, **options: Any) -> Ranks:
        self._runs += 1
        log = folder / f"log-{self._runs}"
        pids = self.ask(
            start=program,
            size=size,
            folder=str(folder),
            log=str(log),
            run=self._runs,
            port=free_port(),
            options=options,
        )
        return Ranks(self, self._runs, pids, log)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    try:
        yield opened
    finally:
        opened.close()


def _serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            ended = {}
            for pid in order["poll"]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer: Any = ended
        else:
            answer = [_forked(order, rank) for rank in range(order["size"])]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _forked(order: dict[str, Any], rank: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(parent)
    os.setsid()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(order["size"]),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(order["size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order["port"]),
        RUN=str(order["run"]),
    )
    if order["size"] == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)
    code = 0
    try:
        PROGRAMS[order["start"]](Path(order["folder"]), **order["options"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    # Started by its path, it would know itself by another name than the tests do. What ranks would
    # import at their first step is imported once.
    import torch._dynamo
    import torch._inductor.config
    import torch.nn.parallel

    import faults

    for name in ("Trainer", "callbacks"):
        getattr(evenly, name)
    faults._serve()
