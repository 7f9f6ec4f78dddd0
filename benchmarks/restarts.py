"""How soon a run goes on after a rank has died: seen, relaunched, first step again.

    python benchmarks/restarts.py [restarts per cause]

The cold start is that of the same program: from starting `evenly run` to the end of its first step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys, time
BORN = time.time()
import torch
import torch.nn.functional as F
import evenly

folder, causes = sys.argv[1], sys.argv[2:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
last = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])

def note(what, when=None):
    line = json.dumps({"what": what, "attempt": attempt, "rank": os.environ["RANK"],
                       "time": when or time.time()})
    with open(folder + "/notes", "a") as file:
        file.write(line + "\\n")

def die():
    note("death")
    cause = causes[attempt]
    if cause == "SIGKILL":
        os.kill(os.getpid(), 9)
    if cause == "os._exit":
        os._exit(3)
    if cause == "MemoryError":
        raise MemoryError("planted")
    raise ValueError("planted")

class Watch(evenly.callbacks.Callback):
    ranks = "every"
    first = True

    def on_step_end(self, trainer):
        if self.first:
            self.first = False
            note("step")
        if trainer.step == 4 * (attempt + 1) and attempt < last and trainer.world.rank == 1:
            die()

note("start", BORN)
train, _ = evenly.data.digits()
torch.manual_seed(0)
trainer = evenly.Trainer(
    model=torch.nn.Linear(64, 10), loss=F.cross_entropy,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    batch_size=64, callbacks=[Watch()], progress=False, folder=folder + "/run", save_every=1,
)
trainer.fit(train, steps=4 * (last + 1) + 2, resume="auto")
"""
CAUSES = ("SIGKILL", "exception", "os._exit", "MemoryError")


def measure(causes: Sequence[str], processes: int = 2) -> dict[str, Any]:
    """Seconds from each death to the new processes and to their first step; the cold start; and
    what the user read. A death is the moment of the kill, or of the raise.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(PROGRAM)
        command = [sys.executable, "-m", "evenly", "run", "-n", str(processes)]
        command += ["--restarts", str(len(causes)), str(script), folder, *causes]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        begin = time.time()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=60 + 30 * len(causes),
            env=environment,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{causes}: exit code {done.returncode}\n{done.stderr}")
        notes = [json.loads(line) for line in (Path(folder) / "notes").read_text().splitlines()]

    def times(what: str, attempt: int) -> list[float]:
        return [n["time"] for n in notes if (n["what"], n["attempt"]) == (what, attempt)]

    cold = max(times("step", 0)) - begin
    found: dict[str, Any] = {"relaunch": [], "step": [], "cold": cold, "errors": done.stderr}
    for attempt in range(len(causes)):
        (death,) = times("death", attempt)
        found["relaunch"].append(max(times("start", attempt + 1)) - death)
        found["step"].append(max(times("step", attempt + 1)) - death)
    return found


def main() -> None:
    restarts = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{restarts} restarts each, 2 processes; seconds")
    print(f"{'cause':12} {'relaunched':>18} {'next step':>18} {'cold':>6} {'ratio':>6}")
    for cause in CAUSES:
        found = measure([cause] * restarts)
        cells = [
            f"{statistics.median(found[name]):.2f} (max {max(found[name]):.2f})"
            for name in ("relaunch", "step")
        ]
        ratio = statistics.median(found["step"]) / found["cold"]
        print(f"{cause:12} {cells[0]:>18} {cells[1]:>18} {found['cold']:6.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
