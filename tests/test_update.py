"""What a step copes with: ranks without samples, odd models, half precision, bad losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly
from evenly.errors import LossError, RankFailedError, SettingError
from evenly.testing import run_ranks
from trainings import difference, digits, made, network, outcome, sgd

Numbers = dict[str, Any]


def weights_gap(one: Numbers, other: Numbers) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def everywhere(program: Any, counts: tuple[int, ...], *args: Any) -> float:
    """The largest difference from one process."""
    one = run_ranks(program, 1, *args)[0]
    return max(difference(rank, one) for n in counts for rank in run_ranks(program, n, *args))


class Choosy(nn.Module):
    """Breaks on an empty batch, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            raise RuntimeError("an empty batch reached the model")
        scores: Tensor = self.layer(x)
        return scores


def test_a_rank_without_samples_runs_no_code_of_the_user() -> None:
    def program() -> Numbers:
        trainer = made(model=Choosy(), batch_size=4)
        trainer.fit(digits(length=5), epochs=3)
        trainer.test(digits(length=2))
        return outcome(trainer)

    assert everywhere(program, (3, 7)) <= 1e-12


def test_a_rank_without_samples_takes_part_where_ranks_meet_in_the_loss() -> None:
    def program(collective_forward: bool | None, length: int) -> Numbers:
        def centred(scores: Tensor, target: Tensor) -> Tensor:
            """Depends on every sample of the step, wherever it is."""
            everyone = evenly.all_gather(scores, grad=True)
            return F.cross_entropy(scores - everyone.mean(0), target)

        trainer = made(loss=centred, batch_size=10, collective_forward=collective_forward)
        trainer.fit(digits(length=length), epochs=2)
        return outcome(trainer)

    # Found out at the first step, where every rank has samples; the last one has a single sample.
    assert everywhere(program, (2, 3), None, 21) <= 1e-12
    assert everywhere(program, (3,), True, 2) <= 1e-12
    with pytest.raises(Exception, match="collective_forward=True"):
        run_ranks(program, 3, None, 2)


