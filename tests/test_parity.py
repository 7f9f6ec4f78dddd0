"""What `evenly verify` finds: healthy programs are equal to rounding, planted faults are named."""

import contextlib
import io
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import evenly
import planted
from evenly import tracing
from evenly.errors import LaunchError, SettingError
from evenly.parity.reading import Tensors
from evenly.parity.rounding import gap, gradient_limit, limit
from evenly.testing import assert_same, verify
from evenly.tracing.hook import Trace
from evenly.tracing.journal import Journal
from evenly.tracing.recorder import Recorder
from trainings import digits, made

EXAMPLES = Path(__file__).parent.parent / "examples"
FIRST = 4  # the step with few samples


@pytest.mark.parametrize(
    ("fault", "name", "quantity", "step"),
    [
        ("BatchNorm", "BatchNorm", "gradient", 1),
        ("random layers", "random layers", "gradient", 1),
        ("random layers, not shown", "random layers", "gradient", 1),
        ("loss is a sum", "loss is a sum", "gradient", 1),
        ("gradients are summed", "gradients are summed", "gradient", 1),
        ("mean of means", "mean of means", "gradient", FIRST),
        ("denominator", "denominator", "gradient", 1),
        ("ranks start apart", "ranks start apart", "ranks", 0),
        ("initial weights", "initial weights", "parameters", 0),
        ("samples repeated", "samples repeated", "samples", FIRST),
        ("samples repeated, not told", "samples repeated", "samples", FIRST),
        ("samples missing", "samples missing", "samples", FIRST),
        ("number of steps", "samples missing", "samples", FIRST),
        ("order of samples", "order of samples", "samples", 1),
        ("batch size", "batch size", "samples", 1),
        ("augmentation", "augmentation", "gradient", 1),
        ("learning rate", "learning rate", "parameters", 1),
        ("settings by rank", "settings by rank", "ranks", 1),
        ("gradients not exchanged", "gradients not exchanged", "ranks", 1),
        ("ranks part", "ranks part", "ranks", 4),
        ("grown rounding", "grown rounding", "gradient", 5),
        ("amplified rounding", "amplified rounding", "buffers", 2),
        ("metric not synced", "metric not synced", "metrics", None),
        ("metric not synced, of one rank", "metric not synced", "metrics", None),
        ("evaluation", "evaluation", "metrics", None),
        ("order of predictions", "order of predictions", "predictions", None),
        ("predictions repeated", "predictions repeated", "predictions", None),
    ],
)
def test_a_planted_fault_is_found_and_named(
    fault: str, name: str, quantity: str, step: int | None
) -> None:
    comparison = verify(planted.train, fault, processes=(1, 2), steps=planted.STEPS)
    assert not comparison.holds
    reason = comparison.reasons[0]
    if name == "grown rounding":  # when depends on the processor
        assert (reason.step or 0) > 2
        step = reason.step
    assert (reason.name, reason.quantity, reason.step) == (name, quantity, step), str(comparison)
    assert len(comparison.reasons) == 1, "what follows from it is not explained again"
    assert "tipped an activation" not in str(comparison)
    assert reason.remedy in " ".join(str(comparison).split())
    json.dumps(comparison.as_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", ["", "SyncBatchNorm"])
def test_a_healthy_loop_is_equal_to_rounding(layer: str, dtype: torch.dtype) -> None:
    comparison = verify(planted.train, layer, dtype, processes=(1, 2, 3), steps=planted.STEPS)
    assert comparison.holds, str(comparison)
    for count in comparison.counts:
        assert count.steps == planted.STEPS
        assert count.findings["samples"].status == "identical"
        assert count.findings["metrics"].status == "identical"
        assert count.findings["gradient"].status == "rounding"
        assert count.findings["gradient"].units < 64


def example(name: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "name", ["digits_trainer", "digits_parts", "language_model", "contrastive", "gan", "two_heads"]
)
def test_the_examples_are_equal_to_rounding(name: str) -> None:
    """24 steps: more than the 23 of an epoch of the digits, so that a short step is among them."""
    comparison = verify(example, name, processes=(1, 3), steps=24, timeout=100)
    assert comparison.holds, str(comparison)
    (count,) = comparison.counts
    assert count.steps == 24
    assert count.findings["samples"].status == "identical"
    assert count.findings["loss"].status == "rounding"
    assert count.findings["parameters"].status == "rounding"


def test_bits_are_asked_for_and_a_program_is_repeatable() -> None:
    again = verify(planted.train, processes=(2, 2), steps=3, promise="bits")
    assert again.holds, str(again)
    apart = verify(planted.train, processes=(1, 2), steps=3, promise="bits")
    assert not apart.holds
    assert "They are equal to rounding" in str(apart)
    drawn = verify(unseeded, processes=(1, 1), steps=2)
    assert drawn.reasons[0].name == "not repeatable"


def unseeded() -> None:
    torch.seed()
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    evenly.trace(net, optimizer)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_pieces_keep_the_bits_of_training_metrics_and_predictions() -> None:
    def train(pieces: int | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
        accuracy = {"accuracy": MulticlassAccuracy(10)}
        trainer = made(model=model, metrics=accuracy, pieces=pieces)
        data = digits(torch.float32, length=300)
        trainer.fit(data, data, epochs=1)
        trainer.predict(data)

    assert_same(train, 4, processes=(1, 3), steps=9, promise="bits")
    assert not verify(train, None, processes=(1, 3), steps=9).holds  # dropout, by rank


def test_a_failed_comparison_shows_the_report_in_the_test() -> None:
    assert_same(planted.train, processes=(1, 2), steps=2)
    with pytest.raises(AssertionError, match="loss is a sum"):
        assert_same(planted.train, "loss is a sum", processes=(1, 2), steps=2)
    with pytest.raises(SettingError, match="two process counts"):
        verify(planted.train, processes=(2,))
    with pytest.raises(LaunchError, match=r"evenly\.trace\(model, optimizer\)"):
        verify(len, [], processes=(1, 1))


def trainer(folder: str, what: str = "") -> None:
    """A Trainer with everything that verify looks at, in a folder that another run has used; it
    is to make five steps.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    train, test = evenly.data.digits()
    made = evenly.Trainer(
        model=net if what == "BatchNorm" else evenly.SyncBatchNorm.convert(net),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / steps
        ),
        metrics={"accuracy": MulticlassAccuracy(10, average=None)},
        batch_size=64,
        progress=False,
        folder=f"{folder}/run",
        save_every=2,
    )
    made.fit(train, validate=test, epochs=2, validate_every=3, resume="auto")
    assert made.step == 5
    made.test(test)
    if what == "metric":
        made.note("norm of the batch", float(len(made.predict(test)) + made.world.rank))
    evenly.load_weights(made.model, f"{folder}/run")  # what it has saved
    made.predict(test, out=f"{folder}/predictions")
    found = evenly.read_predictions(f"{folder}/predictions")
    assert len(found) == len(test)


def test_a_trainer_is_traced_and_leaves_its_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    comparison = verify(trainer, str(tmp_path), processes=(1, 2, 3), steps=5)
    assert comparison.holds, str(comparison)
    for count in comparison.counts:
        assert count.steps == 5
        seen = {name for name, found in count.findings.items() if found.status != "absent"}
        assert seen == set(count.findings), "all quantities"
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "checkpoints"]


@pytest.mark.parametrize(
    ("what", "name"), [("BatchNorm", "BatchNorm"), ("metric", "metric not synced")]
)
@pytest.mark.filterwarnings("ignore::evenly.errors.EvenlyWarning")
def test_a_fault_in_a_trainer_is_named(what: str, name: str, tmp_path: Path) -> None:
    comparison = verify(trainer, str(tmp_path), what, processes=(1, 2), steps=5)
    assert [reason.name for reason in comparison.reasons] == [name], str(comparison)


def parts(counted: bool) -> int:
    """A loop of the parts, with a metric; how many steps it made."""
    torch.manual_seed(0)
    net = nn.Linear(64, 10)
    train, test = evenly.data.digits()
    with evenly.open_world(device="cpu"):
        model = evenly.replicate(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, made, seen = evenly.Loader(train, batch_size=100), 0, 0
        for epoch in range(2):
            for part in loader.epoch(epoch):
                for micro in part.microbatches(20):
                    x, y = micro.data
                    losses = F.cross_entropy(model(x), y, reduction="sum")
                    micro.share(evenly.Total(losses, len(y)), of=part.global_weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
        metric = MulticlassAccuracy(10)
        for part in evenly.Loader(test, batch_size=100).epoch(0):
            evenly.metrics.update(metric, net(part.data[0]), part.data[1])
            seen += part.weight
        evenly.compute({"accuracy": metric})
        if counted:
            assert (made, evenly.all_reduce(torch.tensor(seen)).item()) == (6, len(test))
    return made


def test_a_loop_of_the_parts_ends_after_the_steps_and_then_evaluates() -> None:
    comparison = verify(parts, True, processes=(1, 2), steps=6)
    assert comparison.holds, str(comparison)
    (count,) = comparison.counts
    assert count.steps == 6
    for name in ("samples", "loss", "gradient", "parameters", "metrics"):
        assert count.findings[name].status in ("identical", "rounding")


def test_without_verify_tracing_does_nothing() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trace = evenly.trace(net, optimizer)
    loader = DataLoader(TensorDataset(torch.arange(3)))
    assert trace.batches(loader) is loader
    trace.loss(torch.tensor(1.0))
    trace.samples([1])
    trace.metric("accuracy", 1.0)
    trace.predictions(torch.ones(3))
    assert not trace.done
    assert tracing.active is None
    assert not _global_optimizer_pre_hooks
    assert not net._forward_hooks


def test_a_hook_on_the_wrong_optimizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.FOLDER, str(tmp_path / "trace"))
    try:
        with pytest.raises(SettingError, match="holds none of the model's parameters"):
            evenly.trace(nn.Linear(2, 1), torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
        with pytest.raises(SettingError, match="is no optimizer"):
            evenly.trace(nn.Linear(2, 1), "sgd")
    finally:
        monkeypatch.delenv(tracing.FOLDER)
        tracing.current()


def test_batches_of_a_torch_loader_are_noted_in_the_order_they_come(tmp_path: Path) -> None:
    """With workers the samples are drawn ahead of the batches."""
    (tmp_path / "rank0").mkdir()
    recorder = Recorder(tmp_path, tmp_path / "rank0", 20, rank=0, size=1)
    try:
        trace = Trace(recorder)
        loader = DataLoader(
            TensorDataset(torch.arange(10)), batch_size=4, shuffle=True, num_workers=1
        )
        for _ in range(2):
            for (batch,) in trace.batches(loader):
                told = recorder._given[-1]
                assert told.tolist() == batch.tolist()
                recorder._given = []
    finally:
        recorder.close()


def gradient(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
    F.cross_entropy(net(x.to(dtype)), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [64, 1000])
def test_another_order_is_rounding_and_one_sample_twice_is_not(
    batch: int, dtype: torch.dtype
) -> None:
    x, y = (tensor[:batch] for tensor in evenly.data.digits()[0].tensors)
    eps = torch.finfo(dtype).eps
    right = gradient(x, y, dtype)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(1))
    assert gap(right, gradient(x[order], y[order], dtype), eps).units < limit(eps, 0.0) / 20
    twice = torch.cat([torch.arange(batch), torch.tensor([0])])
    # In small steps also where rounding has grown as far as it may.
    allowed = gradient_limit(eps, math.inf if batch == 64 else 0.0)
    assert gap(right, gradient(x[twice], y[twice], dtype), eps).units > allowed


def test_an_activation_that_rounding_tips_is_told_from_another_step() -> None:
    """In float32 it is bound to happen; the gradient then differs as by one sample too many."""
    comparison = verify(planted.train, "an activation tips", processes=(1, 2), steps=8)
    assert comparison.holds, str(comparison)
    found = comparison.counts[0].findings
    assert found["gradient"].units > gradient_limit(torch.finfo(torch.float32).eps, 0.0)
    assert "2 processes: gradient: rounding tipped an activation at step 3." in str(comparison)
    exact = verify(planted.train, "an activation tips", torch.float64, processes=(1, 2), steps=8)
    assert exact.reasons[0].step == 3, "in float64 it is none of rounding's doing"


def test_bits_are_told_apart_and_nan_equals_nan() -> None:
    nan = torch.tensor([1.0, math.nan])
    assert gap(nan, nan.clone(), 1e-7).identical
    assert gap(nan, torch.tensor([1.0, 2.0]), 1e-7).units == math.inf
    assert gap(torch.tensor([math.inf]), torch.tensor([math.inf]), 1e-7).identical
    assert gap(torch.tensor([1, 2]), torch.tensor([1, 3]), 1e-7).units == math.inf
    assert not gap(torch.tensor([0.0]), torch.tensor([-0.0]), 1e-7).identical
    one = torch.tensor([1.0, 1.0])
    assert gap(one, torch.nextafter(one, one + 1), torch.finfo(one.dtype).eps).units == 1.0
    assert gap(torch.ones(2), torch.ones(3), 1e-7).units == math.inf


def test_large_models_are_kept_as_samples_with_digests_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenly.tracing.journal.BUDGET", 1_000_000)
    journal = Journal(tmp_path, rank=0, size=1)
    tensor = torch.randn(200_000)
    first = journal.keep("first", {"gradient": {"weight": tensor}})
    second = journal.keep("second", {"gradient": {"weight": tensor}})
    journal.close()
    assert first["whole"]
    assert not second["whole"]
    assert first["digests"] == second["digests"]
    assert (tmp_path / "second.safetensors").stat().st_size < 20_000
    kept = [
        Tensors(tmp_path / each["file"], each["whole"], {"weight": ""}, "gradient")
        for each in (first, second)
    ]
    read = [one.read("weight", sample=True) for one in kept]
    assert torch.equal(*read)
