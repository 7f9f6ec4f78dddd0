"""Metrics over all ranks are those of one process, and what cannot be is refused."""

import contextlib
import io
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, RunningMean, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

import evenly
from evenly.errors import DisagreementError, EvenlyError, SettingError
from evenly.metrics import (
    check_metric,
    compute,
    copies,
    load_local_state,
    local_state,
    update,
)
from evenly.parcel import exchange
from evenly.testing import run_ranks
from evenly.tree import leaves
from metric_cases import SAMPLES, Case, cases

# Their float32 sums of squares cancel, so that their last digits depend on the batches even on one
# process (docs/how-to/metrics.md); in float64 they are held to the common tolerance.
IN_DOUBLE = ("R2Score", "RelativeSquaredError")


def sweep() -> dict[str, Any]:
    """The value of every case: on three ranks of 23, 18 and no samples, on one of 41."""
    found = {}
    with evenly.open_world() as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases():
            case = case.in_double() if case.name in IN_DOUBLE else case
            metric = case.make()
            feed(case, metric, world.rank, world.size)
            found[case.name] = compute(metric)
    return found


def feed(case: Case, metric: Any, rank: int, size: int) -> None:
    if size == 1:
        case.run(metric, 0, SAMPLES, 8)
    elif rank < 2:
        case.run(metric, *[(0, 23, 5), (23, SAMPLES, 7)][rank])


def test_every_class_of_torchmetrics_gives_on_three_ranks_what_it_gives_on_one() -> None:
    alone = run_ranks(sweep, 1)[0]
    classes = {name.split(",")[0] for name in alone}
    assert len(classes) >= 187, "as many as the page says"
    for found in run_ranks(sweep, 3):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert_same(found[name], expected, name)


def assert_same(found: Any, expected: Any, name: str, tolerance: float = 1e-6) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        exact = not isinstance(other, Tensor) or not other.is_floating_point()
        torch.testing.assert_close(
            one,
            other,
            rtol=0 if exact else tolerance,
            atol=0 if exact else tolerance / 10,
            equal_nan=True,
            msg=lambda text: f"{name}: {text}",
        )


def seven() -> MetricCollection:
    return MetricCollection(
        [
            MulticlassAccuracy(10),
            MulticlassF1Score(10),
            MulticlassPrecision(10),
            MulticlassRecall(10),
            MulticlassConfusionMatrix(10),
            MulticlassAUROC(10),
            MulticlassCalibrationError(10),
        ]
    )


def digits(start: int, stop: int) -> tuple[Tensor, Tensor]:
    x, y = evenly.data.digits()[1].tensors
    return (x[start:stop] @ torch.linspace(-1, 1, 640).reshape(64, 10)).softmax(1), y[start:stop]


def counted(samples: int) -> tuple[int, dict[str, Tensor]]:
    with evenly.open_world() as world:
        metrics: dict[str, Any] = {
            "seven": seven(),
            "cat": [CatMetric(), SumMetric()],
            "own": ErrorCount(),
        }
        if world.rank < world.size - 1:
            for batch in range(3):
                scores, labels = digits(100 * world.rank + batch, 100 * world.rank + samples)
                metrics["seven"].update(scores, labels)
        group: Any = dist.group.WORLD  # it counts its collectives
        before = group._get_sequence_number_for_group()
        values = compute(metrics)["seven"]
        return group._get_sequence_number_for_group() - before, values


