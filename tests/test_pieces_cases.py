"""What steps in pieces cope with, what they refuse, and what they promise besides bits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import evenly
from evenly.callbacks import Callback
from evenly.errors import EvenlyWarning, LossError, SettingError, WorldError
from evenly.pieces import layout
from evenly.pieces.holding import tell_of_differences
from evenly.plan import split
from evenly.testing import run_ranks
from evenly.training.averages import PieceAverages
from pieces_programs import Bits, Interrupt, apart, made, mlp, of, small, train_pixels


def everywhere(program: Any, counts: tuple[int, ...], *args: Any) -> list[str]:
    """The names of what is not as on one process."""
    one = run_ranks(program, 1, *args)[0]
    return [
        name for n in counts for rank in run_ranks(program, n, *args) for name in apart(rank, one)
    ]


def test_the_gradient_is_that_of_the_mean_over_the_step() -> None:
    def program(pieces: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
        trainer = made(model=model, pieces=pieces)
        trainer.fit(small(120, torch.float64), epochs=2)
        return {n: t.detach() for n, t in trainer.model.named_parameters()}

    plain = run_ranks(program, 1, None)[0]
    for rank in run_ranks(program, 3, 4):
        assert max(float((rank[n] - plain[n]).abs().max()) for n in plain) <= 1e-12


class Odd(nn.Module):
    """A layer by the data, one for nobody, a frozen one, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)
        self.never, self.frozen = nn.Linear(64, 10), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((3,), float("-inf")))
        self.register_buffer("large", torch.full((200, 200), 0.1))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.calls: Tensor
        self.mask: Tensor
        self.large: Tensor
        self.cache: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # another tensor
            self.calls += 1
            self.cache = torch.zeros(len(x))  # of another shape
        layer = self.first if float(x[0, 20]) > 0.5 else self.second
        scores: Tensor = layer(self.frozen(x) - self.mean)
        return scores


def test_unused_and_frozen_parameters_and_odd_buffers() -> None:
    def program(length: int) -> Bits:
        def decaying(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

        class Thaw(Callback):
            ranks = "every"

            def on_epoch_end(self, trainer: evenly.Trainer, values: Any) -> None:
                trainer.model.frozen.requires_grad_(True)

        torch.manual_seed(0)
        model = Odd()
        before = model.never.weight.detach().clone()
        trainer = made(model=model, optimizer=decaying, batch_size=7, callbacks=[Thaw()])
        trainer.fit(small(length), epochs=2)
        assert torch.equal(model.never.weight, before), "nobody used it, and it decayed"
        assert int(model.calls) == trainer.step
        assert torch.equal(model.large, torch.full((200, 200), 0.1))
        assert bool(torch.isinf(model.mask).all())
        assert model.cache.numel() == 0
        return of(trainer)

    assert everywhere(program, (2, 3, 4), 23) == []


def test_running_statistics_are_those_of_the_pieces_by_samples() -> None:
    def program() -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))
        made(model=model, batch_size=26, shuffle=False).fit(small(26), steps=1)
        return dict(model[0].state_dict())

    x = small(26).tensors[0]
    means, variances = torch.zeros(64), torch.zeros(64)
    for piece in range(4):
        start, stop = split(26, piece, 4)
        means += (stop - start) / 26 * x[start:stop].mean(0)
        variances += (stop - start) / 26 * x[start:stop].var(0)
    for rank in run_ranks(program, 3):
        assert torch.allclose(rank["running_mean"], 0.1 * means, atol=1e-6)
        assert torch.allclose(rank["running_var"], 0.9 + 0.1 * variances, atol=1e-6)
        assert int(rank["num_batches_tracked"]) == 1


def test_gradients_in_many_buckets_and_of_checkpointed_layers() -> None:
    def program(reentrant: bool) -> Bits:
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
                self.head = nn.Linear(64, 10)

            def forward(self, x: Tensor) -> Tensor:
                x = x.requires_grad_()
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                    x = F.dropout(checkpoint(layer, x, use_reentrant=reentrant), 0.1, self.training)
                scores: Tensor = self.head(x)
                return scores

        before, layout._BUCKET = layout._BUCKET, 5000
        try:
            torch.manual_seed(0)
            trainer = made(model=Checkpointed(), precision="bf16" if reentrant else "fp32")
            trainer.fit(small(120), epochs=2)
            return of(trainer)
        finally:
            layout._BUCKET = before

    assert everywhere(program, (3,), False) == []
    assert everywhere(program, (2, 4), True) == []


