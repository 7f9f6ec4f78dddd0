"""One run beside the reference: every quantity, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from evenly.parity.case import QUANTITIES, Case, Finding, Trail
from evenly.parity.reading import Key, Run, Tensors, Value
from evenly.parity.rounding import (
    FLOOR,
    JUMP,
    STEP,
    TIPPED,
    Gap,
    bounds,
    eps_of,
    gap,
    gradient_limit,
    limit,
    number_gap,
    rms,
)
from evenly.tracing.prints import sampled


def compared(reference: Run, run: Run) -> Case:
    """Compare all that both runs have written down."""
    case = Case(reference, run, _eps(reference, run))
    case.keys = [key for key in reference.keys if key in set(run.keys)]
    case.findings = {name: Finding(name) for name in QUANTITIES}
    _compare_ranks(case)
    _compare_steps(case)
    _compare_losses(case)
    _compare_values(case, "metric", "metrics")
    _compare_values(case, "prediction", "predictions")
    return case


def tensors_gap(one: Tensors, other: Tensors, eps: float) -> Gap:
    """The tensor that differs most between two groups of the same names."""
    return _worst(one, other, eps, lambda name, a, b, coarse, floor: gap(a, b, coarse, floor, name))


def _parameters_gap(case: Case, one: Tensors, other: Tensors, before: float) -> Gap:
    """The same of parameters, without what rounding decides. Each may differ by its own rounding,
    and by as much of the way that it has come as gradients may.
    """
    starts = {name: start for start in case.reference.first.start.values() for name in start.names}

    def measured(name: str, a: Tensor, b: Tensor, eps: float, floor: float) -> Gap:
        start = starts[name].read(name, sample=a.shape != b.shape or not one.whole)
        way = rms(a.double() - start.double()) if start.shape == a.shape else 0.0
        b = case.undecided.without(name, a, b)
        share = max(bounds(eps)[0], 4 * case.tipped) * way  # 4: momentum carries it on
        return gap(a, b, eps, floor, name, own=lambda unit: limit(eps, before) + share / unit)

    return _worst(one, other, case.eps, measured)


def _worst(
    one: Tensors,
    other: Tensors,
    eps: float,
    measured: Callable[[str, Tensor, Tensor, float, float], Gap],
) -> Gap:
    lone = sorted(set(one.names) ^ set(other.names))
    if lone:
        return Gap(False, math.inf, math.inf, lone[0])
    apart = [name for name in one.names if one.digests[name] != other.digests[name]]
    if not apart:
        return Gap()
    sample = not (one.whole and other.whole)
    floor = max(rms(one.read(name, sample=sample)) for name in one.names)
    exact = not sample
    found = []
    for name in apart:
        a, b = one.read(name, sample=sample), other.read(name, sample=sample)
        exact = exact and gap(a, b, eps).identical
        found.append(measured(name, a, b, max(eps, eps_of(a.dtype)), floor))
    worst = max(found, key=lambda g: (g.units / (g.allowed or 1.0), g.units))
    return replace(worst, identical=exact)


def _eps(reference: Run, run: Run) -> float:
    """The rounding of what the runs compute in: the coarsest of parameters, autocast, TF32."""
    found = [0.0]
    for rank in (reference.first, run.first):
        for number, start in rank.start.items():
            dtypes = [start.read(name, sample=True).dtype for name in start.names]
            found.append(eps_of(*dtypes))
            found.append(2.0**-11 if rank.initial[number]["tf32"] else 0.0)
        for step in rank.steps.values():
            half = step.record["half"]
            found.append(eps_of(getattr(torch, half)) if half else 0.0)
    return max(found) or torch.finfo(torch.float32).eps


def _compare_ranks(case: Case) -> None:
    """Whether all ranks of the run hold the same parameters, to the bit, at every step."""
    finding = case.of("ranks")
    if case.run.size == 1:
        return
    for number in case.run.first.start:
        held = [rank.start.get(number) for rank in case.run.ranks]
        _same_everywhere(finding, held, 0)
    for key in case.run.keys:
        _same_everywhere(finding, [step.parameters for step in case.run.steps(key)], key[1])


def _same_everywhere(finding: Finding, held: list[Tensors | None], step: int) -> None:
    first = held[0]
    assert first is not None
    for rank, other in enumerate(held):
        names = [
            n for n in first.names if other is None or other.digests.get(n) != first.digests[n]
        ]
        where = f"rank {rank}: {names[0]}" if names else ""
        finding.take(Gap(not names, math.inf if names else 0.0, 0.0, where), 0.0, step)


def _compare_steps(case: Case) -> None:
    before = 0.0
    for number, start in case.reference.first.start.items():
        other = case.run.first.start.get(number)
        if other is not None:
            found = tensors_gap(start, other, case.eps)
            case.of("parameters").take(found, 0.0, 0)
            before = max(before, found.units)
    for key in case.keys:
        one, other_step = case.reference.first.steps[key], case.run.first.steps[key]
        gradient = tensors_gap(one.gradient, other_step.gradient, case.eps)
        allowed = gradient_limit(case.eps, before)
        if _tipped(case, key, gradient, before):
            case.tipped = max(case.tipped, gradient.units * case.eps)
            case.of("gradient").note = f"rounding tipped an activation at step {key[1]}"
            allowed = gradient.units
        if gradient.units <= allowed:
            case.undecided.add(one.gradient, other_step.gradient, case.eps)
        parameters = _parameters_gap(case, one.parameters, other_step.parameters, before)
        _compare_samples(case, key)
        for name, found in (("gradient", gradient), ("parameters", parameters)):
            case.of(name).take(found, allowed, key[1], grown=_grown(case, found, before))
        if one.buffers.names:
            found = tensors_gap(one.buffers, other_step.buffers, case.eps)
            grown = _grown(case, found, before)
            case.of("buffers").take(found, limit(case.eps, before), key[1], grown=grown)
        case.trail.append(Trail(key, before, gradient, parameters))
        before = max(before, parameters.units)
    made = [max(key[1] for key in run.keys) for run in (case.reference, case.run)]
    if made[0] != made[1]:
        case.of("samples").take(Gap(False, math.inf), 0.0, min(made) + 1)
        case.of("samples").note = f"{made[1]} steps, the reference makes {made[0]}"


def _tipped(case: Case, key: Key, gradient: Gap, before: float) -> bool:
    """Whether a gradient differs and yet the step is the same: its loss is, as far as it is told,
    and the gradient of at least one tensor that is not small beside the others.
    """
    allowed = limit(case.eps, before)
    if case.eps < 1e-10 or gradient.units <= gradient_limit(case.eps, before):
        return False
    if case.of("gradient").status == "different":  # the runs have parted already
        return False
    if gradient.units * case.eps > TIPPED:
        return False
    losses = [loss for run in (case.reference, case.run) if (loss := run.loss(key[1])) is not None]
    if len(losses) == 2 and number_gap(losses[0], losses[1], case.eps).units > allowed:
        return False
    one, other = (run.first.steps[key].gradient for run in (case.reference, case.run))
    sample = not (one.whole and other.whole)
    pairs = [(one.read(n, sample=sample), other.read(n, sample=sample)) for n in one.names]
    floor = FLOOR * max(rms(a) for a, _ in pairs)
    return any(rms(a) > floor and gap(a, b, case.eps).units <= allowed for a, b in pairs)


def _grown(case: Case, found: Gap, before: float) -> bool:
    """Whether a difference is no larger than rounding of that size makes in one step."""
    sofar = max((t.gradient.units for t in case.trail), default=0.0)
    return found.units <= STEP * (1 + before) and found.units <= JUMP * max(sofar, STEP)


def _compare_samples(case: Case, key: Key) -> None:
    one, other = case.reference.samples(key), case.run.samples(key)
    if one is None or other is None:
        return
    same = sorted(one) == sorted(other)
    found = Gap(one == other, 0.0 if same else math.inf)
    case.of("samples").take(found, 0.0, key[1])
    if same and one != other:
        case.of("samples").note = "the same in each step, in another order"


def _compare_losses(case: Case) -> None:
    pairs = []
    for _, number in sorted({(0, key[1]) for key in case.keys}):
        one, other = case.reference.loss(number), case.run.loss(number)
        if one is not None and other is not None:
            pairs.append((number, one, other))
    # Of all steps, and not of one: a loss near zero is a difference of larger numbers.
    floor = max((abs(one) for _, one, _ in pairs if math.isfinite(one)), default=0.0)
    before = {trail.key[1]: trail.before for trail in reversed(case.trail)}
    for number, one, other in pairs:
        found = number_gap(one, other, case.eps, floor, "loss")
        apart = before.get(number, 0.0)
        grown = _grown(case, found, apart)
        case.of("loss").take(found, limit(case.eps, apart), number, grown=grown)


def _compare_values(case: Case, quantity: str, name: str) -> None:
    finding = case.of(name)
    allowed = limit(case.eps, max((trail.parameters.units for trail in case.trail), default=0.0))
    for key, reference in case.reference.first.values.items():
        if key[0] != quantity:
            continue
        label = f"{key[1]}" if key[2] == 1 else f"{key[1]} (time {key[2]})"
        told = [rank.values[key] for rank in case.run.ranks if key in rank.values]
        if not told:
            finding.take(Gap(False, math.inf, math.inf, label), 0.0, None)
            finding.note = finding.note or "not told at this count"
            continue
        for found in value_gaps(reference, told, case.eps, label):
            finding.take(found, allowed, None)


def value_gaps(reference: Value, told: list[Value], eps: float, label: str) -> Iterator[Gap]:
    """How far each rank's value is from the reference."""
    if reference.number is not None:
        for value in told:
            if value.number is None:
                yield Gap(False, math.inf, math.inf, label)
            else:
                yield number_gap(reference.number, value.number, eps, 0.0, label)
        return
    if all(value.digest == reference.digest for value in told):
        yield Gap()
        return
    other = joined(told, reference)
    if other is None or reference.file is None:
        yield Gap(False, math.inf, math.inf, label)
        return
    one = reference.read()
    if reference.whole and not all(value.whole for value in told):
        one = sampled(one)
    yield gap(one, other, max(eps, eps_of(one.dtype)), 0.0, label)


def joined(told: list[Value], reference: Value) -> Tensor | None:
    """Rank 0's, if all ranks have as much as the reference; else their rows in rank order."""
    if any(value.file is None for value in told):
        return None
    same = all(value.digest == told[0].digest for value in told)
    if same or all(value.shape == reference.shape for value in told):
        return told[0].read()
    read = [value.read() for value in told]
    if any(t.dim() == 0 or t.shape[1:] != read[0].shape[1:] for t in read):
        return None
    return torch.cat(read)
