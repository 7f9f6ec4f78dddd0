"""Programs written with the Trainer, which tests run at several process counts."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly

Numbers = dict[str, Any]


def digits(dtype: torch.dtype = torch.float64, length: int | None = None) -> TensorDataset:
    x, y = evenly.data.digits()[0].tensors
    return TensorDataset(x[:length].to(dtype), y[:length])


def network(dtype: torch.dtype = torch.float64, *, batchnorm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [evenly.SyncBatchNorm(32)] if batchnorm else []
    return nn.Sequential(nn.Linear(64, 32), *norm, nn.ReLU(), nn.Linear(32, 10)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def made(**options: Any) -> evenly.Trainer:
    """A trainer of the digits, in float64, quiet, with these settings changed."""
    given: dict[str, Any] = {
        "model": network(),
        "loss": F.cross_entropy,
        "optimizer": sgd,
        "batch_size": 64,
        "progress": False,
    }
    return evenly.Trainer(**{**given, **options})


def outcome(trainer: evenly.Trainer) -> Numbers:
    """What is compared: the weights and every number in the history."""
    return {
        "weights": {name: t.detach().clone() for name, t in trainer.model.state_dict().items()},
        "history": {name: list(series.values) for name, series in trainer.history.items()},
    }


def train_digits(
    dtype: torch.dtype = torch.float64,
    length: int | None = None,
    epochs: int = 3,
    optimizer: str = "sgd",
    batchnorm: bool = False,
    **options: Any,
) -> Numbers:
    torch.set_num_threads(1)
    model = network(dtype, batchnorm=batchnorm)
    trainer = made(model=model, optimizer=OPTIMIZERS[optimizer], **options)
    trainer.fit(digits(dtype, length), epochs=epochs)
    return outcome(trainer)


def train_each(cases: list[dict[str, Any]]) -> list[Numbers]:
    """One training after the other, because starting ranks for each would take longer."""
    with evenly.open_world():
        return [train_digits(**case) for case in cases]


# A language model over sentences of different lengths; padding is not to count.

PADDING = 0


def sentences(count: int = 61, words: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, words, (length,), generator=generator) for length in lengths]


def padded(batch: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PADDING)


class LanguageModel(nn.Module):
    def __init__(self, words: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 16)
        self.memory = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, words)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.memory(self.embedding(text))[0])
        return scores


def next_words(model: nn.Module, text: Tensor) -> evenly.Output:
    """The loss per real token, as a Total."""
    scores = model(text[:, :-1])
    target = text[:, 1:]
    kept = target != PADDING
    losses = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    return evenly.Output(
        loss=evenly.Total((losses * kept).sum(), kept.sum()),
        predictions=scores,
        target=target,
        log={"tokens": evenly.Total(kept.sum(), len(text))},
    )


def train_language_model(microbatch: int | None = None, epochs: int = 3) -> Numbers:
    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=LanguageModel().double(),
        step=next_words,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        batch_size=16,
        microbatch=microbatch,
        collate_fn=padded,
        workers=0,
        clip_norm=1.0,
        progress=False,
    )
    trainer.fit(sentences(), epochs=epochs)
    return outcome(trainer)


def weighted_losses() -> dict[str, Any]:
    """Losses that do not divide by the number of samples."""
    weights = torch.linspace(0.1, 3.0, 10, dtype=torch.float64)
    partial: Callable[..., Any] = functools.partial
    return {
        "class weights": nn.CrossEntropyLoss(weight=weights),
        "ignored class": partial(F.cross_entropy, ignore_index=3),
        "label smoothing": nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1),
        "all of them": partial(
            F.cross_entropy, weight=weights, ignore_index=3, label_smoothing=0.2
        ),
        "a sum": nn.CrossEntropyLoss(reduction="sum"),
    }


def train_with_losses(microbatch: int | None = None) -> dict[str, Numbers]:
    found = {}
    with evenly.open_world():
        for name, loss in weighted_losses().items():
            rate = 0.002 if name == "a sum" else 0.1
            trainer = made(
                loss=loss,
                microbatch=microbatch,
                optimizer=functools.partial(_plain, rate=rate),
            )
            trainer.fit(digits(), epochs=2)
            found[name] = outcome(trainer)
    return found


def _plain(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of any weight or number; both must have the same ones."""
    assert one["weights"].keys() == other["weights"].keys()
    assert one["history"].keys() == other["history"].keys()
    gaps = [0.0]
    for name, weight in one["weights"].items():
        gaps.append(float((weight.double() - other["weights"][name].double()).abs().max()))
    for name, values in one["history"].items():
        assert len(values) == len(other["history"][name]), name
        gaps += [abs(a - b) for a, b in zip(values, other["history"][name], strict=True)]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)  # max overlooks nan
