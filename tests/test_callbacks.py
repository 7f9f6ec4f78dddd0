"""Callbacks: where they run, what the stock ones do, and what happens when one fails."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenly
from evenly.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    GradientCapture,
    GradientNorm,
    LearningRateMonitor,
    Progress,
    Throughput,
    Timer,
)
from evenly.callbacks.base import HOOKS
from evenly.errors import SettingError
from evenly.testing import run_ranks
from trainings import digits, made, network, outcome


class Diary(Callback):
    """Writes down which hooks it sees."""

    ranks = "every"

    def __init__(self) -> None:
        self.seen: list[str] = []


for name in HOOKS:

    def write(self: Any, trainer: Any, *args: Any, name: str = name) -> None:
        stage = f" {args[0]}" if name.startswith("on_evaluation") else ""
        self.seen.append(f"{name}{stage}")

    setattr(Diary, name, write)


def test_hooks_come_in_the_order_that_fit_documents(world: evenly.World) -> None:
    diary = Diary()
    trainer = made(callbacks=[diary], batch_size=50)
    trainer.fit(digits(length=100), {"easy": digits(length=9)}, epochs=1, validate_every=2)
    step = ["on_step_start", "on_gradients", "on_step_end"]
    assert diary.seen == [
        "on_run_start",
        "on_epoch_start",
        *step,
        *step,
        "on_evaluation_start easy",
        "on_evaluation_end easy",
        "on_epoch_end",
        "on_run_end",
    ]
    documented = evenly.Trainer.fit.__doc__ or ""
    assert all(hook in documented for hook in HOOKS)


def test_a_callback_that_does_not_say_where_it_runs_is_refused_among_several() -> None:
    class Mute(Callback):
        def on_step_end(self, trainer: evenly.Trainer) -> None: ...

    class Plain:
        def on_step_end(self, trainer: Any) -> None: ...

    def program(kind: type) -> None:
        made(callbacks=[kind()]).fit(digits(), steps=1)

    for kind in (Mute, Plain):
        with pytest.raises(SettingError, match=r"does not say on which ranks.*ranks = 'one'"):
            run_ranks(program, 2, kind)
        run_ranks(program, 1, kind)


def test_what_is_no_callback_is_refused(world: evenly.World) -> None:
    with pytest.raises(SettingError, match="has none of the hooks"):
        made(callbacks=[object()])
    with pytest.raises(SettingError, match="holds the class EarlyStopping; give an object"):
        made(callbacks=[EarlyStopping])


def test_a_callback_on_one_rank_runs_on_rank_0_and_cannot_make_others_wait() -> None:
    class Once(Callback):
        ranks = "one"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            seen.append(trainer.world.rank)

    class Meeting(Once):
        def on_run_end(self, trainer: evenly.Trainer) -> None:
            evenly.barrier()

    seen: list[int] = []

    def program(kind: type) -> list[int]:
        made(callbacks=[kind()]).fit(digits(), steps=2)
        return seen

    assert run_ranks(program, 2, Once) == [[0, 0], []]
    with pytest.raises(evenly.errors.WorldError, match="would wait for ranks"):
        run_ranks(program, 2, Meeting)


def test_a_callback_that_raises_on_one_rank_stops_all_with_its_traceback() -> None:
    class Faulty(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.world.rank == 1 and trainer.step == 3:
                raise KeyError("planted in a callback")

    def program() -> str:
        diary = Diary()
        try:
            made(callbacks=[Faulty(), diary]).fit(digits(), epochs=1)
        except (KeyError, evenly.errors.RankFailedError) as error:
            return f"{diary.seen[-1]} {error!r} {getattr(error, 'traceback', '')}"
        return "finished"

    start = time.monotonic()
    texts = run_ranks(program, 3)
    assert time.monotonic() - start < 30
    for text in texts:
        assert text.startswith("on_exception")
        assert "planted in a callback" in text
    assert "in on_step_end" in texts[0]


@pytest.mark.parametrize("count", [1, 3])
def test_stop_on_one_rank_ends_all_at_the_same_step(count: int) -> None:
    class Stop(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.world.rank == trainer.world.size - 1 and trainer.step == 5:
                trainer.stop()

    def program() -> tuple[int, str]:
        diary = Diary()
        trainer = made(callbacks=[Stop(), diary])
        trainer.fit(digits(), epochs=3)
        return trainer.step, diary.seen[-1]

    # The wish travels with the next step, at one process as at any number.
    assert run_ranks(program, count) == [(6, "on_run_end")] * count


def noise(length: int = 90) -> TensorDataset:
    """Nothing to learn: validation gets worse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(length, 64, generator=generator).double()
    return TensorDataset(x, torch.randint(0, 10, (length,), generator=generator))


