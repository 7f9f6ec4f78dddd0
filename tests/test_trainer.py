"""The Trainer gives the numbers of one process on any number of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import evenly
from evenly.testing import run_ranks
from trainings import (
    LanguageModel,
    difference,
    digits,
    made,
    next_words,
    padded,
    sentences,
    train_digits,
    train_each,
    train_language_model,
    train_with_losses,
    weighted_losses,
)

COUNTS = (2, 3, 4, 7)

CASES: list[dict[str, Any]] = [
    {"batch_size": 64},
    {"batch_size": 48, "clip_norm": 0.5, "microbatch": 7},
    {"batch_size": 100, "microbatch": 7},
    {"batch_size": 100, "optimizer": "adamw", "clip_norm": 0.5},
    {"batch_size": 48, "optimizer": "adamw"},
    {"batch_size": 64, "optimizer": "adamw", "microbatch": 7, "clip_norm": 0.5},
    {"batch_size": 5, "length": 5},
    {"batch_size": 64, "batchnorm": True},
]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return run_ranks(train_each, 1, CASES)[0]


@pytest.mark.parametrize("count", COUNTS)
def test_weights_and_losses_are_those_of_one_process(
    alone: list[dict[str, Any]], count: int
) -> None:
    for rank in run_ranks(train_each, count, CASES, timeout=150):
        gaps = [difference(here, there) for here, there in zip(rank, alone, strict=True)]
        assert max(gaps) <= 1e-12, dict(zip(map(str, CASES), gaps, strict=True))


def test_the_loss_is_logged_at_every_step_and_learns(alone: list[dict[str, Any]]) -> None:
    losses = alone[0]["history"]["loss"]
    assert len(losses) == 3 * 23
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("count", [2, 7])
def test_in_float32_sgd_differs_by_rounding_only(count: int) -> None:
    one = run_ranks(train_digits, 1, torch.float32)[0]
    for rank in run_ranks(train_digits, count, torch.float32):
        assert difference(rank, one) <= 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_token_weighted_loss_in_micro_batches_is_that_of_whole_batches(count: int) -> None:
    whole = run_ranks(train_language_model, 1)[0]
    for rank in run_ranks(train_language_model, count, 3):
        assert difference(rank, whole) <= 1e-12


@pytest.mark.parametrize(("count", "microbatch"), [(1, 7), (2, None), (3, 7), (7, None)])
def test_losses_that_divide_by_something_else_have_their_true_denominator(
    count: int, microbatch: int | None
) -> None:
    one = run_ranks(train_with_losses, 1)[0]
    for rank in run_ranks(train_with_losses, count, microbatch):
        for name in weighted_losses():
            assert difference(rank[name], one[name]) <= 1e-12, name


def test_one_step_has_the_gradient_that_plain_torch_computes() -> None:
    """Not only equal to itself: the reference is written out without Evenly."""

    def one_step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = LanguageModel().double()
        trainer = evenly.Trainer(
            model=model,
            step=next_words,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=61,
            microbatch=4,
            shuffle=False,
            collate_fn=padded,
            progress=False,
        )
        trainer.fit(sentences(), steps=1)
        return [p.detach() for p in model.parameters()]

    torch.manual_seed(0)
    model = LanguageModel().double()
    text = padded(sentences())
    scores = model(text[:, :-1]).transpose(1, 2)
    F.cross_entropy(scores, text[:, 1:], ignore_index=0).backward()
    expected = [p.detach() - p.grad for p in model.parameters() if p.grad is not None]
    for rank in run_ranks(one_step, 3):
        for found, wanted in zip(rank, expected, strict=True):
            assert float((found - wanted).abs().max()) <= 1e-12


def test_nothing_is_exchanged_beyond_what_ddp_exchanges() -> None:
    def collectives(ours: bool) -> list[int]:
        with evenly.open_world() as world:
            seen: list[int] = []
            if ours:

                class Count(evenly.callbacks.Callback):
                    ranks = "every"

                    def on_step_end(self, trainer: evenly.Trainer) -> None:
                        seen.append(world.collectives)

                made(callbacks=[Count()], loss=torch.nn.CrossEntropyLoss(ignore_index=3)).fit(
                    digits(), steps=10
                )
            else:
                from trainings import network, sgd

                model = torch.nn.parallel.DistributedDataParallel(network())
                optimizer = sgd(model)
                for part in evenly.Loader(digits(), batch_size=64).epoch(0):
                    x, y = part.data
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(world.collectives)
                    if len(seen) == 10:
                        break
                del model
            return [b - a for a, b in pairwise(seen[1:])]

    plain, ours = (run_ranks(collectives, 2, way) for way in (False, True))
    assert plain == ours
    assert set(plain[0]) == {1}


def test_a_second_fit_goes_on_where_the_first_ended() -> None:
    def twice() -> dict[str, Any]:
        from trainings import outcome

        trainer = made()
        trainer.fit(digits(), steps=30)
        assert (trainer.epoch, trainer.position) == (1, 7)
        trainer.fit(digits(), epochs=3)
        return outcome(trainer)["weights"]  # type: ignore[no-any-return]

    one = run_ranks(train_digits, 1)[0]["weights"]
    for rank in run_ranks(twice, 2):
        assert max(float((rank[name] - one[name]).abs().max()) for name in one) <= 1e-12
