"""The same bits on any number of processes. The checksum is the same in all of these.

python examples/same_bits.py
evenly run -n 3 examples/same_bits.py
evenly run -n 8 examples/same_bits.py
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

import evenly


def train(epochs: int = 3) -> str:
    """A checksum of the weights, the running statistics, and the losses of all steps."""
    data, test = evenly.data.digits()
    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=nn.Sequential(
            nn.Linear(64, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
        ),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch_size=128,
        pieces=8,
        clip_norm=1.0,
        progress=False,
    )
    trainer.fit(data, validate=test, epochs=epochs)
    found = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    for series in trainer.history.values():
        found.update(bytes(series.values))
    return found.hexdigest()[:16]


if __name__ == "__main__":
    checksum = train()
    evenly.on_rank(0)(print)(f"{evenly.current_world().size} processes: {checksum}")