def test_early_stopping_ends_the_run_when_validation_gets_no_better() -> None:
    def program(options: dict[str, Any]) -> tuple[int, int, float]:
        stopping = EarlyStopping(**options)
        trainer = made(callbacks=[stopping], batch_size=30)
        trainer.fit(noise(), noise(50), epochs=100)
        values = list(trainer.history[stopping.monitor].values)
        best = min(values) if stopping.mode == "min" else max(values)
        assert stopping.best == pytest.approx(best, abs=stopping.min_delta or 1e-12)
        return trainer.epoch, stopping.best_step, stopping.best

    for options in (
        {"patience": 2},
        {"monitor": "train/loss", "min_delta": 0.5, "patience": 3},
        {"monitor": "validation/loss", "mode": "max", "patience": 1, "min_delta": 10.0},
    ):
        one = run_ranks(program, 1, options)[0]
        assert one[0] < 100
        for rank in run_ranks(program, 2, options):
            assert rank[:2] == one[:2]
            assert rank[2] == pytest.approx(one[2], rel=1e-9)


def test_early_stopping_without_its_number_says_what_there_is(world: evenly.World) -> None:
    with pytest.raises(SettingError, match=r"there is none.*validate= set"):
        made(callbacks=[EarlyStopping()]).fit(digits(), epochs=2)
    with pytest.raises(SettingError, match="'validation/loss'"):
        made(callbacks=[EarlyStopping("validation/f1")]).fit(digits(), digits(), epochs=1)
    with pytest.raises(SettingError, match="mode='down'"):
        EarlyStopping(mode="down")  # type: ignore[arg-type]


def test_the_best_weights_can_be_put_back() -> None:
    def program() -> tuple[float, float]:
        stopping = EarlyStopping(patience=2, restore_best=True)
        trainer = made(callbacks=[stopping], batch_size=30)
        trainer.fit(noise(), noise(50), epochs=100)
        return stopping.best, trainer.test(noise(50))["loss"]

    for best, found in run_ranks(program, 2):
        assert found == pytest.approx(best, rel=1e-12)


def test_a_misspelled_hook_is_noticed(world: evenly.World) -> None:
    class Late(Callback):
        def on_epoch_ended(self, trainer: evenly.Trainer) -> None: ...

    with pytest.raises(SettingError, match="on_epoch_ended, which nobody calls"):
        made(callbacks=[Late()])


def test_what_callbacks_draw_is_the_same_on_all_ranks() -> None:
    class Noise(Callback):
        ranks = "every"

        def on_epoch_start(self, trainer: evenly.Trainer) -> None:
            nn.init.normal_(trainer.model[2].weight)  # type: ignore[index]

        def on_gradients(self, trainer: evenly.Trainer) -> None:
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.01 * torch.randn_like(parameter)

    def program() -> dict[str, Tensor]:
        trainer = made(callbacks=[Noise()])
        trainer.fit(digits(), epochs=2)
        weights: dict[str, Tensor] = outcome(trainer)["weights"]
        return weights

    one = run_ranks(program, 1)[0]
    for rank in run_ranks(program, 3):
        assert max(float((rank[n] - one[n]).abs().max()) for n in one) <= 1e-12


def test_weights_that_come_apart_are_noticed_at_the_end_of_the_epoch() -> None:
    class Apart(Callback):
        ranks = "every"

        def on_step_end(self, trainer: evenly.Trainer) -> None:
            if trainer.step == 5 and trainer.world.rank == 1:
                with torch.no_grad():
                    trainer.model[2].bias += 1e-9  # type: ignore[index]

    def program(callbacks: list[Any]) -> list[str]:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made(callbacks=callbacks).fit(digits(), epochs=1)
        return [str(one.message) for one in caught]

    assert run_ranks(program, 2, []) == [[], []]
    (text,), nothing = run_ranks(program, 2, [Apart()])
    assert "the ranks hold different weights" in text
    assert nothing == []


