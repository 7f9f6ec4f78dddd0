"""Evaluation: every sample once, means by weight, no collective before the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from evenly import metrics as measured
from evenly.collectives import any_rank
from evenly.meeting import some_absent
from evenly.objective import Total
from evenly.part import Part
from evenly.training.averages import Averages, gathered
from evenly.training.measures import check_predictions
from evenly.training.modes import evaluating
from evenly.training.precision import Mixed
from evenly.training.recipe import Recipe


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """All ranks left an evaluation, because one of them was asked to stop."""

    agreed = True


@torch.no_grad()
def evaluate(
    parts: Iterable[Part],
    *,
    model: nn.Module,
    recipe: Recipe,
    metrics: Any,
    mixed: Mixed,
    samples: int,
    meets: bool,
    averages: Averages,
    interrupted: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """The loss and the metrics over all ranks' parts; a meeting of all ranks at the end.

    ``metrics`` are updated and computed; ``averages`` holds what was logged. A rank without samples
    runs none of the user's code, unless ranks meet in it. With ``interrupted`` it is given up
    (`Interrupted`, on all ranks) when that is so on one of them.
    """
    given_up = False
    seen = [torch.empty(0, dtype=torch.int64)]
    losses = Averages()
    with evaluating(model, recipe.module):
        for part in parts:
            if interrupted is not None and not meets and interrupted():
                given_up = True
                break
            if part.weight == 0 and not meets:
                continue
            lonely = part.global_weight < part.world.size and not meets
            with mixed.autocast(), some_absent() if lonely else contextlib.nullcontext():
                output = recipe.run(model, part.data, split=True)
            if output.loss is not None:
                weighed = recipe.weigh(output, count=part.weight, whole=samples, size=1, split=True)
                losses.add("loss", Total(weighed.total, weighed.weight))
            for name, value in output.log.items():
                averages.log(name, value, part.weight)
            if metrics and part.weight:
                check_predictions(output)
                measured.update(metrics, output.predictions, output.target)
                seen.append(part.indices)
    if interrupted is not None and any_rank(given_up):
        raise Interrupted
    values: dict[str, Any] = {**gathered(losses), **gathered(averages)}
    if metrics:
        values.update(flat(measured.compute(metrics, positions=torch.cat(seen))))
    return values


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
