"""The verdict on a step: what all ranks know about it, and what to do if that is bad.

Every rank reads the same news, so all come to the same verdict without asking. Only when a number
is not finite do they meet, to say whose it is.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from evenly.collectives import all_gather_object
from evenly.errors import EvenlyWarning, LossError, SettingError
from evenly.part import Part
from evenly.training.carrier import News
from evenly.tree import leaves
from evenly.wording import ranks, some
from evenly.world import World

_OTHERS = 3.0  # seconds that ranks which are apart wait to hear where the others are

Nonfinite = Literal["stop", "skip", "continue"]
Runs = list[tuple[Part, Tensor | float]]
"""This rank's micro-batches of a step, each with its loss total."""


class Verdict:
    """Judges steps by the rule for losses and gradients that are not finite."""

    def __init__(self, world: World, nonfinite: Nonfinite) -> None:
        if nonfinite not in get_args(Nonfinite):
            raise SettingError(
                f"nonfinite={nonfinite!r}; give 'stop', 'skip' (leave out the step) or 'continue'."
            )
        self._world = world
        self._nonfinite = nonfinite
        self.early = nonfinite == "skip"
        """Whether the verdict must be known before the update, even if a GPU must be waited for."""

    def good(self, news: News, runs: Runs) -> bool:
        """Whether a step may be used; raises where the run must end."""
        if not news.apart and news.weight != 0 and math.isfinite(news.total):
            return True
        part = runs[0][0]
        where = f"step {part.step} of epoch {part.epoch}"
        if news.apart:
            raise LossError(
                f"the ranks are not at the same step: {self._places(part)}. A rank left out a step "
                "or made one more, or called a collective that the others did not."
            )
        if news.weight == 0:
            raise LossError(
                f"the weights of {where} sum to 0 over all {part.global_weight} samples, so there "
                "is no mean: every target is ignored, or every Total has weight 0. Leave such "
                "samples out, or give some of them weight.",
                agreed=True,
            )
        if self._nonfinite == "continue":
            return True
        return self._answer(f"the loss of {where} is {news.total / news.weight}", runs)

    def good_gradient(self, norm: float, runs: Runs) -> bool:
        """The same by the norm of the gradient, where there is one to look at."""
        if self._nonfinite == "continue" or math.isfinite(norm):
            return True
        part = runs[0][0]
        where = f"step {part.step} of epoch {part.epoch}"
        return self._answer(f"the gradient of {where} has norm {norm}", runs)

    def _places(self, part: Part) -> str:
        """Which ranks are at which step. All of them know that they are apart, so each says where
        it is; in the store, because a collective could pair with anything now.
        """
        store, size = self._world.store, self._world.size
        own = f"step {part.step} of epoch {part.epoch}"
        if store is None:
            return f"rank {self._world.rank} is at {own}"
        places: dict[str, list[int]] = {}
        with contextlib.suppress(RuntimeError):
            store.set(f"apart/{self._world.rank}", own)
            deadline = time.monotonic() + _OTHERS
            for rank in range(size):
                while not store.check([f"apart/{rank}"]) and time.monotonic() < deadline:
                    time.sleep(0.02)
                there = store.check([f"apart/{rank}"])
                place = f"at {store.get(f'apart/{rank}').decode()}" if there else "elsewhere"
                places.setdefault(place, []).append(rank)
        few = sorted(places.items(), key=lambda item: len(item[1]))
        return ", ".join(f"{ranks(members)} {place}" for place, members in few)

    def _answer(self, what: str, runs: Runs) -> bool:
        """A meeting of all ranks: each says which of its samples are to blame."""
        found = all_gather_object(
            [_blamed(run) for run, total in runs if not math.isfinite(float(total))]
        )
        named = [
            f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts if text
        ]
        message = f"{what}. " + ("; ".join(named) or "Every rank's own loss is finite") + ". "
        if self._nonfinite == "stop":
            raise LossError(
                message + "Look at these samples, lower the learning rate or clip gradients "
                "(clip_norm=); nonfinite='skip' leaves such steps out.",
                agreed=True,
            )
        if self._world.rank == 0:
            warnings.warn(message + "The step is left out.", EvenlyWarning, stacklevel=2)
        return False


def _blamed(run: Part) -> str:
    text = f"the loss of samples {some(run.indices.tolist(), 16)} is not finite"
    rows = _bad_rows(run.data, run.weight)
    if rows is not None and rows.any():
        bad = run.indices[rows.nonzero().flatten().cpu()].tolist()
        text += f", and the data of samples {some(bad, 16)} are not"
    return text


def _bad_rows(data: Any, count: int) -> Tensor | None:
    """Which samples have a number that is not finite in their data."""
    bad: Tensor | None = None
    for leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:1] == (count,):
            here = ~torch.isfinite(leaf.detach().reshape(count, -1)).all(dim=1)
            bad = here if bad is None else bad | here.to(bad.device)
    return bad