class ErrorCount:
    """A metric of one's own, in full: what it holds, and how ranks' holdings make one."""

    synced: ClassVar[dict[str, Any]] = {
        "wrong": "sum",
        "seen": "sum",
        "worst": "max",
        "places": "cat",
        "kinds": "sum",
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wrong, self.seen = torch.tensor(0), 0
        self.worst: float | None = None
        self.places: list[int] = []
        self.kinds: Counter[int] = Counter()

    def update(self, predictions: Tensor, target: Tensor) -> None:
        missed = predictions.argmax(1) != target
        self.places += (self.seen + missed.nonzero().flatten()).tolist()
        self.kinds.update(target[missed].tolist())
        self.wrong, self.seen = self.wrong + missed.sum(), self.seen + len(target)
        least = float(predictions.max(1).values.max())
        self.worst = least if self.worst is None else max(self.worst, least)

    def compute(self) -> dict[str, Any]:
        rate = float(self.wrong) / max(1, self.seen)
        return {"rate": rate, "worst": self.worst, "n": len(self.places), "kinds": self.kinds}


def test_any_structure_of_metrics_costs_one_collective_or_with_many_samples_two() -> None:
    for samples, expected in ((20, 1), (100, 2)):
        for collectives, values in run_ranks(counted, 3, samples):
            assert collectives == expected
            assert len(values) == 7


def left_alone() -> list[Any]:
    with evenly.open_world() as world:
        group, average = seven(), MeanMetric()
        fails, extremes = Failing(), MinMaxMetric(MeanSquaredError())
        for turn in range(2):
            group.update(*digits(50 * world.rank, 50 * world.rank + 20 + turn))
        average.update(float(world.rank))
        cached = vars(average)["_computed"] = torch.tensor(7.0)
        fails.update(torch.tensor(float(world.rank)))
        extremes.update(torch.tensor([1.0 + world.rank]), torch.tensor([0.0]))
        before = [memory(m) for m in (*group.values(copy_state=False), average, fails)]
        values = compute([group, average, extremes])
        with contextlib.suppress(ZeroDivisionError):
            compute([group, fails])
        after = [memory(m) for m in (*group.values(copy_state=False), average, fails)]
        same = all(one == other for one, other in zip(before, after, strict=True))
        extremes.update(torch.tensor([3.0]), torch.tensor([0.0]))
        again = compute(extremes)
        return [same, average._computed is cached, values[1].item(), values[2], again]


def memory(metric: Metric) -> list[Any]:
    """Which objects a metric holds, and what is in its tensors."""
    held: list[Any] = [(n, id(v)) for n, v in vars(metric).items() if n != "_defaults"]
    states = leaves([getattr(metric, name) for name in metric._defaults])
    return [*held, *(state.clone().tolist() for state in states)]


class Failing(Metric):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, value: Tensor) -> None:
        self.total += value

    def compute(self) -> Tensor:
        raise ZeroDivisionError


def test_local_states_caches_and_counts_are_as_before_also_after_an_error() -> None:
    for same, cache_kept, mean, first, again in run_ranks(left_alone, 2):
        assert same
        assert cache_kept
        assert mean == 0.5
        assert first == {"raw": 2.5, "max": 2.5, "min": 2.5}
        # Its extremes are of the values over all ranks, and outlive the call.
        assert again == {"raw": pytest.approx(23 / 4), "max": again["raw"], "min": 2.5}


def mean(stacked: Tensor) -> Tensor:
    return -stacked.sum(0)


