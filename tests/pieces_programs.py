"""Programs in pieces, whose every bit is compared between process counts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import evenly
from evenly.callbacks import EMA, Callback, GradientNorm
from evenly.errors import WorldError

PIECES = 8
# 1437 samples: six steps of 239, in uneven pieces, and one of 3, where five pieces are empty.
BATCH = 239

Bits = dict[str, str]


def bits(tree: Any, name: str = "") -> Bits:
    """A digest of the raw bytes of each tensor and number, by name."""
    if isinstance(tree, Tensor):
        plain = tree.detach().cpu().contiguous().reshape(-1)
        raw = (
            repr((tree.dtype, tuple(tree.shape))).encode()
            + plain.view(torch.uint8).numpy().tobytes()
        )
        return {name: hashlib.blake2b(raw, digest_size=8).hexdigest()}
    if isinstance(tree, dict):
        entries = tree.items()
    elif isinstance(tree, list | tuple) and not all(isinstance(v, int | float) for v in tree):
        entries = enumerate(tree)  # type: ignore[assignment]
    else:
        return {name: repr(tree)}
    return {k: v for key, value in entries for k, v in bits(value, f"{name}.{key}").items()}


def of(trainer: evenly.Trainer, **more: Any) -> Bits:
    """Everything that a run leaves: weights, buffers, optimizer state, every number, and more."""
    assert trainer.optimizer is not None
    return bits(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "history": {name: list(series.values) for name, series in trainer.history.items()},
            **more,
        }
    )


def apart(one: Bits, other: Bits) -> list[str]:
    """The names of what differs."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Interrupt(Callback):
    """Ends a run without a word after some steps, as a kill does."""

    ranks = "every"

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, trainer: evenly.Trainer) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


class Confidence:
    """A metric of our own with float sums, which depend on the order of adding."""

    synced = {"total": "sum", "seen": "sum"}  # noqa: RUF012 - as users write it

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.seen = torch.zeros(()), 0

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.total = self.total + scores.softmax(1).amax(1).sum()
        self.seen += len(target)

    def compute(self) -> float:
        return float(self.total / self.seen)


def train_digits(
    model: str, epochs: int = 3, folder: Path | None = None, stop: int | None = None
) -> Bits:
    """Everything that has a state, and every number that is shown."""
    train, test = evenly.data.digits()
    torch.manual_seed(0)

    def step(model: nn.Module, batch: list[Tensor]) -> evenly.Output:
        scores = model(batch[0])
        loss = F.cross_entropy(scores, batch[1], label_smoothing=0.1)
        return evenly.Output(
            loss=loss, predictions=scores, target=batch[1], log={"top": scores.amax(1).mean()}
        )

    def metrics() -> dict[str, Any]:
        return {
            "accuracy": MulticlassAccuracy(10),
            "auroc": MulticlassAUROC(10),  # keeps a list of samples
            "confidence": Confidence(),
        }

    average = EMA(0.9)
    trainer = evenly.Trainer(
        model={"mlp": mlp, "cnn": cnn}[model](),
        step=step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        scheduler=lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
        metrics=metrics(),
        train_metrics=metrics(),
        callbacks=[average, GradientNorm(), Interrupt(stop)],
        clip_norm=1.0,
        batch_size=BATCH,
        pieces=PIECES,
        folder=folder,
        save_every=2,
        progress=False,
    )
    try:
        trainer.fit(train, test, epochs=epochs, resume="auto" if folder else None)
    except (KeyboardInterrupt, WorldError):  # its own, or the word of another rank's
        return {}
    return of(
        trainer,
        average=average.model.state_dict(),
        test=trainer.test(test),
        predictions=trainer.predict(test),
    )


class Pixels(nn.Module):
    """A small transformer that tells each pixel from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(18, 24), nn.Embedding(64, 24)
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True)
        self.head = nn.Linear(24, 18)
        self.mask: Tensor
        self.register_buffer("mask", torch.full((64, 64), float("-inf")).triu(1))

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        places = self.place(torch.arange(length))
        scores: Tensor = self.head(
            self.block(self.embedding(text) + places, src_mask=self.mask[:length, :length])
        )
        return scores


def pixels(count: int = 700) -> list[Tensor]:
    """Digits as sequences of grey values up to the last that is not 0: of different lengths."""
    texts = (evenly.data.digits()[0].tensors[0][:count] * 16).long() + 1
    return [text[: int((text > 1).nonzero()[-1]) + 1][20:44] for text in texts]


def masked(batch: list[Tensor]) -> Tensor:
    """Padded, with some values hidden at random, as for a language model."""
    text = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    hidden = (torch.rand(text.shape) < 0.05) & (text > 0)
    return torch.where(hidden, 0, text)


def next_pixel(model: nn.Module, text: Tensor) -> evenly.Output:
    scores, target = model(text[:, :-1]), text[:, 1:]
    kept = target != 0
    losses = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    return evenly.Output(
        loss=evenly.Total((losses * kept).sum(), kept.sum()),
        log={"certainty": evenly.Total((scores.softmax(-1).amax(-1) * kept).sum(), kept.sum())},
    )


def train_pixels(epochs: int = 3, **options: Any) -> Bits:
    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=Pixels(),
        step=next_pixel,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        precision="bf16",
        batch_size=116,
        pieces=PIECES,
        collate_fn=masked,
        clip_norm=1.0,
        progress=False,
        **{"workers": 0, **options},
    )
    data = pixels()
    trainer.fit(data, data[:99], epochs=epochs)
    return of(trainer)


def train_all() -> dict[str, Bits]:
    """One after the other, because starting ranks for each would take longer."""
    with evenly.open_world():
        return {
            "an MLP with dropout": train_digits("mlp"),
            "a CNN with BatchNorm and dropout": train_digits("cnn"),
            "a transformer with token weights in bf16": train_pixels(),
        }


def small(count: int = 200, dtype: torch.dtype = torch.float32) -> TensorDataset:
    x, y = evenly.data.digits()[0].tensors
    return TensorDataset(x[:count].to(dtype), y[:count])


def made(**options: Any) -> evenly.Trainer:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": mlp(),
        "loss": F.cross_entropy,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "batch_size": 50,
        "pieces": 4,
        "progress": False,
    }
    return evenly.Trainer(**{**given, **options})
