"""The Trainer. Run it in any of these ways; every number printed is the same.

python examples/digits_trainer.py
evenly run -n 3 examples/digits_trainer.py
torchrun --nproc-per-node 3 examples/digits_trainer.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import evenly

train, test = evenly.data.digits()
torch.manual_seed(0)

trainer = evenly.Trainer(
    model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    loss=F.cross_entropy,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
    batch_size=64,
    seed=0,
)
trainer.fit(train, validate=test, epochs=10)
values = trainer.test(test)
logits = trainer.predict(test)  # in data-set order, on every rank

with evenly.on_rank(0) as mine:
    if mine:
        right = int((logits.argmax(1) == test.tensors[1]).sum())
        print(f"loss {values['loss']:.5f}, accuracy {values['accuracy']:.4%}, {right} right")
