"""Elements whose update rounding decides: their gradient is zero but for it.

Adam divides a gradient by its own size, so that noise becomes a step of full length. Attention has
such parameters by nature (the bias of the keys), and so has any bias before BatchNorm. They have no
effect on the loss, and parameters are compared without them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenly.parity.reading import Tensors
from evenly.parity.rounding import FLOOR, STEP, rms
from evenly.tracing.prints import sampled

NOISE = 2.0**-10
"""The relative error from which on a gradient is not known well enough to divide by it (in half
types 32 eps)."""


class Undecided:
    """The elements, by parameter, that were undecided at any step until now."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    @property
    def count(self) -> int:
        return sum(int(found.sum()) for found in self._found.values())

    def add(self, one: Tensors, other: Tensors, eps: float) -> None:
        """Take note of the gradients of a step, which are equal to rounding on the whole."""
        sample = not (one.whole and other.whole)
        if all(other.digests.get(name) == digest for name, digest in one.digests.items()):
            return
        scale = max(rms(one.read(name, sample=sample)) for name in one.names)
        noise = max(NOISE, 32 * eps)
        for name, digest in one.digests.items():
            if other.digests.get(name) == digest:
                continue
            a, b = one.read(name, sample=sample), other.read(name, sample=sample)
            apart = (a - b).abs()
            # No larger than rounding is: a tipped activation changes gradients that are not zero.
            noisy = (apart > noise * a.abs()) & (apart <= STEP * eps * max(scale * FLOOR, rms(a)))
            before = self.of(name, noisy)
            self._found[name] = noisy if before is None else noisy | before

    def of(self, name: str, like: Tensor) -> Tensor | None:
        """Those of one parameter, of which ``like`` is the whole or a sample."""
        found = self._found.get(name)
        if found is None or found.shape == like.shape:
            return found
        return sampled(found)

    def without(self, name: str, one: Tensor, other: Tensor) -> Tensor:
        """``other`` with those elements taken from ``one``."""
        found = self.of(name, one)
        return other if found is None else torch.where(found, one, other)