class Everything(Metric):
    """One state for each kind of reduction, type and form."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for kind in ("sum", "min", "max", "mean"):
            self.add_state(kind, torch.zeros(2), kind)
        self.add_state("from_one", torch.ones(1), "sum")
        self.add_state("custom", torch.tensor(1.0), torch.prod)
        self.add_state("stacked", torch.zeros(2), None)
        self.add_state("grown", torch.zeros(0), "cat")
        self.add_state("small", torch.zeros(1, dtype=torch.uint8), "sum")
        self.add_state("flag", torch.tensor(False), "sum")
        self.add_state("half", torch.zeros(1, dtype=torch.float16), "sum")
        self.add_state("whole", torch.tensor(2**53), "sum")
        self.add_state("named", torch.tensor(0.0), mean)
        self.add_state("number", torch.tensor(0.0), "sum")
        self.add_state("rows", [], "cat")
        self.add_state("odd", [], None)

    def update(self, rank: int) -> None:
        values = vars(self)
        for kind in ("sum", "min", "max", "mean", "stacked"):
            values[kind] = torch.tensor([rank + 1.0, -rank])
        for name in ("small", "half", "from_one", "whole"):
            values[name] = values[name] + rank + 1
        values["custom"] = torch.tensor(rank + 2.0)
        values["number"] = values["named"] = rank + 0.5
        values["flag"] = torch.tensor(rank == 1)
        values["grown"] = torch.cat([values["grown"], torch.full((rank + 1,), float(rank))])
        values["rows"] += [torch.full((rank, 2), rank, dtype=torch.bfloat16), torch.ones(1, 2)]
        values["odd"] += [("text", rank), torch.full((rank,), True)]

    def compute(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}


def reduced() -> Any:
    with evenly.open_world() as world:
        metric = Everything()
        for _ in range([1, 2, 0][world.rank]):
            metric.update(world.rank)
        return compute(metric)


def test_each_reduction_and_type_is_merged_and_a_rank_without_samples_counts_for_nothing() -> None:
    for found in run_ranks(reduced, 3):
        assert found["sum"].tolist() == [3.0, -1.0]
        assert found["min"].tolist() == [1.0, -1.0]
        assert found["max"].tolist() == [2.0, 0.0]
        assert found["mean"].tolist() == pytest.approx([5 / 3, -2 / 3]), "one update, and two"
        assert found["from_one"].item() == 6.0, "what it starts from counts once"
        assert found["custom"].item() == 6.0
        assert found["stacked"].tolist() == [[1.0, 0.0], [2.0, -1.0]]
        assert found["grown"].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
        assert (found["small"].item(), found["small"].dtype) == (5, torch.uint8)
        assert (found["half"].item(), found["half"].dtype) == (5.0, torch.float16)
        assert (found["flag"].item(), found["flag"].dtype) == (True, torch.bool)
        assert found["named"].item() == -2.0, "a function called as a rule is"
        assert found["number"].item() == 2.0, "numbers in place of tensors"
        assert found["whole"].item() == 2**53 + 5, "integers are not rounded"
        assert [list(rows.shape) for rows in found["rows"]] == [[0, 2], [1, 2], *[[1, 2]] * 4]
        assert found["rows"][2].dtype == torch.bfloat16
        assert found["odd"][0] == ("text", 0)
        assert found["odd"][3].item() is True


def in_order() -> list[Any]:
    """Samples are dealt out like cards, so rank order is not the order of the data set."""
    with evenly.open_world() as world:
        own = torch.arange(11)[world.rank :: world.size] if world.rank < 2 else torch.arange(0)
        rows, each = CatMetric(), PerSample()
        for positions in own.split(3):
            if len(positions):
                rows.update(positions * 1.5)
                each.update(positions)
        return [*compute([rows, each], positions=own), compute(rows)]


class PerSample(Metric):
    """Two rows and one text for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pairs", [], "cat")
        self.add_state("texts", [], None)

    def update(self, positions: Tensor) -> None:
        vars(self)["pairs"].append(positions.repeat_interleave(2))
        vars(self)["texts"].extend(str(position) for position in positions.tolist())

    def compute(self) -> Any:
        return torch.cat(vars(self)["pairs"]).tolist(), " ".join(vars(self)["texts"])


def test_lists_of_samples_come_in_data_set_order_when_their_positions_are_given() -> None:
    # With three ranks the third holds no sample, and its share of 0..10 is missing.
    held = [p for p in range(11) if p % 3 < 2]
    for rows, (pairs, texts), unordered in run_ranks(in_order, 3):
        assert rows.tolist() == [1.5 * position for position in held]
        assert pairs == [position for position in held for _ in range(2)]
        assert texts == " ".join(map(str, held))
        assert sorted(unordered.tolist()) == rows.tolist()
        assert unordered.tolist() != rows.tolist(), "else this test shows nothing"


def nested() -> tuple[Any, Any]:
    with evenly.open_world() as world:
        shared = SumMetric()
        metrics = {"a": [shared, (MeanMetric(),)], "b": {"again": shared, "composed": shared * 2}}
        shared.update(world.rank + 1.0)
        metrics["a"][1][0].update(float(world.rank))  # type: ignore[index]
        value = compute(metrics)
        hidden = Hidden()
        hidden.update(float(world.rank + 1))
        return value, compute(hidden)


def in_a_group() -> float:
    with evenly.open_world() as world:
        group = dist.new_group([1, 2])
        metric = SumMetric()
        metric.update(10.0**world.rank)
        return float(compute(metric, group=group)) if world.rank else 0.0


def test_a_group_of_some_ranks_computes_its_own_values() -> None:
    assert run_ranks(in_a_group, 3) == [0.0, 110.0, 110.0]


