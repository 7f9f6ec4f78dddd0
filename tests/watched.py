"""A training to be watched: ``watched.py FOLDER SECONDS``, a step every SECONDS, for minutes."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import evenly
from evenly.callbacks import Callback


class Slowly(Callback):
    ranks = "every"

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        time.sleep(float(sys.argv[2]))


train, test = evenly.data.digits()
torch.manual_seed(0)
trainer = evenly.Trainer(
    model=nn.Linear(64, 10),
    loss=F.cross_entropy,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    batch_size=64,
    folder=sys.argv[1],
    callbacks=[Slowly()],
    progress=False,
    save_every=50,
)
trainer.fit(train, validate=test, epochs=1000, resume="auto")