def test_the_learning_rate_of_each_step_is_noted(world: evenly.World) -> None:
    from torch.optim.lr_scheduler import LambdaLR

    trainer = made(
        callbacks=[LearningRateMonitor()],
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        scheduler_every="step",
    )
    trainer.fit(digits(), steps=3)
    rates = trainer.history["learning_rate"]
    assert list(rates.steps) == [1, 2, 3]
    assert list(rates.values) == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_averaged_weights_are_what_is_evaluated_and_the_trained_ones_stay() -> None:
    def program() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        average = EMA(0.9)
        trainer = made(callbacks=[average])
        trainer.fit(digits(), steps=40)
        return outcome(trainer)["weights"], average.model.state_dict(), trainer.test(digits())

    trained, averaged, values = run_ranks(program, 1)[0]
    model = network()
    model.load_state_dict(averaged)
    x, y = digits().tensors
    assert values["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    model.load_state_dict(trained)
    assert values["loss"] != pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-3)
    for _, other, there in run_ranks(program, 3):
        assert max(float((other[n] - averaged[n]).abs().max()) for n in averaged) <= 1e-12
        assert there["loss"] == pytest.approx(values["loss"], rel=1e-12)


def test_early_stopping_looks_whenever_there_is_a_validation(world: evenly.World) -> None:
    for every in ("2 epochs", 50):
        stopping = EarlyStopping()
        made(callbacks=[stopping]).fit(digits(), digits(), epochs=3, validate_every=every)
        assert stopping.best_step > 0


def test_weights_are_evaluated_as_they_are_until_their_average_starts(world: evenly.World) -> None:
    trainer = made(callbacks=[EMA(0.9, start=30)])
    trainer.fit(digits(), steps=30)
    assert trainer.evaluated is trainer.model
    trainer.fit(digits(), steps=31)
    assert trainer.evaluated is not trainer.model


def test_an_error_in_one_callbacks_farewell_does_not_cost_the_others_theirs(
    world: evenly.World,
) -> None:
    class Bad(Callback):
        def on_step_end(self, trainer: evenly.Trainer) -> None:
            raise KeyError("first")

        def on_exception(self, trainer: evenly.Trainer, error: BaseException) -> None:
            raise KeyError("second")

    diary = Diary()
    with pytest.raises(KeyError, match="first"):
        made(callbacks=[Bad(), diary]).fit(digits(), epochs=1)
    assert diary.seen[-1] == "on_exception"


def test_averaged_weights_follow_the_formula(world: evenly.World) -> None:
    history: list[Tensor] = []

    class Keep(Callback):
        def on_step_end(self, trainer: evenly.Trainer) -> None:
            history.append(trainer.model[0].weight.detach().clone())  # type: ignore[index]

    average = EMA(0.7)
    made(callbacks=[Keep(), average]).fit(digits(), steps=4)
    expected = history[0]
    for weight in history[1:]:
        expected = 0.7 * expected + 0.3 * weight
    assert torch.allclose(average.model[0].weight, expected, atol=1e-12)


def test_throughput_and_data_wait_are_logged_for_each_epoch() -> None:
    class Slow(Callback):
        ranks = "every"

        def on_gradients(self, trainer: evenly.Trainer) -> None:
            time.sleep(0.01)

    def program() -> dict[str, float]:
        trainer = made(callbacks=[Slow(), Throughput()], batch_size=50)
        trainer.fit(digits(length=500), epochs=1)
        return {name: series.values[-1] for name, series in trainer.history.items()}

    for rank in run_ranks(program, 2):
        assert rank["train/step_seconds"] >= 0.01
        rate = 50 / rank["train/step_seconds"]
        assert rank["train/samples_per_second"] == pytest.approx(rate, rel=1e-6)
        assert 0 <= rank["train/data_wait_seconds"] < rank["train/step_seconds"]


def test_a_timer_ends_the_run_on_all_ranks() -> None:
    def program() -> tuple[int, float]:
        timer = Timer(timedelta(seconds=0.5))
        trainer = made(callbacks=[timer])
        trainer.fit(digits(), epochs=100_000)
        return trainer.step, timer.elapsed

    ranks = run_ranks(program, 2)
    assert ranks[0][0] == ranks[1][0]
    assert 0.5 <= ranks[0][1] < 20


