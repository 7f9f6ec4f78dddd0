"""Metrics and predictions that are not over all samples."""

from __future__ import annotations

from collections.abc import Sequence

from evenly.parity.case import Case
from evenly.parity.comparing import joined
from evenly.parity.reasons.reason import Reason
from evenly.parity.rounding import STEP, gap
from evenly.wording import some


def explain_metrics(case: Case) -> Reason | None:
    finding = case.of("metrics")
    if finding.status != "different":
        return None
    for key, reference in case.reference.first.values.items():
        told = [rank.values.get(key) for rank in case.run.ranks]
        numbers = [value.number if value.file is None else value.digest for value in told if value]
        if key[0] != "metric" or not numbers or numbers[0] is None:
            continue
        if len({repr(number) for number in numbers}) > 1:
            return Reason(
                "metric not synced",
                f"{key[1]} is another number on each rank ({_shown(numbers)}; the reference has "
                f"{_shown([reference.number])}): it is over that rank's samples alone.",
                "evenly.compute(metrics) and trainer.log give the number over all ranks.",
                "metrics",
            )
        alone = len(numbers) < case.run.size and not case.trained_apart
        if alone and reference.number is not None and numbers[0] != reference.number:
            return Reason(
                "metric not synced",
                f"{key[1]} is told by one rank alone and is not the reference's "
                f"({_shown(numbers[:1])}, not {_shown([reference.number])}): it is over that "
                "rank's samples.",
                "compute it over all ranks (evenly.compute), then show it on one.",
                "metrics",
            )
    if case.trained_apart:
        return None
    return Reason(
        "evaluation",
        f"{finding.tensor} is the same on all ranks but not the reference's, with parameters that "
        "are: a mean of the ranks' means, or samples that are evaluated twice (DistributedSampler) "
        "or not at all. (Where a count differs by one, rounding may have tipped a sample.)",
        "evaluate with trainer.test, or with evenly.Loader and evenly.compute.",
        "metrics",
    )


def explain_predictions(case: Case) -> Reason | None:
    finding = case.of("predictions")
    if finding.status != "different":
        return None
    for key, reference in case.reference.first.values.items():
        told = [value for rank in case.run.ranks if (value := rank.values.get(key)) is not None]
        if key[0] != "prediction" or reference.file is None or not told:
            continue
        one, other = reference.read(), joined(told, reference)
        if other is None or not one.dim() or not other.dim():
            continue
        if len(other) != len(one):
            fault = "repeated" if len(other) > len(one) else "missing"
            return Reason(
                f"predictions {fault}",
                f"{key[1]} has {len(other)} rows over all ranks, the reference {len(one)}.",
                "trainer.predict gives each sample once, in data-set order; DistributedSampler "
                "repeats samples.",
                "predictions",
            )
        if case.trained_apart or one.shape != other.shape:
            continue
        one, other = (t.double().reshape(len(t), -1).sum(1).sort().values for t in (one, other))
        if gap(one, other, case.eps).units <= STEP:
            return Reason(
                "order of predictions",
                f"{key[1]} has the rows of the reference in another order: as the ranks had them, "
                "not as the data set has.",
                "sort them by sample index; trainer.predict does.",
                "predictions",
            )
    if case.trained_apart:
        return None
    return Reason(
        "evaluation",
        f"{finding.tensor} differs although the parameters do not: the forward pass outside of "
        "training depends on the process count (a model left in training mode, statistics of a "
        "batch).",
        "call model.eval() before predicting; trainer.predict does.",
        "predictions",
    )


def _shown(numbers: Sequence[object]) -> str:
    return some([f"{n:.6g}" if isinstance(n, float) else "several numbers" for n in numbers], 4)
