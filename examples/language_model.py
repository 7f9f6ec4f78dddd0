"""A loss per token: sentences of different lengths, padding that does not count, micro-batches.

evenly run -n 3 examples/language_model.py

A batch's mean over tokens cannot be averaged over ranks or micro-batches, which hold different
numbers of tokens. So the step returns a Total: the sum, and how many tokens it is over. The
weights are then those of one process with whole batches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import evenly

TEXT = """the plan fixes which samples form each step and another function splits a step over ranks
no list is kept and nothing is padded so every rank knows the count of every rank
a loss is a total with a weight and the mean is taken once over all of them
a rank with nothing to do contributes zero with weight zero"""
PADDING = 0


def sentences() -> tuple[list[Tensor], int]:
    """Every run of 4 to 9 words as numbers, from 1 on."""
    lines = [line.split() for line in TEXT.splitlines()]
    numbers = {word: i for i, word in enumerate(sorted({w for line in lines for w in line}), 1)}
    coded = [torch.tensor([numbers[word] for word in line]) for line in lines]
    runs = [
        line[start : start + length]
        for line in coded
        for length in range(4, 10)
        for start in range(len(line) - length)
    ]
    return runs, len(numbers) + 1


def padded(batch: list[Tensor]) -> Tensor:
    return pad_sequence(batch, batch_first=True, padding_value=PADDING)


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, words)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.memory(self.embedding(text))
        scores: Tensor = self.head(hidden)
        return scores


def step(model: nn.Module, text: Tensor) -> evenly.Output:
    scores, target = model(text[:, :-1]), text[:, 1:]
    kept = target != PADDING
    losses = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    right = (scores.argmax(2) == target) & kept
    return evenly.Output(
        loss=evenly.Total((losses * kept).sum(), kept.sum()),
        log={"right": evenly.Total(right.sum(), kept.sum())},  # shown as a mean over tokens
    )


def train(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], evenly.Trainer]:
    data, words = sentences()
    torch.manual_seed(0)
    trainer = evenly.Trainer(
        model=Model(words).to(dtype),
        step=step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch_size=32,
        microbatch=5,
        clip_norm=1.0,
        collate_fn=padded,
        progress=False,
    )
    trainer.fit(data, epochs=4)
    return [parameter.detach() for parameter in trainer.model.parameters()], trainer


if __name__ == "__main__":
    history = train()[1].history
    with evenly.on_rank(0) as mine:
        if mine:
            loss, right = (history[f"train/{name}"].values[-1] for name in ("loss", "right"))
            print(f"loss per token {loss:.5f}, {right:.1%} of the next words right")
