"""Ranks that start with different weights, or do not stay together."""

from __future__ import annotations

import torch

from evenly.parity.case import Case
from evenly.parity.reading import Key, Step
from evenly.parity.reasons.reason import Reason
from evenly.parity.rounding import STEP, gap


def explain_start(case: Case) -> Reason:
    ranks = case.of("ranks")
    if ranks.status == "different" and ranks.step == 0:
        return Reason(
            "ranks start apart",
            f"the ranks start with different weights ({ranks.tensor}): they were drawn with "
            "different seeds, or loaded on one rank alone.",
            "seed every rank alike before the model is made (torch.manual_seed(0), without the "
            "rank), or let evenly.replicate, the Trainer or DDP give all of them rank 0's.",
            "ranks",
            0,
        )
    tensor = case.of("parameters").tensor
    return Reason(
        "initial weights",
        f"the run starts with other weights than the reference ({tensor}): what draws them depends "
        "on the process count, or is not seeded.",
        "seed before the model is made, with a number that does not depend on rank or size; draw "
        "nothing before it on some ranks only.",
        "parameters",
        0,
    )


def explain_ranks(case: Case, key: Key) -> Reason:
    steps, step = case.run.steps(key), key[1]
    where = case.of("ranks").tensor
    if any(s.gradient.digests != steps[0].gradient.digests for s in steps):
        average = _mean_gradient(case, key)
        also = " Their mean is the reference's gradient." if average else ""
        return Reason(
            "gradients not exchanged",
            f"at step {step} each rank updates with a gradient of its own, so the ranks' "
            f"parameters part ({where}).{also}",
            "train the replica that evenly.replicate or DDP returns, not the module inside it; "
            "leave no_sync() before the last backward pass; change no gradient on one rank alone.",
            "ranks",
            step,
        )
    if any(s.record["settings"] != steps[0].record["settings"] for s in steps):
        return Reason(
            "settings by rank",
            f"at step {step} the optimizers of the ranks have different settings "
            f"({setting(steps[0].record['settings'], _odd(steps).record['settings'])}).",
            "make optimizer and schedule on all ranks alike; base no decision on a rank's own "
            "loss.",
            "ranks",
            step,
        )
    return Reason(
        "ranks part",
        f"by the end of step {step} the ranks' parameters differ ({where}), their gradients do "
        "not: something changes parameters, or the optimizer's state, on one rank by itself.",
        "look for random noise, clipping or averaging of weights, or code under `if rank == 0`, "
        "between two steps.",
        "ranks",
        step,
    )


def _mean_gradient(case: Case, key: Key) -> bool:
    """Whether the mean of the ranks' gradients is the reference's, as far as samples show."""
    reference, steps = case.reference.first.steps[key].gradient, case.run.steps(key)
    for name in reference.names:
        if any(name not in step.gradient.digests for step in steps):
            return False
        held = [step.gradient.read(name, sample=True).double().reshape(-1) for step in steps]
        mean = torch.stack(held).mean(0)
        one = reference.read(name, sample=True).double().reshape(-1)
        if gap(one, mean, case.eps).units > 16 * STEP:
            return False
    return True


def setting(one: list[dict[str, float]], other: list[dict[str, float]]) -> str:
    for group, (a, b) in enumerate(zip(one, other, strict=False)):
        for name in a:
            if a[name] != b.get(name):
                where = f" of group {group}" if len(one) > 1 else ""
                factor = b.get(name, 0.0) / a[name] if a[name] else 0.0
                times = f", {factor:.4g} times" if factor else ""
                return f"{name}{where}: {b.get(name):.6g} and not {a[name]:.6g}{times}"
    return "their number of groups"


def _odd(steps: list[Step]) -> Step:
    return next(s for s in steps if s.record["settings"] != steps[0].record["settings"])
