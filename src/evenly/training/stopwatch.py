"""How long a rank works on a step by itself, without waiting for the others; taken now and then.

In the backward pass of DDP, the wait comes after all of the rank's own gradients are there: a
callback of the autograd engine marks that moment. On a GPU, which runs behind, events mark it.
Meetings in the forward pass (`SyncBatchNorm`, for one) are not told from work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from evenly.watchdog.activity import activity
from evenly.world import World


class Stopwatch:
    """Times one step when the watchdog asks for it, about once a second."""

    def __init__(self, world: World) -> None:
        self._shared = world.size > 1
        self._gpu = world.device.type == "cuda"
        self._waited = 0.0
        self._ready = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._late: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None
        self.runs = False

    def start(self) -> None:
        """The batch is there."""
        activity.sample = False
        self.runs = True
        self._waited = self._ready = 0.0
        if self._gpu:
            self._events = (_event(), _event())
            self._events[0].record()

    def backward(self, loss: Tensor) -> None:
        """The backward pass that exchanges gradients."""
        if not self._shared:
            loss.backward()
            self._own_work_is_done()
            return
        # Within the pass, so that the callback comes before DDP's own, which waits.
        loss.register_hook(self._mark)
        loss.backward()
        if self._ready and not self._gpu:
            self._waited = time.perf_counter() - self._ready

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange that comes after all of the rank's own work."""
        self._own_work_is_done()
        yield
        if not self._gpu:
            self._waited = time.perf_counter() - self._ready

    def stop(self, begin: float, data: float) -> None:
        """The step that began then, and waited that long for ``data``, is over."""
        self.runs = False
        if not self._gpu:
            activity.samples.append((time.perf_counter() - begin - self._waited, data))
            return
        # The events of the step before: waiting for those of this one would stop the GPU.
        if self._late is not None and self._late[1].query():
            first, last, waited = self._late
            activity.samples.append((waited + first.elapsed_time(last) / 1e3, waited))
        ended = self._events if self._ready else None
        self._late = None if ended is None else (*ended, data)

    def _mark(self, gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._own_work_is_done)

    def _own_work_is_done(self) -> None:
        if self._gpu and self._events is not None:
            self._events[1].record()
        self._ready = time.perf_counter()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