def test_the_gradient_norm_is_that_of_the_whole_step_before_clipping() -> None:
    def program() -> list[float]:
        watching = GradientNorm(every=2, per_parameter=True)
        trainer = made(callbacks=[watching], clip_norm=0.01)
        trainer.fit(digits(), steps=4)
        assert list(trainer.history["gradient_norm"].steps) == [1, 3]
        parts = [s.values[0] for n, s in trainer.history.items() if n.startswith("gradient_norm/")]
        assert len(parts) == 4
        assert sum(p * p for p in parts) ** 0.5 == pytest.approx(
            trainer.history["gradient_norm"].values[0]
        )
        return list(trainer.history["gradient_norm"].values)

    one = run_ranks(program, 1)[0]
    assert one[0] > 0.01
    for rank in run_ranks(program, 3):
        assert rank == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize(("count", "microbatch"), [(1, 7), (2, None), (3, 7), (7, None)])
def test_gradients_inside_the_model_are_those_of_the_whole_step(
    count: int, microbatch: int | None
) -> None:
    def program(microbatch: int | None) -> Tensor:
        capture = GradientCapture(["1"])
        weights = torch.linspace(0.1, 3.0, 10, dtype=torch.float64)
        trainer = made(
            callbacks=[capture],
            loss=nn.CrossEntropyLoss(weight=weights),
            shuffle=False,
            batch_size=50,
            microbatch=microbatch,
        )
        trainer.fit(digits(length=54), epochs=1)
        assert not trainer.model[1]._forward_hooks  # type: ignore[index]
        return capture.gradients["1"]

    model = network()
    x, y = digits(length=54).tensors
    weights = torch.linspace(0.1, 3.0, 10, dtype=torch.float64)
    # The last step has 4 samples; the weights before it are those after the first step.
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(x[:50]), y[:50], weight=weights).backward()
    first.step()
    hidden = model[:2](x[50:]).detach().requires_grad_(True)  # type: ignore[index]
    F.cross_entropy(model[2](hidden), y[50:], weight=weights).backward()  # type: ignore[index]
    assert hidden.grad is not None
    for rank in run_ranks(program, count, microbatch):
        assert float((rank - hidden.grad).abs().max()) <= 1e-12


def test_a_module_that_is_not_there_cannot_be_captured(world: evenly.World) -> None:
    with pytest.raises(SettingError, match="no submodule 'head'; it has 0, 1, 2"):
        made(callbacks=[GradientCapture(["head"])]).fit(digits(), steps=1)


def test_progress_prints_a_line_without_a_terminal_from_one_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def program() -> None:
        made(progress=True).fit(digits(), digits(), epochs=2)

    run_ranks(program, 2)
    printed = capfd.readouterr().out  # what ranks print is shown by the one who runs them
    assert printed.count("epoch 2  step 46  train/loss") == 1
    assert "validation/loss" in printed
    assert "\x1b" not in printed


def test_progress_draws_a_bar_on_a_terminal(
    world: evenly.World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    made(progress=True).fit(digits(), epochs=1)
    printed = capfd.readouterr().err
    assert "23/23" in printed
    assert "samples/s" in printed
    assert "% of the time waiting for data" in printed


def test_a_run_and_a_test_end_with_a_table_also_when_quiet(
    world: evenly.World, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = made(progress="quiet")
    trainer.fit(digits(), epochs=2)
    printed = capfd.readouterr().err
    assert printed.startswith("46 steps in ")
    loss = trainer.history["loss"]
    low = min(loss.values)
    assert re.search(
        rf"loss +{loss.values[-1]:.4g} +{low:.4g} +{loss.values.index(low) + 1} ", printed
    )
    value = trainer.test(digits(length=99))["loss"]
    assert re.search(rf"test in .*\n.*\n.*\n +loss +{value:.4g}", capfd.readouterr().err)
    trainer.fit(digits(), epochs=2)
    assert "nothing is left to do" in capfd.readouterr().err
    with pytest.raises(SettingError, match="progress='loud'"):
        made(progress="loud")


def test_a_run_without_progress_prints_nothing(
    world: evenly.World, capfd: pytest.CaptureFixture[str]
) -> None:
    made(progress=False).fit(digits(), epochs=1)
    assert capfd.readouterr() == ("", "")


def test_progress_is_a_callback_like_any_other() -> None:
    assert Progress.ranks == "one"