class Hidden(Metric):
    """Its parts are in a plain list, which torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [SumMetric(), SumMetric()]

    def update(self, value: float) -> None:
        for part in self.parts:
            part.update(value)

    def compute(self) -> float:
        return sum(float(part.compute()) for part in self.parts)


def test_structures_come_back_as_given_and_a_metric_used_twice_counts_once() -> None:
    for value, hidden in run_ranks(nested, 2):
        assert value == {"a": [3.0, (0.5,)], "b": {"again": 3.0, "composed": 6.0}}
        assert isinstance(value["a"][1], tuple)
        assert hidden == 6.0


class Unsynced:
    """A metric that does not say how ranks' values make one."""

    def __init__(self) -> None:
        self.seen = 0

    def reset(self) -> None:
        self.seen = 0

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.seen += len(target)

    def compute(self) -> int:
        return self.seen


class OwnSync(SumMetric):
    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def synced() -> Metric:
    metric = SumMetric()
    metric._is_synced = True
    return metric


class Mistaken(Unsynced):
    def __init__(self, rules: dict[str, Any]) -> None:
        super().__init__()
        self.synced = rules


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "running": (lambda: {"loss": RunningMean(3)}, "loss (RunningMean) is over the last 3 updates"),
    "bootstrap": (lambda: [BootStrapper(SumMetric())], "[0] (BootStrapper) draws its samples"),
    "in a wrapper": (lambda: {"x": RunningMean() + 1}, "x.metric_a (RunningMean)"),
    "synced": (lambda: {"x": synced()}, "x (SumMetric) holds synced states"),
    "group": (lambda: SumMetric(dist_sync_fn=print), "dist_sync_fn of its own"),
    "own sync": (OwnSync, "_sync_dist of its own"),
    "no rule": (Unsynced, "does not say how its values on several ranks make one"),
    "no metric": (lambda: {"x": 3}, "x is a int without update()"),
    "wrong rule": (lambda: Mistaken({"seen": "mean"}), "choose from sum, min, max, cat"),
    "no attribute": (lambda: Mistaken({"sen": "sum"}), "and no such attribute"),
}


def refusals(only: int | None) -> dict[str, str]:
    """What each refused metric says, on every rank or on one rank only."""
    texts = {}
    with evenly.open_world() as world:
        for name, (make, _) in REFUSED.items():
            metrics = make() if only in (None, world.rank) else SumMetric()
            try:
                compute(metrics)
            except SettingError as error:
                texts[name] = str(error)
        total = SumMetric()
        total.update(1.0)
        assert compute(total) == world.size, "ranks must still meet"
    return texts


def test_what_cannot_be_merged_is_refused_with_the_reason_on_all_ranks() -> None:
    for only in (None, 1):
        for rank, texts in enumerate(run_ranks(refusals, 2, only)):
            for name, (_, words) in REFUSED.items():
                assert words in texts[name]
                if only is not None and rank != only:
                    assert "rank 1 cannot compute" in texts[name]


def test_alone_a_metric_needs_no_rule_and_what_merges_badly_is_accepted(world: Any) -> None:
    own, running = Unsynced(), RunningMean(2)
    update([own], torch.ones(3), torch.ones(3))
    for value in (1.0, 2.0, 4.0):
        running.update(value)
    assert compute({"own": own, "running": running}) == {"own": 3, "running": 3.0}


def late(metric: Any, rank: int) -> Any:
    """The rank that has seen nothing is the one that differs."""
    if rank != 1:
        metric.update(*digits(0, 5))
    return metric


def thresholds(rank: int) -> MetricCollection:
    pair = {"low": BinaryAccuracy(0.5), "high": BinaryAccuracy(0.7)}
    together = MetricCollection(pair)  # type: ignore[arg-type]
    together.update(torch.tensor([0.6 if rank else 0.9, 0.1]), torch.tensor([1, 0]))
    return together


