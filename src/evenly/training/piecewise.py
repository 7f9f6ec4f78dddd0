"""One optimizer step in pieces: the same bits on any number of processes."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenly.collectives import all_gather_object
from evenly.errors import SettingError
from evenly.layers import SyncBatchNorm
from evenly.meeting import apart, meeting
from evenly.objective import Output
from evenly.part import Part
from evenly.pieces.buffers import Buffers
from evenly.pieces.exchange import Exchange
from evenly.pieces.layout import Layout
from evenly.pieces.ledger import Ledger
from evenly.pieces.tree import Route, fold
from evenly.plan import pieces_of
from evenly.seeding import PieceStreams
from evenly.training.carrier import Wishes
from evenly.training.head import Head, Said, Told
from evenly.training.recipe import Weighed
from evenly.training.stopwatch import Stopwatch
from evenly.training.update import ALONE, Update
from evenly.watchdog.activity import activity


class PieceUpdate(Update):
    """Makes optimizer steps whose bits do not depend on the number of processes.

    Each piece of a step runs alone: its random streams are keyed by its number, its buffers start
    from the step's. Gradients, changes of buffers, losses and weights are added up along one tree
    over the pieces. With several ranks every `step` is a meeting of all: an all-to-all and an
    all-gather for each bucket of gradients, in which everything else travels too.
    """

    def __init__(self, *args: Any, pieces: int, streams: PieceStreams, **options: Any) -> None:
        self._pieces, self._streams = pieces, streams
        self._ledger: Ledger
        self._exchanges: list[int] = []
        """The buffers that steps change, which are exchanged with the gradients."""
        self._routes: dict[int, Route] = {}
        super().__init__(*args, **options)
        self._averaged_over = 1  # what comes out of the tree is a sum
        self._meets = False

    def close(self) -> None:
        self._ledger.close()

    def _settle_parameters(self) -> None:
        modules = [self._model]
        if self._recipe.module is not None:
            modules.append(self._recipe.module)
        self._modules = nn.ModuleList(modules)
        self._parameters = [p for p in self._modules.parameters() if p.requires_grad]
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._held = [p for p in self._parameters if id(p) in held]
        double = any(p.dtype == torch.float64 for p in self._parameters)
        self._rounding = 4 * torch.finfo(torch.float64 if double else torch.float32).eps
        self._settled = self._trained()
        for parameter in self._modules.parameters():
            parameter.grad = None  # of one that was frozen it would be used at every step
        self._buffers = Buffers(modules)
        self._exchanges = []
        self._lay_out()

    def _lay_out(self) -> None:
        """Make room for the gradients, and for the buffers that are known to change."""
        world = self._world
        averaged = [self._buffers.like(b) for b in self._exchanges if self._buffers.averaged(b)]
        self._layout = Layout(self._parameters, averaged, world.size)
        if hasattr(self, "_ledger"):
            self._ledger.close()
        self._ledger = Ledger(self._layout, self._parameters)
        counts = [b for b in self._exchanges if not self._buffers.averaged(b)]
        self._head = Head(
            pieces=len(pieces_of(self._pieces, 0, world.size)),
            parameters=len(self._parameters),
            counts=[self._buffers.like(b) for b in counts],
        )
        if world.size > 1:
            self._exchange = Exchange(self._layout, world, self._pieces, self._head.size)

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._modules.parameters()]

    def _exchanged(self, part: Part, wishes: Wishes, timed: Stopwatch | None) -> list[float]:
        assert part.pieces is not None
        world, ledger = self._world, self._ledger
        route = self._route(min(part.global_weight, self._pieces))
        self._buffers.open(self._exchanges)
        ledger.open(route)
        told = Told(part, wishes)
        if world.size > 1:
            self._exchange.open(route)
        for run in part.pieces:
            self._run(run, told, last=run is part.pieces[-1])
        if not part.pieces:
            self._runs.append((part, 0.0))
            self._settle_findings()
            for bucket in range(len(self._layout.buckets) if world.size > 1 else 0):
                self._send(bucket, told)
        self.met = time.perf_counter()
        with contextlib.nullcontext() if timed is None else timed.waiting():
            everyone = self._everyone(told)
        return self._finish(told, route, everyone)

    def _run(self, run: Part, told: Told, *, last: bool) -> None:
        """Forward and backward of one piece."""
        assert run.piece is not None
        activity.enter("step")
        self._streams.enter(run.piece)
        with self._mixed.autocast(), apart(ALONE):
            output, weighed = self._alone(run)
        self._runs.append((run, weighed.total))
        self._watch(run, output)
        self._settle_findings()
        told.sums[run.piece] = (weighed.total, weighed.weight)
        self._ledger.start(run.piece)
        self._take_buffers(run, told)
        if last and self._world.size > 1:
            self._ledger.send_as_ready(lambda bucket: self._send(bucket, told))
        loss = self._mixed.scale(weighed.loss) * weighed.factor
        loss.reshape(()).backward()
        self._ledger.finish()
        self._buffers.restore()

    def _alone(self, run: Part) -> tuple[Output, Weighed]:
        before = self._world.collectives
        found = self._weighed(run)
        if self._world.collectives != before:
            raise SettingError(f"ranks met in the forward pass or the loss. {ALONE}")
        return found

    def _take_buffers(self, run: Part, told: Told) -> None:
        """Put down what this piece has made of the buffers."""
        assert run.piece is not None
        share = run.weight / run.global_weight
        changes: dict[int, Tensor] = {}
        for buffer, value in self._buffers.changed(self._exchanges):
            if self._buffers.averaged(buffer):
                changes[buffer] = self._buffers.change(buffer, value, share)
            elif run.piece == 0:
                told.counts[buffer] = value.clone()
        averaged = [b for b in self._exchanges if self._buffers.averaged(b)]
        for place, buffer in enumerate(averaged):
            self._ledger.put(place, changes.pop(buffer, None))
        if changes:
            told.changes[run.piece] = changes

    def _send(self, bucket: int, told: Told) -> None:
        last = bucket == len(self._layout.buckets) - 1
        head = self._written(told) if last else _NOTHING
        # What a node is summed onto lies before what is added to it.
        covers = self._routes[told.live(self._pieces)].covers[self._world.rank]
        self._exchange.send(bucket, self._ledger.stack[: len(covers)], head)

    def _written(self, told: Told) -> Tensor:
        buffers = self._buffers
        others = [b for b in self._exchanges if not buffers.averaged(b)]
        counts = [told.counts.get(b, buffers.like(b)) for b in others]
        surprised = bool(told.changes) or any(b not in others for b in told.counts)
        return self._head.written(told, self._ledger.used, counts, surprised)

    def _everyone(self, told: Told) -> list[Said]:
        """What all ranks said; the parameters have the sums of all gradients afterwards."""
        ledger = self._ledger
        result = ledger.stack[0] if ledger.stack else ledger.blank()
        if self._world.size == 1:
            heads = [self._written(told)]
        else:
            with meeting("the exchange of gradients"):
                heads = self._exchange.finish(result)
        ledger.settle(result)
        return [self._head.read(head) for head in heads]

    def _finish(self, told: Told, route: Route, everyone: list[Said]) -> list[float]:
        """Put the sums over all ranks in their places; the message."""
        used = np.logical_or.reduce([said.used for said in everyone])
        for place in np.flatnonzero(~used).tolist():
            self._parameters[place].grad = None
        owned = [pieces_of(self._pieces, rank, self._world.size) for rank in range(len(everyone))]
        sums = {
            (piece, piece + 1): (said.totals[place], said.weights[place])
            for own, said in zip(owned, everyone, strict=True)
            for place, piece in enumerate(own)
            if piece < route.live
        }
        total, weight = fold(self._pieces, sums, lambda a, b: (a[0] + b[0], a[1] + b[1]))
        self._advance_buffers(everyone[0].counts)
        if any(said.surprised for said in everyone):
            self._add_buffers(told)
        stop, save = any(said.stop for said in everyone), any(said.save for said in everyone)
        differ = len({said.place for said in everyone}) > 1
        # As `Message` reads it: the last two are the mean and the mean square of tags.
        return [total, weight, float(stop), float(save), 0.0, float(differ)]

    def _advance_buffers(self, counts: list[Tensor]) -> None:
        averaged = [b for b in self._exchanges if self._buffers.averaged(b)]
        views = self._ledger.stack[0].views[self._layout.gradients :]
        for buffer, change in zip(averaged, views, strict=True):
            self._buffers.advance(buffer, change)
        others = [b for b in self._exchanges if not self._buffers.averaged(b)]
        for buffer, value in zip(others, counts, strict=True):
            self._buffers.replace(buffer, value)

    def _add_buffers(self, told: Told) -> None:
        """Buffers have changed for the first time: a meeting of all ranks, who exchange them apart
        at this step and with the gradients from the next one on.
        """
        counts = {b: v.cpu() for b, v in told.counts.items() if b not in self._exchanges}
        changes = {p: {b: v.cpu() for b, v in own.items()} for p, own in told.changes.items()}
        ranks = all_gather_object((changes, counts))
        by_piece = {piece: own for found, _ in ranks for piece, own in found.items()}
        new = sorted({buffer for own in by_piece.values() for buffer in own})
        for buffer in new:
            values = {(p, p + 1): own[buffer] for p, own in by_piece.items() if buffer in own}
            change = fold(self._pieces, values, torch.add)
            self._buffers.advance(buffer, change.to(self._buffers.like(buffer).device))
        for buffer, value in ranks[0][1].items():
            self._buffers.replace(buffer, value)
        self._exchanges = sorted({*self._exchanges, *new, *ranks[0][1]})
        gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        self._lay_out()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _route(self, live: int) -> Route:
        if live not in self._routes:
            world = self._world
            self._routes[live] = Route.of(self._pieces, live, world.rank, world.size)
        return self._routes[live]


_NOTHING = torch.empty(0, dtype=torch.uint8)


def check_alone(model: nn.Module, pieces: int, size: int) -> None:
    """Refuse what cannot run in pieces."""
    pieces_of(pieces, 0, size)
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
            where = name or type(layer).__name__
            raise SettingError(f"{where} is a SyncBatchNorm and pieces={pieces}: {ALONE}")
