"""Evaluation: every sample once, means by weight, no collective before the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from evenly.collectives import any_rank
from evenly.meeting import apart, some_absent
from evenly.objective import Total
from evenly.part import Part
from evenly.seeding import seed_streams
from evenly.training.averages import Averages
from evenly.training.measures import TrainMeasures
from evenly.training.modes import evaluating
from evenly.training.precision import Mixed
from evenly.training.recipe import Recipe
from evenly.training.update import ALONE


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """All ranks left an evaluation, because one of them was asked to stop."""

    agreed = True


@torch.no_grad()
def evaluate(
    parts: Iterable[Part],
    *,
    model: nn.Module,
    recipe: Recipe,
    measures: TrainMeasures,
    mixed: Mixed,
    samples: int,
    meets: bool,
    losses: Averages,
    averages: Averages,
    interrupted: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """The loss and the metrics over all ranks' parts; a meeting of all ranks at the end.

    ``measures`` and ``losses`` are filled and computed; ``averages`` holds what was logged. A rank
    without samples runs none of the user's code, unless ranks meet in it. With ``interrupted`` it
    is given up (`Interrupted`, on all ranks) when that is so on one of them.
    """
    given_up = False
    with evaluating(model, recipe.module):
        for part in parts:
            if interrupted is not None and not meets and interrupted():
                given_up = True
                break
            if part.weight == 0 and not meets:
                continue
            with mixed.autocast(), secluded(part, meets):
                output = recipe.run(model, part.data, split=True)
            if output.loss is not None:
                weighed = recipe.weigh(output, count=part.weight, whole=samples, size=1, split=True)
                losses.add("loss", Total(weighed.total, weighed.weight), piece=part.piece)
            for name, value in output.log.items():
                averages.log(name, value, part.weight, part.piece)
            if part.weight:
                measures.update(part, output)
    if interrupted is not None and any_rank(given_up):
        raise Interrupted
    values: dict[str, Any] = {**losses.gathered(), **averages.gathered()}
    values.update(flat(measures.compute()))
    return values


def runs(parts: Iterable[Part], seed: int, purpose: str) -> Iterator[Part]:
    """The parts as they are to be run: whole, or piece by piece, each with its random streams."""
    for part in parts:
        if part.pieces is None:
            yield part
            continue
        for piece in part.pieces:
            assert piece.piece is not None
            seed_streams(seed, purpose, piece.step, piece.piece)
            yield piece


def secluded(part: Part, meets: bool = False) -> contextlib.AbstractContextManager[None]:
    """Around the forward pass of a part: refuses meetings that not all ranks would come to."""
    if part.piece is not None:
        return apart(ALONE)
    lonely = part.global_weight < part.world.size and not meets
    return some_absent() if lonely else contextlib.nullcontext()


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values by one name each; numbers as Python's."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict):
            found.update(flat(value, f"{label}/"))
        elif isinstance(value, Tensor) and value.numel() == 1:
            found[label] = float(value)
        else:
            found[label] = value
    return found