class Branching(nn.Module):
    """Uses one of two layers, by the data; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)
        self.never = nn.Linear(64, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        layer = self.first if float(x[0, 20]) > 0.5 else self.second
        scores: Tensor = layer(x)
        return scores


def test_unused_parameters_are_named_with_the_setting_that_allows_them() -> None:
    def program() -> None:
        made(model=Branching()).fit(digits(), epochs=1)

    with pytest.raises(SettingError, match=r"never\.weight.*find_unused_parameters=True"):
        run_ranks(program, 2)


def test_a_parameter_that_no_rank_uses_is_left_alone_as_on_one_process() -> None:
    def program() -> Numbers:
        class Half(Branching):
            def forward(self, x: Tensor) -> Tensor:
                scores: Tensor = self.first(x)
                return scores

        def decaying(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

        trainer = made(
            model=Half(),
            optimizer=decaying,
            find_unused_parameters=True,
            batch_size=4,
            microbatch=2,
        )
        trainer.fit(digits(length=5), epochs=2)
        return outcome(trainer)

    assert everywhere(program, (2, 3)) <= 1e-12


def test_frozen_tied_and_thawed_parameters_train_as_on_one_process() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(16, 64)
            self.decoder.weight = nn.Parameter(self.encoder.weight.t().clone())
            self.again = nn.Linear(64, 16)
            self.again.weight = self.encoder.weight
            self.head = nn.Linear(16, 10)
            self.encoder.bias.requires_grad_(False)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.again(self.decoder(self.encoder(x).relu())))
            return scores

    def program() -> Numbers:
        class Thaw(evenly.callbacks.Callback):
            ranks = "every"

            def on_epoch_end(self, trainer: evenly.Trainer, values: Any) -> None:
                trainer.model.requires_grad_(True)

        model = Tied()
        trainer = made(model=model, callbacks=[Thaw()])
        before = model.encoder.bias.detach().clone()
        trainer.fit(digits(), epochs=1)
        assert torch.equal(before, model.encoder.bias)
        trainer.fit(digits(), epochs=2)
        assert not torch.equal(before, model.encoder.bias)
        return outcome(trainer)

    assert everywhere(program, (2,)) <= 1e-12


@pytest.mark.parametrize("hook", ["on_epoch_start", "on_step_start"])
def test_parameters_may_be_thawed_and_frozen_in_any_hook(hook: str) -> None:
    def program() -> Numbers:
        class Thaw(evenly.callbacks.Callback):
            ranks = "every"

        def toggle(self: Any, trainer: evenly.Trainer) -> None:
            trainer.model[0].requires_grad_(trainer.epoch == 1)  # type: ignore[index]

        setattr(Thaw, hook, toggle)
        model = network()
        model[0].requires_grad_(False)  # type: ignore[index]
        trainer = made(model=model, callbacks=[Thaw()])
        trainer.fit(digits(), epochs=3)
        return outcome(trainer)

    one = run_ranks(program, 1)[0]
    # Plain torch, by hand: only the second epoch trains the first layer.
    model = network()
    optimizer = sgd(model)
    with evenly.open_world():
        loader = evenly.Loader(digits(), batch_size=64, shuffle=True)
        for epoch in range(3):
            model[0].requires_grad_(epoch == 1)  # type: ignore[index]
            for part in loader.epoch(epoch):
                x, y = part.data
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert weights_gap(one["weights"], model.state_dict()) <= 1e-12
    for rank in run_ranks(program, 2):
        assert difference(rank, one) <= 1e-12


def test_a_loss_module_with_parameters_of_its_own_is_trained_with_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(scores * self.scale, target)

    def program() -> Numbers:
        loss = Scaled()

        def both(model: nn.Module) -> torch.optim.Optimizer:
            groups: list[dict[str, Any]] = [
                {"params": model.parameters()},
                {"params": loss.parameters(), "lr": 0.01},
            ]
            return torch.optim.SGD(groups, lr=0.1)

        trainer = made(loss=loss, optimizer=both)
        trainer.fit(digits(), epochs=1)
        found = outcome(trainer)
        found["weights"]["scale"] = loss.scale.detach()
        assert float(loss.scale) != 1.0
        return found

    assert everywhere(program, (3,)) <= 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_all_ranks_hold_the_same_weights_and_scale(
    precision: str,
) -> None:
    def program() -> tuple[Numbers, Any]:
        trainer = made(
            model=network(torch.float32), precision=precision, clip_norm=1.0, microbatch=20
        )
        trainer.fit(digits(torch.float32), epochs=3)
        return outcome(trainer), trainer.mixed.state_dict()

    ranks = run_ranks(program, 2)
    losses = ranks[0][0]["history"]["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert difference(ranks[0][0], ranks[1][0]) == 0
    assert ranks[0][1] == ranks[1][1]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_overflow_on_one_rank_lowers_the_scale_on_all(clip_norm: float | None) -> None:
    def program() -> tuple[Numbers, Any, int]:
        world = evenly.open_world()
        steps = []

        class Overflow(torch.autograd.Function):
            """What a scale that is too large does to a gradient, on one rank and in one step."""

            @staticmethod
            def forward(context: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(context: Any, *gradients: Tensor) -> Tensor:
                steps.append(1)
                bad = world.rank == 1 and len(steps) == 3
                return gradients[0] * (math.inf if bad else 1.0)

        def loss(scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(Overflow.apply(scores), target)

        trainer = made(
            model=network(torch.float32),
            loss=loss,
            check_loss=False,
            precision="fp16",
            clip_norm=clip_norm,
        )
        trainer.fit(digits(torch.float32), steps=30)
        return outcome(trainer), trainer.mixed.state_dict(), trainer.step

    ranks = run_ranks(program, 2)
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1]["scale"] == 2.0**15  # it began with 2 ** 16
    assert difference(ranks[0][0], ranks[1][0]) == 0
    losses = ranks[0][0]["history"]["loss"]
    assert losses[-1] < 0.6 * losses[0]


def test_a_step_with_a_bad_loss_is_left_out_in_half_precision_too() -> None:
    def program() -> tuple[Numbers, Any]:
        x, y = poisoned(117).tensors
        data = TensorDataset(x.float(), y)
        trainer = made(
            model=network(torch.float32), precision="fp16", nonfinite="skip", batch_size=50
        )
        trainer.fit(data, epochs=3)
        return outcome(trainer), trainer.mixed.state_dict()

    for found, scaler in run_ranks(program, 2):
        assert all(bool(t.isfinite().all()) for t in found["weights"].values())
        assert scaler["scale"] == 2.0**13  # three bad steps


def test_clipping_looks_at_what_the_optimizer_holds(world: evenly.World) -> None:
    def last_layer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]

    frozen = network()
    frozen[0].requires_grad_(False)  # type: ignore[index]
    found = []
    for model in (frozen, network()):
        trainer = made(model=model, optimizer=last_layer, clip_norm=0.1)
        trainer.fit(digits(), epochs=1)
        found.append(outcome(trainer)["weights"])
    assert weights_gap(*found) == 0


def test_a_compiled_model_trains_and_is_not_compiled_for_every_size() -> None:
    def program() -> tuple[Numbers, int]:
        import torch._dynamo.testing as dynamo

        counter = dynamo.CompileCounterWithBackend("aot_eager")
        model = torch.compile(network(), backend=counter)
        trainer = made(model=model, batch_size=63, clip_norm=1.0)  # 32 and 31 at two ranks
        trainer.fit(digits(), epochs=2)
        found = outcome(trainer)
        found["weights"] = {
            name.removeprefix("_orig_mod."): t for name, t in found["weights"].items()
        }
        return found, counter.frame_count

    def plain() -> Numbers:
        trainer = made(batch_size=63, clip_norm=1.0)
        trainer.fit(digits(), epochs=2)
        return outcome(trainer)

    one = run_ranks(plain, 1)[0]
    for found, compilations in run_ranks(program, 2, timeout=120):
        assert difference(found, one) <= 1e-12
        assert compilations <= 3


def test_models_that_differ_between_ranks_are_repaired_or_refused_by_name() -> None:
    def program(on_difference: str) -> tuple[Numbers, list[str]]:
        import warnings

        with evenly.open_world() as world, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = network()
            with torch.no_grad():
                model[2].bias += world.rank  # type: ignore[index]
            trainer = made(model=model, on_difference=on_difference)
            return outcome(trainer), [str(one.message) for one in caught]

    ranks = run_ranks(program, 3, "repair")
    expected = network().state_dict()
    for found, _ in ranks:
        assert weights_gap(found["weights"], expected) == 0
    assert "1 of 4 tensors differ between ranks (2.bias); rank 0's were taken" in ranks[0][1][0]
    assert not ranks[1][1]
    with pytest.raises(evenly.errors.DisagreementError, match=r"\(2\.bias\)"):
        run_ranks(program, 2, "refuse")


def test_another_model_on_one_rank_is_refused() -> None:
    def program() -> None:
        with evenly.open_world() as world:
            made(model=nn.Linear(64, 10 + world.rank).double())

    with pytest.raises(evenly.errors.DisagreementError, match="rank 1 has another model"):
        run_ranks(program, 2)


# Losses that cannot be trained on.


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda p, t: F.cross_entropy(p, t, reduction="none"),
            r"shape \(\d+,\) and not one number",
        ),
        (lambda p, t: float(F.cross_entropy(p, t)), "of type float"),
        (lambda p, t: F.cross_entropy(p.detach(), t), "does not depend on any parameter"),
        (lambda p, t: evenly.Total(p.sum(), torch.ones(3)), r"weight of a Total has shape \(3,\)"),
        (lambda p, t: evenly.Total(p.sum() * 0, 0), "sum to 0 over all 64 samples"),
        (nn.CrossEntropyLoss(reduction="none"), "not one number"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_that_is_none_says_what_to_return(loss: Any, message: str, count: int) -> None:
    def program() -> None:
        made(loss=loss, check_loss=False).fit(digits(), epochs=1)

    with pytest.raises(LossError, match=message):
        run_ranks(program, count)


def poisoned(bad: int) -> TensorDataset:
    x, y = digits(length=200).tensors
    x = x.clone()
    x[bad] = math.nan
    return TensorDataset(x, y)


@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_that_is_nan_names_step_rank_and_samples_on_every_rank(count: int) -> None:
    def program() -> tuple[str, int]:
        with evenly.open_world() as world:
            trainer = made(batch_size=50, shuffle=False)
            try:
                trainer.fit(poisoned(117), epochs=1)
            except LossError as error:
                # Every rank raises at the same point, so that all can go on together.
                return str(error), int(evenly.all_reduce(torch.ones(())))
            return "", world.rank

    for message, together in run_ranks(program, count):
        assert "the loss of step 2 of epoch 0 is nan" in message
        assert f"rank {1 if count == 3 else 0}: the loss of samples 1" in message
        assert "the data of samples 117 are not" in message
        assert together == count


def test_a_step_that_is_not_finite_can_be_left_out_by_all_ranks() -> None:
    def program() -> Numbers:
        trainer = made(batch_size=50, shuffle=False, nonfinite="skip")
        trainer.fit(poisoned(117), epochs=1)
        found = outcome(trainer)
        found["history"]["loss"][2] = 0.0
        return found

    def without() -> Numbers:
        x, y = digits(length=200).tensors
        kept = torch.cat([torch.arange(100), torch.arange(150, 200)])
        trainer = made(batch_size=50, shuffle=False)
        trainer.fit(TensorDataset(x[kept], y[kept]), epochs=1)
        return outcome(trainer)

    expected = run_ranks(without, 1)[0]
    for rank in run_ranks(program, 3):
        assert weights_gap(rank["weights"], expected["weights"]) <= 1e-12
        assert rank["history"]["train/loss"] == pytest.approx(expected["history"]["train/loss"])


def test_a_gradient_that_is_not_finite_is_noticed_where_it_is_clipped() -> None:
    def program() -> None:
        def cusp(scores: Tensor, target: Tensor) -> Tensor:
            return (scores * 0).sum(1).abs().sqrt().mean() + F.cross_entropy(scores, target)

        made(loss=cusp, clip_norm=1.0).fit(digits(), epochs=1)

    with pytest.raises(LossError, match="the gradient of step 0 of epoch 0 has norm nan"):
        run_ranks(program, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_at_another_step_is_noticed_in_the_same_exchange_and_named(size: int) -> None:
    def program() -> tuple[str, int]:
        class Skip(evenly.callbacks.Callback):
            ranks = "every"

            def on_step_start(self, trainer: evenly.Trainer) -> None:
                if trainer.world.rank == 1 and trainer.step == 4:  # as if it had left one out
                    object.__setattr__(trainer.part, "step", 5)

        trainer = made(callbacks=[Skip()])
        with pytest.raises(LossError) as caught:
            trainer.fit(digits(), epochs=1)
        return str(caught.value), trainer.step

    for text, step in run_ranks(program, size):
        assert step == 4
        assert "the ranks are not at the same step" in text
        assert "rank 1 at step 5 of epoch 0" in text
        assert ("ranks 0, 2" if size == 3 else "rank 0") + " at step 4 of epoch 0" in text


@pytest.mark.parametrize("size", [2, 3, 7, 283, 640, 1000, 1024, 4096])
def test_equal_tags_never_look_unequal_and_one_other_does_up_to_a_thousand_ranks(size: int) -> None:
    from evenly.training.carrier import _TAGS, Message

    def arrived(tags: list[float]) -> Message:
        mean = torch.zeros(6)
        for tag in tags:  # one after the other, the worst order
            mean += torch.tensor([0.0, 1.0, 0.0, 0.0, tag, tag * tag]) * (1 / size)
        return Message(mean.tolist(), size)

    for place, tag in enumerate(_TAGS):
        assert not arrived([tag] * size).read().apart
        other = _TAGS[(place + 1) % 3]
        assert arrived([other] + [tag] * (size - 1)).read().apart or size > 1000


def test_ranks_can_go_on_with_the_same_model_after_an_error_that_all_had() -> None:
    def program() -> Numbers:
        model = network()
        with evenly.open_world():
            with pytest.raises(LossError, match="sum over samples"):
                made(model=model, loss=summed).fit(digits(), epochs=1)
            trainer = made(model=model)
            trainer.fit(digits(), epochs=1)
            return outcome(trainer)

    assert everywhere_but_one(program) <= 1e-12


def everywhere_but_one(program: Any) -> float:
    """From a program that has nothing to be refused at one process."""

    def plain() -> Numbers:
        trainer = made()
        trainer.fit(digits(), epochs=1)
        return outcome(trainer)

    one = run_ranks(plain, 1)[0]
    return max(difference(rank, one) for rank in run_ranks(program, 2))


# Losses whose mean is not over samples, which nobody recognises.


def ignoring(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, ignore_index=3)


def summed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, reduction="sum")


def mistaken(scores: Tensor, target: Tensor) -> evenly.Total:
    return evenly.Total(F.cross_entropy(scores, target), len(target))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (ignoring, r"not the mean over samples.*return evenly\.Total\(sum, weight\)"),
        (summed, "it is a sum over samples"),
        (mistaken, "give the sum, and not the mean"),
    ],
)
def test_a_loss_whose_mean_is_not_over_samples_is_found_on_the_first_batch(
    loss: Any, message: str
) -> None:
    def program(options: dict[str, Any]) -> None:
        made(loss=loss, **options).fit(digits(), epochs=1)

    with pytest.raises(LossError, match=message):
        run_ranks(program, 2, {})
    with pytest.raises(LossError, match=message):
        run_ranks(program, 1, {"microbatch": 20})
    run_ranks(program, 1, {})  # nothing is split, so nothing can be wrong
    run_ranks(program, 2, {"check_loss": False})


def test_the_check_runs_a_step_function_on_halves_and_lets_random_ones_be() -> None:
    def program(kind: str) -> None:
        def step(model: nn.Module, batch: Any) -> evenly.Output:
            x, y = batch
            noise = torch.randn(()).double() * 0.5 if kind == "random" else 0.0
            scores = model(x) + noise
            loss = ignoring(scores, y) if kind != "plain" else F.cross_entropy(scores, y)
            return evenly.Output(loss=loss * (1 + noise), predictions=scores, target=y)

        made(loss=None, step=step).fit(digits(), epochs=1)

    run_ranks(program, 2, "plain")
    run_ranks(program, 2, "random")
    with pytest.raises(LossError, match="not the mean over samples"):
        run_ranks(program, 2, "ignoring")


def test_the_check_changes_no_number_and_lets_pass_what_takes_no_part_of_a_batch() -> None:
    def program(check_loss: bool) -> Numbers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)).double()

        def in_pairs(scores: Tensor, target: Tensor) -> Tensor:
            """Needs an even number of samples."""
            pairs = scores.view(-1, 2, 10)
            return F.cross_entropy(scores, target) + (pairs[:, 0] - pairs[:, 1]).square().mean()

        trainer = made(model=model, loss=in_pairs, check_loss=check_loss, batch_size=60)
        trainer.fit(digits(length=120), epochs=1)
        return outcome(trainer)

    checked, unchecked = (run_ranks(program, 2, way)[0] for way in (True, False))
    assert difference(checked, unchecked) == 0


def test_losses_near_zero_or_with_random_numbers_raise_no_false_alarm() -> None:
    def program(kind: str) -> int:
        def balanced(scores: Tensor, target: Tensor) -> Tensor:
            """As the first step of a policy gradient: large numbers of both signs."""
            logs = scores.log_softmax(1)
            advantage = torch.linspace(-1, 1, len(target), dtype=scores.dtype) * 100
            ratio = (logs - logs.detach()).exp().mean(1)
            return -(ratio * (advantage - advantage.mean())).mean()

        def noisy(scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(scores + torch.randn_like(scores), target)

        trainer = made(loss=balanced if kind == "balanced" else noisy)
        trainer.fit(digits(), steps=2)
        return trainer.step

    for kind in ("balanced", "noisy"):
        assert run_ranks(program, 2, kind) == [2, 2]


def test_predictions_and_targets_that_pair_up_all_samples_are_refused() -> None:
    def program() -> None:
        model = nn.Linear(64, 1).double()
        data = TensorDataset(digits().tensors[0], digits().tensors[1].double())
        made(model=model, loss=nn.MSELoss()).fit(data, steps=2)

    for count in (1, 2):
        with pytest.raises(LossError, match="each sample is compared with all others"):
            run_ranks(program, count)


# A model, an optimizer or a rank that cannot be trained with.


def test_a_model_without_trainable_parameters_is_refused(world: evenly.World) -> None:
    model = network().requires_grad_(False)
    with pytest.raises(SettingError, match="no parameter that is trained"):
        made(model=model)


def test_an_optimizer_over_another_models_parameters_is_refused(world: evenly.World) -> None:
    other = network()
    with pytest.raises(SettingError, match="4 parameters that are not the model's"):
        made(optimizer=lambda model: sgd(other))
    with pytest.raises(SettingError, match="optimizer= gave a list"):
        made(optimizer=lambda model: [sgd(model)])


def test_an_error_on_one_rank_in_the_middle_of_a_step_ends_all_of_them() -> None:
    def program() -> None:
        def failing(scores: Tensor, target: Tensor) -> Tensor:
            world = evenly.current_world()
            if world.rank == 1 and int(target[0]) == 7:
                raise ZeroDivisionError("a mistake on rank 1")
            return F.cross_entropy(scores, target)

        made(loss=failing).fit(digits(), epochs=1)

    with pytest.raises(ZeroDivisionError, match="a mistake on rank 1"):
        run_ranks(program, 3)


def test_nobody_waits_for_a_rank_whose_program_goes_on_after_its_error() -> None:
    def program() -> str:
        def failing(scores: Tensor, target: Tensor) -> Tensor:
            if evenly.current_world().rank == 1:
                raise ZeroDivisionError("a mistake on rank 1")
            return F.cross_entropy(scores, target)

        import time

        with evenly.open_world():
            begin = time.monotonic()
            try:
                made(loss=failing, check_loss=False).fit(digits(), epochs=1)
            except ZeroDivisionError:
                time.sleep(4)  # it was caught, and the block is not left yet
                return "own"
            except RankFailedError as error:
                return f"{error} after {'long' if time.monotonic() - begin > 3.5 else 'no'} time"
        return ""

    for count in (2, 5):
        found = run_ranks(program, count)
        assert found.pop(1) == "own"
        for text in found:
            assert "a mistake on rank 1 after no time" in text


def test_other_ranks_read_the_error_of_the_one_that_failed() -> None:
    def program() -> str:
        def failing(scores: Tensor, target: Tensor) -> Tensor:
            if evenly.current_world().rank == 1:
                raise ZeroDivisionError("a mistake on rank 1")
            return F.cross_entropy(scores, target)

        try:
            made(loss=failing, check_loss=False).fit(digits(), epochs=1)
        except RankFailedError as error:
            return f"{error}\n{error.traceback}"
        except ZeroDivisionError:
            return "own"
        return ""

    ranks = run_ranks(program, 3)
    assert ranks[1] == "own"
    for text in (ranks[0], ranks[2]):
        assert "rank 1 failed: ZeroDivisionError: a mistake on rank 1" in text
        assert "in failing" in text
