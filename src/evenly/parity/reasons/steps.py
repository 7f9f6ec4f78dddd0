"""Losses, gradients and updates that are not those of the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from evenly.parity.case import Case
from evenly.parity.reading import Key, Run
from evenly.parity.reasons.data import inputs
from evenly.parity.reasons.ranks import setting
from evenly.parity.reasons.reason import Reason
from evenly.parity.rounding import STEP, gap
from evenly.wording import some

_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta")


def explain_step(case: Case, key: Key, quantity: str, *, grown: bool) -> Reason:
    step = key[1]
    if grown:
        return _grown(case, step, quantity)
    found = _ratio(case, key) or inputs(case, key) or _layers(case, key)
    if found is not None:
        return found
    weights = case.run.weights(key)
    if len(set(weights)) > 1:
        return Reason(
            "mean of means",
            f"step {step} is split unevenly ({some(weights, 6)} samples on the ranks), and the "
            "mean of the ranks' means is not the mean over the samples.",
            "backward part.share(loss), which weighs each rank by its samples; the Trainer does.",
            quantity,
            step,
        )
    before = case.trail[0].key != key and case.of("gradient").status != "absent"
    if before:
        return Reason(
            "unknown",
            f"until step {step} all is equal to rounding, then {quantity} differs at once: this "
            "step is another computation, not grown rounding.",
            "look at what is special about this step: the last of an epoch, a schedule, an "
            "evaluation before it. evenly.trace(...).samples(indices) shows its samples.",
            quantity,
            step,
        )
    return Reason(
        "denominator",
        "from the first step on the gradient is not that of the mean over all samples, though the "
        "ranks have equally many: the loss divides by something that differs between them (tokens, "
        "class weights, ignore_index), or needs all samples at once.",
        "return evenly.Total(sum, weight), whose weights are added up over the ranks; gather what "
        "the loss compares with evenly.all_gather(..., grad=True).",
        quantity,
        step,
    )


def explain_update(case: Case, key: Key, quantity: str, *, grown: bool) -> Reason:
    step = key[1]
    one, other = case.reference.first.steps[key].record, case.run.first.steps[key].record
    if one["settings"] != other["settings"]:
        return Reason(
            "learning rate",
            f"at step {step} the optimizer has other settings than in the reference "
            f"({setting(one['settings'], other['settings'])}), and the gradient is the same.",
            "do not scale the learning rate by the process count: the global batch stays the same.",
            "parameters",
            step,
        )
    if grown:
        return _grown(case, step, quantity)
    kind = case.reference.first.initial[key[0]]["type"]
    if case.undecided.count and kind.startswith(_ADAM):
        return Reason(
            "amplified rounding",
            f"at step {step} the gradients are equal to rounding, and {kind} divides them by their "
            f"own size: of {case.undecided.count} elements the gradient is zero but for rounding, "
            "which decides their step.",
            "remove parameters without effect (a bias before BatchNorm), give the optimizer a "
            "larger eps, or use Trainer(pieces=P).",
            quantity,
            step,
        )
    if quantity == "buffers":
        found = _layers(case, key)
        if found is not None:
            return found
        return Reason(
            "buffers",
            f"after step {step} the buffer {case.of('buffers').tensor} differs and the parameters "
            "do not: it is computed from a rank's own samples.",
            "average it over the ranks, or compute it from what all ranks have.",
            quantity,
            step,
        )
    return Reason(
        "update",
        f"at step {step} the gradients are equal and the updated parameters are not: the "
        "optimizer, or what follows it, depends on the process count.",
        "look at the optimizer's state, weight averaging and hooks that use rank or size.",
        quantity,
        step,
    )


def _ratio(case: Case, key: Key) -> Reason | None:
    """A gradient that is a multiple of the reference's."""
    one, other = _flat(case.reference, key), _flat(case.run, key)
    size = case.run.size
    if one.shape != other.shape or size == 1:
        return None
    square, dot = float(one @ one), float(one @ other)
    if not square or not dot:
        return None
    ratio = dot / square
    alike = dot / (square * float(other @ other)) ** 0.5 > 0.95
    rest = gap(one * ratio, other, case.eps)
    exact = rest.units <= STEP and abs(ratio - 1) > STEP * case.eps
    told = f"at step {key[1]} the gradient is {ratio:.4g} times that of the reference"
    if alike and abs(ratio * size - 1) < 0.1:
        return Reason(
            "loss is a sum",
            f"{told}, which is 1/{size}: gradients are averaged over the ranks, and the loss is a "
            "sum over the samples, not a mean; or a mean is divided by the process count again.",
            "use reduction='mean' with part.share(loss), or return evenly.Total(sum, weight).",
            "gradient",
            key[1],
        )
    if alike and abs(ratio / size - 1) < 0.1:
        return Reason(
            "gradients are summed",
            f"{told}, the process count: gradients of means are added up over the ranks, not "
            "averaged.",
            "divide by the process count after the all-reduce, or let DDP do it.",
            "gradient",
            key[1],
        )
    if exact:
        return Reason(
            "gradient is scaled",
            f"{told}, and otherwise equal to rounding: a factor depends on the process count or "
            "on the size of a rank's part.",
            "look at what the loss is divided or multiplied by, and at clipping.",
            "gradient",
            key[1],
        )
    return None


def _layers(case: Case, key: Key) -> Reason | None:
    """Layers that see or draw by rank."""
    if case.run.size == 1:
        return None
    about = case.reference.first.initial.get(key[0], {})
    norms, drops = about.get("batch_norms", []), about.get("dropouts", [])
    draws = any(step.record["draws"] for step in case.run.steps(key))
    if norms:
        also = f" ({some(drops, 3)} also draws by rank.)" if drops else ""
        return Reason(
            "BatchNorm",
            f"{some(norms, 3)}: BatchNorm takes its statistics over each rank's samples.{also}",
            "evenly.SyncBatchNorm.convert(model) takes them over the whole step.",
            "gradient",
            key[1],
        )
    if draws or drops:
        who = some(drops, 3) if drops else "the forward pass"
        return Reason(
            "random layers",
            f"{who}: dropout, or another random layer, draws for each rank by itself.",
            "that is another draw and no fault; compare with the model in eval mode or dropout at "
            "0, or use Trainer(pieces=P), whose draws do not depend on the process count.",
            "gradient",
            key[1],
        )
    return None


def _grown(case: Case, step: int, quantity: str) -> Reason:
    first, last = case.trail[0], next(t for t in case.trail if t.key[1] == step)
    return Reason(
        "grown rounding",
        f"rounding that has grown: {max(first.gradient.units, first.parameters.units):.2g} units "
        f"at the first step, {last.before:.2g} before step {step}, without a jump. Every step is "
        "right to rounding; training amplifies it.",
        "compare fewer steps, or in float64; for the same bits use Trainer(pieces=P).",
        quantity,
        step,
    )


def _flat(run: Run, key: Key) -> Tensor:
    """The whole gradient of rank 0 as one vector."""
    gradient = run.first.steps[key].gradient
    read = [gradient.read(name, sample=True).double().reshape(-1) for name in gradient.names]
    return torch.cat(read) if read else torch.zeros(0, dtype=torch.float64)
