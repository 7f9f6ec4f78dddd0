"""Why a run differs: the likely reason, and what to do about it.

Each function looks at what both runs wrote down and names a reason, or none. They are asked in the
order in which a difference comes about: weights, samples, loss and gradient, update, metrics.
"""

from __future__ import annotations

from dataclasses import replace

from evenly.parity.case import TRAINING, Case
from evenly.parity.reasons.data import explain_samples
from evenly.parity.reasons.ranks import explain_ranks, explain_start
from evenly.parity.reasons.reason import Reason
from evenly.parity.reasons.steps import explain_step, explain_update
from evenly.parity.reasons.values import explain_metrics, explain_predictions

__all__ = ["Reason", "reasons"]


def reasons(case: Case) -> list[Reason]:
    """The reason of the first difference, and those of metrics and predictions that have their
    own. What follows from an earlier difference is not explained again.
    """
    found = [_first(case), explain_metrics(case), explain_predictions(case)]
    return [reason for reason in found if reason is not None]


def _first(case: Case) -> Reason | None:
    """Of what is different in the earliest step, the cause comes before its effects."""
    apart = [f for name in TRAINING if (f := case.of(name)).status == "different"]
    if not apart:
        return None
    first = min(apart, key=lambda f: (f.step or 0, TRAINING.index(f.quantity)))
    step = first.step or 0
    if case.run.size == case.reference.size:
        return Reason(
            "not repeatable",
            f"two runs on the same number of processes differ, first in {first.quantity} at step "
            f"{step}: something is not seeded.",
            "seed what draws (torch.manual_seed, the data's order) and compare again, before "
            "comparing process counts.",
            first.quantity,
            step,
        )
    if step == 0:
        return explain_start(case)
    key = next((key for key in case.keys if key[1] == step), case.keys[-1])
    if first.quantity == "ranks":
        return explain_ranks(case, key)
    if first.quantity == "samples":
        found = explain_samples(case, key)
        return replace(found, text=found.text + _effect(case, step))
    if first.quantity in ("loss", "gradient"):
        return explain_step(case, key, first.quantity, grown=first.grown)
    return explain_update(case, key, first.quantity, grown=first.grown)


def _effect(case: Case, step: int) -> str:
    """What other samples did to the gradient of the same step."""
    gradient = case.of("gradient")
    if gradient.status != "different" or gradient.step != step:
        return ""
    return (
        f" The effect: the gradient of {gradient.tensor} is off by {gradient.units * case.eps:.2g} "
        f"of its size, {gradient.units:.2g} units of rounding."
    )
