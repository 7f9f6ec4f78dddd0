"""One optimizer step: forward, backward, the ranks' exchange, clipping, the update."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenly.errors import LossError, SettingError
from evenly.layers import SyncBatchNorm
from evenly.meeting import some_absent
from evenly.objective import Output
from evenly.part import Part
from evenly.replica import Replica, wrap
from evenly.training.carrier import NO_WISHES, Carriage, Message, News, Wishes
from evenly.training.precision import Mixed
from evenly.training.recipe import Recipe, Weighed
from evenly.training.rehearsal import Findings, agreed, doubt
from evenly.training.stopwatch import Stopwatch
from evenly.training.verdict import Runs, Verdict
from evenly.watchdog.activity import activity
from evenly.world import World


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How steps are made; see `Trainer` for what each means."""

    microbatch: int | None = None
    clip_norm: float | None = None
    find_unused_parameters: bool = False
    collective_forward: bool | None = None
    check_loss: bool = True
    pieces: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        limit, norm = self.microbatch, self.clip_norm
        for name, given in (("pieces", self.pieces), ("threads", self.threads)):
            if given is not None and (not isinstance(given, int) or given < 1):
                raise SettingError(f"{name}={given!r}: give a whole number, 1 or more.")
        if self.pieces is None and self.threads != 1:
            raise SettingError(f"threads={self.threads} goes with pieces=, which fixes them.")
        if self.pieces is not None and limit is not None:
            raise SettingError(
                f"microbatch={limit} and pieces={self.pieces}: a piece is already what a process "
                "holds at once. Leave out microbatch=, and give more pieces if they are too large."
            )
        if self.pieces is not None and self.collective_forward:
            raise SettingError(f"collective_forward=True and pieces={self.pieces}: {ALONE}")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise SettingError(f"microbatch={limit!r}: give 1 or more samples, or leave it out.")
        if norm is not None and not norm > 0:
            raise SettingError(f"clip_norm={norm!r}: give a number above 0, or leave it out.")


ALONE = (
    "with pieces= each piece of a step is computed alone, and ranks run different numbers of them, "
    "so that ranks cannot meet in the forward pass or the loss (SyncBatchNorm, gathered "
    "embeddings). Leave out pieces=, or what meets: BatchNorm works on pieces."
)


class Outcome(NamedTuple):
    """What a step did."""

    message: Message
    """The loss and the weight of the whole step, over all ranks."""
    news: News | None
    """The message, if it was read; then the step was judged by it."""
    runs: Runs
    updated: bool