@pytest.mark.parametrize("precision", ["fp16"])
def test_loss_scaling_and_losses_that_are_modules(precision: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(scores * self.scale, target)

    def program() -> Bits:
        loss = Scaled()
        trainer = made(
            loss=loss,
            precision=precision,
            optimizer=lambda model: torch.optim.SGD([*model.parameters(), loss.scale], lr=0.1),
        )
        trainer.fit(small(120), epochs=2)
        return of(trainer, scaler=trainer.mixed.state_dict(), scale=loss.scale.detach())

    assert everywhere(program, (3,)) == []


def test_a_loss_that_is_nan_is_skipped_alike_and_a_wish_to_stop_reaches_all() -> None:
    def program() -> Bits:
        class Stop(Callback):
            ranks = "every"

            def on_step_end(self, trainer: evenly.Trainer) -> None:
                last = trainer.world.rank == trainer.world.size - 1
                if trainer.step == 5 and last:
                    trainer.stop()

        data = small(200)
        data.tensors[0][117] = float("nan")
        trainer = made(nonfinite="skip", shuffle=False, callbacks=[Stop()])
        with contextlib.nullcontext() if trainer.world.rank else pytest.warns(match="117 are not"):
            trainer.fit(data, epochs=3)
        assert trainer.step == 6
        return of(trainer)

    assert everywhere(program, (3,)) == []

    def stops() -> str:
        data = small(200)
        data.tensors[0][117] = float("nan")
        with pytest.raises(LossError) as caught:
            made(shuffle=False).fit(data, epochs=1)
        return str(caught.value)

    assert all("the data of samples 117 are not" in text for text in run_ranks(stops, 2))


def test_pieces_draw_different_numbers_and_python_and_numpy_are_seeded_too() -> None:
    def program() -> tuple[list[float], Bits]:
        import random

        import numpy as np

        drawn: list[float] = []

        class Draws(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = mlp()

            def forward(self, x: Tensor) -> Tensor:
                # Only some pieces draw from some generators.
                noise = random.random() if float(x[0, 20]) > 0.5 else np.random.rand()
                drawn.append(noise)
                scores: Tensor = self.inner(x + 0.1 * noise)
                return scores

        trainer = made(model=Draws())
        trainer.fit(small(120), epochs=2)
        return drawn, of(trainer, predictions=trainer.predict(small(99)))

    drawn, one = run_ranks(program, 1)[0]
    assert len(set(drawn)) == len(drawn)
    for rank in run_ranks(program, 3):
        assert apart(rank[1], one) == []


def test_metrics_that_keep_samples_have_them_in_the_order_of_the_data_set(tmp_path: Path) -> None:
    class Kept(CatMetric):
        def update(self, scores: Tensor, target: Tensor) -> None:  # type: ignore[override]
            super().update(target.float())

    def program(folder: Path, stop: int | None) -> Any:
        values: list[Any] = []

        class Keep(Callback):
            ranks = "every"

            def on_epoch_end(self, trainer: evenly.Trainer, given: Any) -> None:
                values.append(given["train/kept"])

        group = MetricCollection([MulticlassAccuracy(10), MulticlassF1Score(10)])
        trainer = made(
            train_metrics={"kept": Kept(), "group": group},
            callbacks=[Interrupt(stop), Keep()],
            folder=folder,
            save_every=1,
        )
        with contextlib.suppress(KeyboardInterrupt, WorldError):
            trainer.fit(small(120), epochs=1, resume="auto")
        return values

    wanted = small(120).tensors[1].float()
    assert torch.equal(run_ranks(program, 3, tmp_path / "one", None)[0][0], wanted)
    run_ranks(program, 4, tmp_path / "two", 2)
    assert torch.equal(run_ranks(program, 2, tmp_path / "two", None)[0][0], wanted)


def test_logged_totals_are_added_along_the_tree(world: evenly.World) -> None:
    averages = PieceAverages(3, range(3))
    for piece, value in enumerate((1e16, 1.0, 1.0)):
        averages.add("x", evenly.Total(value, 1.0), piece=piece)
    assert averages.gathered()["x"] == ((1e16 + 1.0) + 1.0) / 3
    averages = PieceAverages(4, range(4))
    for piece, value in enumerate((1e16, 1.0, 1.0, 1.0)):
        averages.add("x", evenly.Total(value, 1.0), piece=piece)
    assert averages.gathered()["x"] == ((1e16 + 1.0) + 2.0) / 4


def test_neither_workers_nor_several_threads_change_that() -> None:
    one = run_ranks(train_pixels, 1, 1)[0]
    for rank in run_ranks(train_pixels, 2, 1, workers=2):
        assert apart(rank, one) == []

    def program() -> Bits:
        trainer = made(threads=2, pieces=2)
        trainer.fit(small(60), epochs=1)
        return of(trainer)

    assert everywhere(program, (2,)) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pieces": 0}, "pieces=0: give a whole number"),
    ({"microbatch": 5}, "a piece is already what a process holds at once"),
    ({"collective_forward": True}, "ranks cannot meet in the forward pass"),
    ({"pieces": None, "threads": 2}, "threads=2 goes with pieces="),
    ({"model": nn.Sequential(nn.Linear(64, 10), evenly.SyncBatchNorm(10))}, "1 is a SyncBatchNorm"),
    ({"model": nn.Sequential(nn.Linear(64, 10), nn.SyncBatchNorm(10))}, "1 is a SyncBatchNorm"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_the_same_to_the_bit_is_refused(
    world: evenly.World, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        made(**options)


def test_more_processes_than_pieces_are_refused() -> None:
    with pytest.raises(SettingError, match=r"pieces=2 cannot be given to 3 processes"):
        run_ranks(lambda: made(pieces=2), 3)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ours", [True, False])
def test_ranks_that_meet_in_the_loss_are_refused_with_the_reason(count: int, ours: bool) -> None:
    if count == 1 and not ours:
        return  # torch has no process group there to meet in

    def program() -> None:
        def gathering(scores: Tensor, target: Tensor) -> Tensor:
            if ours:
                evenly.all_gather(scores, grad=True)
            else:
                dist.all_reduce(torch.zeros(1))
            return F.cross_entropy(scores, target)

        made(loss=gathering).fit(small(50), epochs=1)

    with pytest.raises(SettingError, match="each piece of a step is computed alone"):
        run_ranks(program, count)


def test_threads_are_held_while_pieces_run_and_restored(world: evenly.World) -> None:
    seen: list[int] = []

    class Look(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        made(threads=1, callbacks=[Look()]).fit(small(50), steps=1)
        made(threads=3, callbacks=[Look()]).fit(small(50), steps=1)
        assert seen == [1, 3]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("other", [{"pieces": 2}, {"pieces": None}, {"threads": 2}])
def test_a_run_does_not_go_on_with_other_pieces_or_threads(
    world: evenly.World, tmp_path: Path, other: dict[str, Any]
) -> None:
    made(folder=tmp_path).fit(small(50), steps=1)
    name = next(iter(other))
    with pytest.raises(SettingError, match=rf"{name}=\d and this one {name}=.*other bits"):
        made(folder=tmp_path, **other).fit(small(50), steps=2, resume="auto")


def test_ranks_that_compute_differently_are_named(world: evenly.World) -> None:
    here = {"torch": "2", "threads": 1, "instructions": "AVX2", "device": "cpu"}
    ranks = [here, {**here, "instructions": "AVX512"}]
    with (
        patch("evenly.pieces.holding.all_gather_object", return_value=ranks),
        pytest.warns(EvenlyWarning, match=r"rank 0 has instruction set AVX2 \(rank 1: AVX512\)"),
    ):
        tell_of_differences(here)


def test_going_on_with_another_instruction_set_is_said(world: evenly.World, tmp_path: Path) -> None:
    with patch("torch.backends.cpu.get_cpu_capability", return_value="other"):
        made(folder=tmp_path).fit(small(50), steps=1)
    with pytest.warns(EvenlyWarning, match="instruction set other"):
        made(folder=tmp_path).fit(small(50), steps=2, resume="auto")


def test_one_step_of_many_pieces_holds_few_copies_of_the_gradients(world: evenly.World) -> None:
    held: list[int] = []

    class Count(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            ledger = trainer._update._ledger  # type: ignore[union-attr]
            held.append(len(ledger.stack) + len(ledger._free))

    trainer = made(pieces=64, batch_size=64, callbacks=[Count()])
    trainer.fit(small(128), epochs=1)
    assert held == [6, 6]
