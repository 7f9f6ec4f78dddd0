"""What a trainer does with data other than training on it: evaluating a stage, predicting."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from evenly import metrics as measured
from evenly import tracing
from evenly.evaluation import evaluate, runs, secluded
from evenly.loader import Loader
from evenly.matching import match_buffers
from evenly.part import Part
from evenly.prediction import predict, read_predictions
from evenly.prediction.layout import Format
from evenly.prediction.memory import Keep
from evenly.seeding import seed_streams, streams_kept
from evenly.training.measures import TrainMeasures
from evenly.training.modes import evaluating
from evenly.watchdog.activity import activity

if TYPE_CHECKING:
    from evenly.trainer import Trainer


class Stages:
    """Each stage (validation, test, ...) has metrics of its own, which never mix with others'."""

    def __init__(self, trainer: Trainer, metrics: Any) -> None:
        self._trainer, self._metrics = trainer, metrics
        self._measures: dict[str, TrainMeasures] = {}

    def evaluate(
        self, loader: Loader, stage: str, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Evaluate on one data set, with hooks; a meeting of all ranks."""
        trainer, recipe = self._trainer, self._trainer.recipe
        activity.at(trainer.epoch, trainer.position, trainer.step)
        trainer.hooks.call("on_evaluation_start", trainer, stage)
        for module in (trainer.evaluated, recipe.module):
            if module is not None:
                match_buffers(module)
        if stage not in self._measures:
            self._measures[stage] = trainer.way.measures(measured.copies(self._metrics))
        measures = self._measures[stage]
        before, trainer.averages = trainer.averages, trainer.way.averages()
        part, trainer.part = trainer.part, None
        try:
            with streams_kept(), trainer.way.held(), activity.within("evaluation", stage):
                seed_streams(trainer.seed, "evaluation", trainer.world.rank)
                parts = loader.epoch(0, pieces=trainer.way.pieces)
                values = evaluate(
                    runs(parts, trainer.seed, "evaluation"),
                    model=trainer.evaluated,
                    recipe=recipe,
                    measures=measures,
                    mixed=trainer.mixed,
                    samples=loader.plan.length,
                    meets=trainer.meets(),
                    losses=trainer.way.averages(),
                    averages=trainer.averages,
                    interrupted=interrupted,
                )
        finally:
            trainer.averages, trainer.part = before, part
            measures.reset()
        trainer.remember({f"{stage}/{name}": value for name, value in values.items()})
        trainer.hooks.call("on_evaluation_end", trainer, stage, values)
        return values

    def predict(
        self, loader: Loader, *, keep: Keep, out: str | os.PathLike[str] | None, format: Format
    ) -> Any:
        """The predictions in data-set order; a meeting of all ranks."""
        trainer, recipe = self._trainer, self._trainer.recipe
        model = trainer.evaluated
        out = tracing.redirected(out)

        def predictions(part: Part) -> Any:
            with trainer.mixed.autocast(), secluded(part):
                return recipe.predict(model, part.data)

        with (
            activity.within("prediction"),
            streams_kept(),
            torch.no_grad(),
            evaluating(model, recipe.module),
            trainer.way.held(),
        ):
            match_buffers(model)
            seed_streams(trainer.seed, "prediction", trainer.world.rank)
            parts = runs(loader.epoch(0, pieces=trainer.way.pieces), trainer.seed, "prediction")
            found = predict(
                parts, predictions, length=loader.plan.length, keep=keep, out=out, format=format
            )
        if tracing.active is not None:
            written = None if format == "parquet" else read_predictions(out) if out else found
            tracing.active.predictions(written)
        return found