class Undeclared(SumMetric):
    """Counts something that no other rank hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def update(self, value: float | Tensor) -> None:
        self.batches += 1
        super().update(value)


def undeclared(rank: int) -> Undeclared:
    metric = Undeclared()
    for _ in range(rank + 1):
        metric.update(1.0)
    return metric


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "class": (
        lambda rank: {"acc": MulticlassRecall(10) if rank == 1 else MulticlassF1Score(10)},
        "rank 1 has other metrics than rank 0: acc (MulticlassRecall) there",
    ),
    "name": (lambda rank: {f"m{rank // 2}": SumMetric()}, "rank 2 has other metrics than rank 0"),
    "number": (
        lambda rank: [SumMetric()] * 1 if rank < 2 else [SumMetric(), MeanMetric()],
        "[1] (MeanMetric) is on rank 2 only",
    ),
    "states": (
        lambda rank: BinaryAUROC(thresholds=None if rank == 2 else 5),
        "on rank 2",
    ),
    "setting": (
        lambda rank: late(MulticlassAccuracy(10, average="macro" if rank else "micro"), rank),
        "has average='macro' on rank 1 and average='micro' on rank 0",
    ),
    "sizes": (
        lambda rank: late(MulticlassAccuracy(11 if rank == 1 else 10), rank),
        "num_classes=11 on rank 1 and num_classes=10 on rank 0",
    ),
    "groups": (thresholds, "Give it compute_groups=False"),
    "undeclared": (undeclared, "batches=2 on rank 1 and batches=1 on rank 0"),
}


def disagreements() -> dict[str, str]:
    texts = {}
    with evenly.open_world() as world:
        for name, (make, _) in DIFFERENT.items():
            try:
                compute(make(world.rank))
            except DisagreementError as error:
                texts[name] = str(error)
    return texts


def test_ranks_with_other_metrics_or_states_all_raise_and_name_rank_and_metric() -> None:
    for texts in run_ranks(disagreements, 3):
        assert texts.keys() == DIFFERENT.keys()
        for name, (_, words) in DIFFERENT.items():
            assert words in texts[name]


def odd_shapes() -> list[str]:
    texts = []
    with evenly.open_world() as world:
        metric, lock = Failing(), Everything()
        metric.update(torch.tensor(1.0))
        metric.total = torch.ones(world.rank + 1)
        vars(lock)["odd"].append(lambda: world.rank)
        lock._update_count = 1
        for wrong in (metric, lock):
            try:
                compute(wrong)
            except EvenlyError as error:
                texts.append(str(error))
        empty = exchange((torch.empty(0, 3), torch.tensor(world.rank)), "a test")
        texts.append(str([(list(a.shape), int(b)) for a, b in empty]))
    return texts


def test_states_that_do_not_fit_together_or_cannot_travel_raise_on_all_ranks() -> None:
    for shapes, pickled, exchanged in run_ranks(odd_shapes, 2):
        assert "'total' of the metric (Failing) has other shapes on other ranks ([[1], [2]])" in (
            shapes
        )
        assert "rank 0 holds a value that cannot be pickled" in pickled
        assert exchanged == "[([0, 3], 0), ([0, 3], 1)]"


def nobody() -> list[Any]:
    with evenly.open_world(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns, rightly
        return [compute(SumMetric()), compute(CatMetric()), compute(MeanSquaredError())]


def test_when_no_rank_has_samples_the_value_is_that_of_an_empty_metric() -> None:
    for total, entries, error in run_ranks(nobody, 2):
        assert total == 0
        assert entries == []
        assert error.isnan()


BATCHES = [digits(10 * start, 10 * start + 7) for start in range(9)]


class Forgetful(ErrorCount):
    """It forgets to say how one of its counts is merged."""

    synced: ClassVar[dict[str, Any]] = {
        name: rule for name, rule in ErrorCount.synced.items() if name != "seen"
    }

    def compute(self) -> dict[str, Any]:
        return {"rate": float(self.wrong) / max(1, self.seen)}


class WrongRule(ErrorCount):
    synced: ClassVar[dict[str, Any]] = {**ErrorCount.synced, "seen": "max"}


def test_a_metric_of_ones_own_needs_one_line_and_is_checked_by_one_call() -> None:
    for size in (1, 2, 3):
        values = run_ranks(check_metric, size, ErrorCount, BATCHES)
        assert all(value == values[0] for value in values)
        assert values[0]["n"] == sum(values[0]["kinds"].values()) > 0
    run_ranks(check_metric, 3, PearsonCorrCoef, [(x[:, 0], y.float()) for x, y in BATCHES])
    with pytest.raises(AssertionError, match="WrongRule gives"):
        run_ranks(check_metric, 3, WrongRule, BATCHES)
    with pytest.raises(DisagreementError, match="declare it as a state"):
        run_ranks(check_metric, 3, Forgetful, BATCHES)


class TotalLoss:
    synced: ClassVar[dict[str, Any]] = {
        "total": "sum",
        "smallest": "min",
        "table": "sum",
        "all": len,
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = evenly.Total(torch.tensor(0.0), 0.0)
        self.smallest: Tensor | None = None
        self.table: dict[str, int] = {}
        self.all = 0

    def update(self, values: Tensor, name: str) -> None:
        self.total = evenly.Total(self.total.sum + values.sum(), self.total.weight + len(values))
        least = values.min()
        self.smallest = least if self.smallest is None else torch.minimum(least, self.smallest)
        self.table[name] = self.table.get(name, 0) + len(values)

    def compute(self) -> Any:
        mean = float(self.total.sum / self.total.weight)
        return mean, self.smallest, dict(sorted(self.table.items())), self.all


def merged_object() -> Any:
    with evenly.open_world() as world:
        metric = TotalLoss()
        if world.rank:
            metric.update(torch.arange(world.rank * 2.0) + 1, "ab"[world.rank % 2])
            metric.update(torch.tensor([5.0]), "a")
        return compute(metric)


def test_totals_dictionaries_and_functions_are_rules_too() -> None:
    for mean, smallest, table, ranks in run_ranks(merged_object, 3):
        assert mean == pytest.approx((1 + 2 + 5 + 1 + 2 + 3 + 4 + 5) / 8)
        assert smallest == 1.0
        assert table == {"a": 6, "b": 2}
        assert ranks == 3


def test_half_precision_predictions_are_raised_and_empty_batches_change_nothing() -> None:
    seen: list[Any] = []

    class Spy:
        def update(self, predictions: Any, target: Any) -> None:
            seen.append((predictions, target, torch.is_autocast_enabled("cpu")))

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        update({"spy": [Spy()]}, {"x": x, "n": torch.tensor([1])}, [x.half(), "text"])
        update([Spy()], torch.ones(0, 3), torch.ones(0))
        update([Spy()], [], [])
    assert len(seen) == 1
    predictions, target, autocast = seen[0]
    assert (predictions["x"].dtype, predictions["n"].dtype) == (torch.float32, torch.int64)
    assert not predictions["x"].requires_grad
    assert (target[0].dtype, target[1]) == (torch.float32, "text")
    assert not autocast


def test_copies_share_no_state_with_each_other_or_with_what_they_were_made_of() -> None:
    metrics: dict[str, Any] = {"all": seven(), "own": ErrorCount()}
    update(metrics, *digits(0, 30))
    train, test = copies(metrics), copies(metrics, device=torch.device("cpu"))
    update(train, *digits(30, 50))
    assert train["all"].MulticlassAccuracy._update_count == 1
    assert test["all"].MulticlassAccuracy._update_count == 0
    assert (metrics["own"].seen, train["own"].seen, test["own"].seen) == (30, 20, 0)


def test_a_saved_local_state_goes_on_as_if_nothing_had_happened(world: evenly.World) -> None:
    def fresh() -> Any:
        return {"all": seven(), "own": TotalLoss(), "range": MinMaxMetric(SumMetric())}

    metrics, other = fresh(), fresh()
    metrics["all"].update(*digits(0, 30))
    metrics["own"].update(torch.ones(2), "a")
    metrics["range"].update(torch.tensor(3.0))
    compute(metrics)
    state = local_state(metrics)
    for each in (metrics["all"], metrics["range"]):
        each.reset()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    load_local_state(other, torch.load(file, weights_only=True))
    other["all"].update(*digits(30, 50))
    reference = fresh()["all"]
    reference.update(*digits(0, 30))
    reference.update(*digits(30, 50))
    values = compute(other)
    assert_same(values["all"], compute(reference), "resumed")
    assert values["own"] == (1.0, torch.tensor(1.0), {"a": 2}, 0)
    assert values["range"]["max"] == 3.0
    with pytest.raises(SettingError, match="has version 9"):
        load_local_state(other, {**state, "version": 9})
    with pytest.raises(SettingError, match="the state is of the metrics"):
        load_local_state(SumMetric(), state)


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "how-to" / "metrics.md"
    names: dict[str, Any] = {"__name__": "page"}
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(example, names)
    names["test_error_rate"]()
    assert "MulticlassF1Score" in capsys.readouterr().out
