"""A training that hangs where it is told to: ``hanging.py PHASE:RANK:STEP:HOW:SECONDS ...``.

The run has 3 epochs of 4 steps, an evaluation and a checkpoint after each. STEP counts the steps
made before. HOW is "sleep", "loop" (Python), "stop" (SIGSTOP) or "lock" (compiled code that holds
Python's lock, for ever).
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenly
from evenly.callbacks import Callback

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
# What is planted in each attempt, separated by "/".
PLAN = dict(enumerate(" ".join(sys.argv[1:]).split("/"))).get(ATTEMPT, "")
PLANTED = {
    (phase, int(rank), int(step)): (how, float(seconds))
    for phase, rank, step, how, seconds in (word.split(":") for word in PLAN.split())
}
RANK = int(os.environ["RANK"])


def hang(phase: str, step: int) -> None:
    """Hang, once, if that is planted here."""
    how, seconds = PLANTED.pop((phase, RANK, step), ("", 0.0))
    if not how:
        return
    print(f"planted {phase} {RANK} {step}", flush=True)
    end = time.monotonic() + seconds
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "lock":
        re.match("(a*)*b", "a" * 60)
    elif how == "sleep":
        time.sleep(seconds)
    while time.monotonic() < end:
        pass


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        hang(self.phase, trainer.step)
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Hang(Callback):
    ranks = "every"

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        hang("callback", trainer.step - 1)

    def state_dict(self) -> dict[str, Any]:
        hang("saving", trainer.step)
        return {}


def loss(predictions: Tensor, target: Tensor) -> Tensor:
    hang("step" if trainer.model.training else "evaluation", trainer.step)
    return F.cross_entropy(predictions, target)


def forward(model: nn.Module, batch: Any) -> Tensor:
    if predicting:
        hang("prediction", 12)
    scores: Tensor = model(batch[0])
    return scores


predicting = False
hang("start-up", 0)
torch.manual_seed(0)
trainer = evenly.Trainer(
    model=nn.Linear(4, 2),
    loss=loss,
    forward=forward,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    batch_size=8,
    workers=0,
    callbacks=[Hang()],
    progress=False,
    folder=Path("run"),
    device="cpu",
)
hang("program", 0)
trainer.fit(Samples("data"), Samples("evaluation-data"), epochs=3, resume="auto")
predicting = True
trainer.predict(Samples("prediction-data"))
print("finished", flush=True)