class Update:
    """Makes optimizer steps with the gradient of the mean over the whole step.

    With several ranks every `step` is a meeting of all: DDP's own exchange of gradients, in which
    everything else travels too. At the first one they also tell each other what they found out
    about the loss. A rank without samples runs none of the user's code, unless ranks meet in it.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        optimizer: Optimizer,
        settings: UpdateSettings,
        *,
        world: World,
        mixed: Mixed,
        verdict: Verdict,
        watch: Callable[[Part, Output], None],
        before_update: Callable[[Part], None] = lambda part: None,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """``watch`` sees the output of each micro-batch, ``on_gradients`` the final gradients;
        ``before_update`` comes between what ranks do apart and what they do alike.
        """
        self._model, self._recipe, self._optimizer = model, recipe, optimizer
        self._settings = settings
        self._world, self._mixed, self._verdict = world, mixed, verdict
        self._watch, self._on_gradients = watch, on_gradients
        self._before_update = before_update
        self._meets = settings.collective_forward
        if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
            self._meets = True
        self._rescale: bool | None = None
        self._found = Findings()
        self._runs: Runs = []
        self._averaged_over = world.size  # what comes out of the exchange is a mean over ranks
        self._replica: Replica | None = None
        self.share: Tensor | float = 1.0
        """Turns gradients of values inside the model, on this rank, into those of the mean."""
        self.met = 0.0
        """When this rank was done with the forward pass, before the others are waited for."""
        self._settle_parameters()

    def refresh(self) -> None:
        """Take note of parameters that were frozen or thawed; a meeting of all ranks if so."""
        if self._trained() != self._settled:
            self._settle_parameters()

    def step(
        self, part: Part, wishes: Wishes = NO_WISHES, stopwatch: Stopwatch | None = None
    ) -> Outcome:
        """One optimizer step on ``part``, with which all ranks hear of this one's wishes."""
        timed = stopwatch if stopwatch is not None and activity.sample else None
        if timed is not None:
            timed.start()
        for parameter in self._parameters:
            parameter.grad = None
        self._runs = []
        try:
            values = self._exchanged(part, wishes, timed)
        except RuntimeError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from None
        message = Message(values, self._averaged_over)
        self.share = self._mixed.unscale(self._optimizer) / self._averaged_over
        # Nobody waits for a GPU, unless what comes next depends on the news.
        known = not (isinstance(values, Tensor) and values.is_cuda) or self._verdict.early
        news = message.read() if known else None
        if self._rescale:
            self._divide(part.global_weight, values, news)
        good = news is None or self._verdict.good(news, self._runs)
        self._before_update(part)
        if good and self._on_gradients is not None:
            self._on_gradients()
        if self._settings.clip_norm is not None and good:
            norm = torch.nn.utils.clip_grad_norm_(self._held, self._settings.clip_norm)
            # An overflow of scaled gradients is the scaler's business, and nothing unusual.
            if news is None and not self._mixed.scaled:
                message = Message(values, self._averaged_over, norm)
            elif news is not None and not self._mixed.scaled:
                good = self._verdict.good_gradient(float(norm), self._runs)
        if good:
            self._mixed.step(self._optimizer)
        else:
            self._mixed.skip()
        return Outcome(message, news, self._runs, good)

    def judged(self, outcome: Outcome) -> News:
        """The news of a step that was not waited for; raises if they are bad."""
        news = outcome.message.read()
        self._verdict.good(news, outcome.runs)
        self._verdict.good_gradient(news.norm, outcome.runs)
        return news

    def close(self) -> None:
        """Let go of the exchange, so that the model can be trained in another way."""
        if self._replica is not None:
            self._replica.leave()

    @property
    def meets(self) -> bool:
        """Whether ranks meet in the user's code, as far as is known."""
        return bool(self._meets)

    def _exchanged(
        self, part: Part, wishes: Wishes, timed: Stopwatch | None
    ) -> Tensor | list[float]:
        """Forward, backward and the exchange: parameters have the step's gradients after it, and
        what ranks said comes back.
        """
        self._carriage.begin(part.epoch, part.step)
        limit = self._settings.microbatch
        parts = [part] if limit is None else part.cut(limit)
        for number, run in enumerate(parts):
            last = number == len(parts) - 1
            self._accumulate(run, len(parts), last, wishes, timed if last else None)
        self._check_all_used()
        return self._carriage.arrived()

    def _accumulate(
        self, run: Part, runs: int, last: bool, wishes: Wishes, timed: Stopwatch | None
    ) -> None:
        if runs > 1:
            activity.enter("step")
        if self._replica is None:
            loss = self._forward(run, runs, last, wishes)
        else:
            if self._replica.require_backward_grad_sync != last:  # setting it costs microseconds
                self._replica.require_backward_grad_sync = last
            loss = self._replica(functools.partial(self._forward, run, runs, last, wishes))
        self._settle_findings()
        if last:
            self.met = time.perf_counter()
        if timed is None:
            loss.backward()
        else:
            timed.backward(loss)

    def _settle_findings(self) -> None:
        """Once, after the first forward pass: what all ranks found out about the loss."""
        if self._rescale is None:
            found = agreed(self._found)
            self._rescale = found.rescale
            self._meets = found.meets if self._meets is None else self._meets

    def _forward(self, run: Part, runs: int, last: bool, wishes: Wishes) -> Tensor:
        """This rank's share of the loss of a run, loaded with what the ranks are to know."""
        if run.weight == 0 and not self._meets:
            self._runs.append((run, 0.0))
            # With find_unused_parameters DDP does not wait for them, and a zero gradient would
            # let the optimizer decay a parameter that no rank used.
            touch = not self._settings.find_unused_parameters
            return self._carriage.load_nothing(touch=touch, last=last, wishes=wishes)
        with self._mixed.autocast():
            if not self._meets and run.global_weight // self._world.size < runs:
                with some_absent():
                    output, weighed = self._weighed(run)
            else:
                output, weighed = self._weighed(run)
        self._runs.append((run, weighed.total))
        if run.weight:
            self._watch(run, output)
        loss = self._mixed.scale(weighed.loss)
        return self._carriage.load(
            loss if loss.dim() == 0 else loss.reshape(()),
            factor=weighed.factor,
            total=weighed.total,
            weight=weighed.weight,
            last=last,
            wishes=wishes,
        )

    def _weighed(self, run: Part) -> tuple[Output, Weighed]:
        # Nothing is split where one process takes whole steps: then the loss is the user's own.
        settings = self._settings
        cut = settings.microbatch is not None or settings.pieces is not None
        split = self._world.size > 1 or cut
        before = self._world.collectives if self._rescale is None else 0
        output = self._recipe.run(self._model, run.data, split=split)
        if output.loss is None:
            raise SettingError(
                "there is no loss to train on: give the Trainer loss=, or let step= return "
                "Output(loss=...)."
            )
        weighed = self._recipe.weigh(
            output,
            count=run.weight,
            whole=run.global_weight,
            size=self._averaged_over,
            split=split,
        )
        if not weighed.loss.requires_grad:
            raise LossError(
                "the loss does not depend on any parameter that is trained: it was detached, "
                "computed under no_grad, or made with .item() or numpy."
            )
        if self._rescale is None:
            meets = self._world.collectives != before
            problem = None
            if split and self._settings.check_loss and not (meets or self._meets):
                problem = doubt(self._recipe, self._model, run.data, output, run.weight)
            self._found = Findings(weighed.rescale, meets, problem)
        elif weighed.rescale != self._rescale:
            raise LossError(
                "the loss is a mean at one step and an evenly.Total at another; return the same "
                "kind always."
            )
        return output, weighed

    def _divide(self, samples: int, values: Tensor | list[float], news: News | None) -> None:
        """From the gradient of sum over samples to that of sum over weight, now that it is known.

        A GPU is not waited for. There, no weight gives no gradient instead of nan.
        """
        factor: Tensor | float = 1.0
        if news is None:
            assert isinstance(values, Tensor)
            weight = values[1] * self._averaged_over
            factor = torch.where(weight > 0, samples / weight, 0.0)
        elif news.weight and abs(samples / news.weight - 1) > self._rounding:
            factor = samples / news.weight
        if isinstance(factor, Tensor) or factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
            self.share = self.share * factor

    def _settle_parameters(self) -> None:
        modules = [self._model]
        if self._recipe.module is not None and list(self._recipe.module.parameters()):
            modules.append(self._recipe.module)
        world = self._world
        self._carriage = Carriage(modules, size=world.size, device=world.device)
        self._rounding = 4 * torch.finfo(self._carriage.kind).eps
        self._parameters = self._carriage.parameters_of_modules
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._held = [p for p in self._parameters if id(p) in held]
        self._settled = self._trained()
        for parameter in self._carriage.trained.parameters():
            parameter.grad = None  # of one that was frozen it would be used at every step
        if self._replica is not None:
            self._replica.leave()
        if world.size > 1:
            self._replica = wrap(self._carriage, self._settings.find_unused_parameters)

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._carriage.trained.parameters()]

    def _check_all_used(self) -> None:
        if self._replica is None or self._settings.find_unused_parameters:
            return
        if any(parameter.grad is None for parameter in self._parameters):
            named = self._carriage.trained.named_parameters()
            raise _unused([name.partition(".")[2] for name, p in named if p.grad is None])

    def _explained(self, error: RuntimeError) -> BaseException:
        """What a failed exchange means; any other error is itself."""
        if "finished reduction in the prior iteration" in str(error):
            return _unused([])
        return self._world.explain(error, "the exchange of gradients")


def _unused(names: list[str]) -> SettingError:
    which = f"{len(names)} parameters ({', '.join(names[:6])})" if names else "some parameters"
    return SettingError(
        f"{which} had no part in the loss of a step, and the other ranks wait for their gradients. "
        "If the model leaves parameters out of some steps, pass find_unused_parameters=True; if "
        "they are not to be trained at all, set requires_grad=False on them."
    )
