"""The rehearsal: a loss is tried on parts of the first batch before anybody trusts its mean.

A loss that is the mean over its samples has, for a batch, the mean of the losses of its two parts,
weighed by their samples. One that divides by something else has not, and then the mean over ranks
would be wrong; so would that of micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenly.collectives import all_gather_object
from evenly.errors import LossError
from evenly.objective import Output, Sum, Total
from evenly.part import rows
from evenly.seeding import streams_kept
from evenly.training.modes import evaluating
from evenly.training.recipe import Recipe
from evenly.tree import leaves, map_leaves

# Where a batch is cut: parts may happen to have equal shares of what the loss divides by.
_CUTS = (2, 3, 5)
# How far a batch may be from its parts by rounding: where the loss can be computed in float64,
# in the parameters' own precision, and under autocast. What is looked for is larger: with class
# weights 7 to 15 % in the gradient, though less in the loss of an untrained model.
_DOUBLE, _SINGLE, _HALF = 1e-9, 1e-4, 1e-2
_HALVES = {torch.float16, torch.bfloat16}


class Findings(NamedTuple):
    """What a rank learns about the loss from its first batch; a rank without samples, nothing."""

    rescale: bool | None = None
    """Whether the loss comes with a weight that must be added up first."""
    meets: bool = False
    """Whether ranks meet in the user's code."""
    problem: str | None = None


def agreed(found: Findings) -> Findings:
    """What all ranks found together; a meeting of all. A problem is raised on every rank."""
    ranks = all_gather_object(found)
    for rank, one in enumerate(ranks):
        if one.problem is not None:
            raise LossError(f"{one.problem} (Seen on rank {rank}.)", agreed=True)
    kinds = {one.rescale for one in ranks if one.rescale is not None}
    if len(kinds) > 1:
        raise LossError(
            "some ranks' losses are a mean and others' an evenly.Total; return the same kind "
            "everywhere.",
            agreed=True,
        )
    return Findings(kinds.pop() if kinds else None, any(one.meets for one in ranks))


@torch.no_grad()
def doubt(recipe: Recipe, model: nn.Module, data: Any, output: Output, count: int) -> str | None:
    """What is wrong with the loss of this batch, or None. Runs the user's code up to 16 times.

    A loss that draws random numbers, or does not take a part of a batch, cannot be judged and is
    not. Ranks must not meet in it.
    """
    if recipe.known or count < 2:
        return None
    try:
        with streams_kept(), evaluating(model, recipe.module):
            if recipe.stepwise:
                tolerance = _tolerance(model)
                losses = _by_batch(recipe, model, data, count)
            else:
                losses, tolerance = _by_predictions(recipe, output, count)
    except Exception:  # the user's own, on a part that only we have made
        return None  # it cannot be cut by sample, so it cannot be judged
    if losses is None or isinstance(losses[0], Sum):
        return None
    whole, *parts = losses
    for start, (one, other) in zip(_starts(count), _pairs(parts), strict=True):
        if isinstance(whole, Total):
            problem = _doubt_total(whole, one, other, count, tolerance)
        else:
            shares = (start / count, 1 - start / count)
            problem = _doubt_mean(float(whole), float(one), float(other), shares, count, tolerance)
        if problem is not None:
            return problem
    return None


def _doubt_total(
    whole: Total, one: Total, other: Total, count: int, tolerance: float
) -> str | None:
    for name in ("sum", "weight"):
        expected = float(getattr(one, name)) + float(getattr(other, name))
        found = float(getattr(whole, name))
        if not _close(found, expected, tolerance):
            return (
                f"the {name} of the Total is {found:.6g} for a batch of {count} samples, but its "
                f"two parts' add up to {expected:.6g}. Both numbers of evenly.Total(sum, weight) "
                "must add up over samples: give the sum, and not the mean."
            )
    return None


def _doubt_mean(
    whole: float,
    one: float,
    other: float,
    shares: tuple[float, float],
    count: int,
    tolerance: float,
) -> str | None:
    joined = shares[0] * one + shares[1] * other
    if _close(whole, joined, tolerance):
        return None
    if _close(whole, one + other, tolerance):
        return (
            f"the loss of a batch of {count} samples is {whole:.6g}, the sum of its two parts' "
            f"({one:.6g} and {other:.6g}): it is a sum over samples, and its size would depend on "
            "the batch. Return the mean, or evenly.Total(loss, weight) with what to divide by."
        )
    return (
        f"the loss of a batch of {count} samples is {whole:.9g}, but the losses of its two parts "
        f"({one:.9g} and {other:.9g}) average to {joined:.9g}: it is not the mean over samples, "
        "and split over processes or micro-batches it would be wrong. If it divides by something "
        "else (tokens, class weights, what ignore_index leaves), return evenly.Total(sum, weight). "
        "If samples depend on each other (contrastive), gather them with evenly.all_gather(..., "
        "grad=True). check_loss=False trusts it as it is."
    )


def _starts(count: int) -> list[int]:
    return sorted({max(1, count // cut) for cut in _CUTS})


def _bounds(count: int) -> list[tuple[int, int]]:
    """The whole batch, then its two parts for each cut."""
    cuts = [((0, start), (start, count)) for start in _starts(count)]
    return [(0, count), *(bounds for cut in cuts for bounds in cut)]


def _pairs(parts: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _by_predictions(recipe: Recipe, output: Output, count: int) -> tuple[list[Any] | None, float]:
    """The losses of the whole and of its parts, from the predictions there are; None if it draws
    random numbers.
    """

    def losses(predictions: Any) -> list[Any] | None:
        return _repeatable(
            [
                recipe.loss_of(
                    rows(predictions, start, stop, count),
                    rows(output.target, start, stop, count),
                    split=True,
                )
                for start, stop in [(0, count), *_bounds(count)]
            ]
        )

    kinds = {leaf.dtype for leaf in leaves(output.predictions) if isinstance(leaf, Tensor)}
    if torch.float64 not in kinds:
        # In float64 rounding is out of the way; a loss with tensors of its own may not like it.
        with contextlib.suppress(RuntimeError):
            return losses(map_leaves(_double, output.predictions)), _DOUBLE
    tolerance = _HALF if kinds & _HALVES else _SINGLE
    return losses(output.predictions), _DOUBLE if torch.float64 in kinds else tolerance


def _by_batch(recipe: Recipe, model: nn.Module, data: Any, count: int) -> list[Any] | None:
    """The same by running the step again, in eval mode; None if it draws random numbers."""
    batches = [rows(data, *bounds, count) for bounds in _bounds(count)]
    return _repeatable(
        [recipe.run(model, batch, split=True).loss for batch in [batches[0], *batches]]
    )


def _repeatable(losses: list[Any]) -> list[Any] | None:
    """All but the first, which must be what the second is."""
    first, *rest = losses
    same = all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(_numbers(first), _numbers(rest[0]), strict=True)
    )
    return rest if same else None


def _tolerance(model: nn.Module) -> float:
    parameters = list(model.parameters())
    half = any(parameter.dtype in _HALVES for parameter in parameters)
    autocast = parameters and torch.is_autocast_enabled(parameters[0].device.type)
    return _HALF if half or autocast else _SINGLE


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _numbers(loss: Any) -> tuple[Any, ...]:
    return (loss.sum, loss.weight) if isinstance(loss, Total) else (loss,)


def _close(one: float, other: float, tolerance: float) -> bool:
    if one != one or other != other:  # nan is somebody else's business
        return True
    # Also absolutely: a loss near zero may be a sum of large numbers of both signs.
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-2)
