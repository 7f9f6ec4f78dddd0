"""The ledger: what a rank's pieces give, added up along the tree as far as they reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from evenly.errors import LossError
from evenly.pieces.layout import Layout, Sheet
from evenly.pieces.tree import Route


class Ledger:
    """Gradients of one piece after the other, added in the order of the tree.

    A piece that completes a node adds its gradients to the value before it as the backward pass
    makes them; any other keeps them on a sheet of its own. There are as many sheets as the tree is
    high, at most twice. What has no gradient in a piece counts as -0.0 there, which changes no
    number that it is added to, not even the sign of a zero.
    """

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        self._layout, self._parameters = layout, parameters
        self._free: list[Sheet] = []
        self.stack: list[Sheet] = []
        self.used = [False] * len(parameters)
        """Which parameters had a gradient in any piece of this step here."""
        self._merges: dict[int, int] = {}
        self._left = 0
        self._fresh = False
        self._seen: list[bool] = []
        self._orderly = False  # until a backward pass has been seen to give each gradient once
        self._repeated = False
        self._waiting: list[int] | None = None
        self._sent = 0
        self._ready: Callable[[int], None] | None = None
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(place))
            for place, parameter in enumerate(parameters)
        ]

    def open(self, route: Route) -> None:
        """Start a step."""
        self._free += self.stack
        self.stack = []
        self._merges = route.merges
        self.used = [False] * len(self._parameters)

    def blank(self) -> Sheet:
        return self._free.pop() if self._free else Sheet(self._layout)

    def start(self, piece: int) -> None:
        """Take the gradients that come now for this piece's."""
        self._left = self._merges[piece]
        self._fresh = self._left == 0
        if self._fresh:
            self.stack.append(self.blank())
        self._left = max(0, self._left - 1)
        self._seen = [False] * len(self._parameters)
        views = self.stack[-1].views
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if self._fresh else views[place]

    def put(self, place: int, value: Tensor | None) -> None:
        """The value of a buffer after this piece; None where it has not changed."""
        view = self.stack[-1].views[self._layout.gradients + place]
        if self._fresh:
            view.fill_(-0.0) if value is None else view.copy_(value)
        elif value is not None:
            view.add_(value)

    def send_as_ready(self, ready: Callable[[int], None]) -> None:
        """This is the last piece: call ``ready`` with each bucket, in order, once it is complete.

        On a GPU, and where a backward pass makes a gradient twice (reentrant checkpoints), that is
        only after it.
        """
        self._ready, self._sent = ready, 0
        on_cpu = all(bucket.device.type == "cpu" for bucket in self._layout.buckets)
        if self._orderly and on_cpu:
            self._waiting = [bucket.waiting for bucket in self._layout.buckets]

    def finish(self) -> None:
        """The gradients of this piece are complete."""
        if self._fresh:
            for place, seen in enumerate(self._seen):
                if not seen:
                    self.stack[-1].views[place].fill_(-0.0)
        self._waiting = None
        for bucket in range(self._sent, len(self._layout.buckets)):
            self._complete(bucket)
        if self._left:
            self._free += self.stack[-self._left :]
            del self.stack[-self._left :]
        self._orderly = not self._repeated
        self._ready, self._sent, self._seen = None, 0, []

    def settle(self, result: Sheet) -> None:
        """Give each parameter its gradient; the other sheets are free."""
        self._free += [sheet for sheet in self.stack if sheet is not result]
        self.stack = [result]
        for parameter, view in zip(self._parameters, result.views, strict=False):
            parameter.grad = view

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._free, self.stack = [], [], []

    def _hook(self, place: int) -> Callable[[Tensor], None]:
        bucket = self._layout.slots[place].bucket

        def arrived(parameter: Tensor) -> None:
            if not self._seen:
                return  # a backward pass of the user's own
            if self._fresh and not self._seen[place]:
                view = self.stack[-1].views[place]
                view.copy_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = view
            self.used[place] = True
            if self._seen[place]:
                self._note_repeated(bucket)
            else:
                self._seen[place] = True
                if self._waiting is not None:
                    self._count(bucket)

        return arrived

    def _count(self, bucket: int) -> None:
        assert self._waiting is not None
        self._waiting[bucket] -= 1
        while self._sent < len(self._waiting) and self._waiting[self._sent] == 0:
            self._complete(self._sent)
            self._sent += 1

    def _complete(self, bucket: int) -> None:
        """Add up what is complete with this piece, in one bucket."""
        depth = len(self.stack)
        for step in range(self._left):
            self.stack[depth - 2 - step].flats[bucket].add_(
                self.stack[depth - 1 - step].flats[bucket]
            )
        if self._ready is not None:
            self._ready(bucket)

    def _note_repeated(self, bucket: int) -> None:
        self._repeated = True
        if self._waiting is not None and bucket < self._sent:
            raise LossError(
                "a parameter was given a gradient twice in one backward pass, when the first had "
                "been sent already. Reentrant checkpoints do so: use_reentrant=False does not."
            )
