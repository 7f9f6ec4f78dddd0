"""Several losses from one forward pass, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenly.collectives import all_reduce
from evenly.errors import SettingError
from evenly.world import current_world

# Gradients are exchanged in pieces of about this many bytes, which bounds the memory for them.
_PIECE = 25 * 2**20


def step_each(pairs: Sequence[tuple[Tensor, Optimizer]]) -> None:
    """Step each optimizer with the gradients of its own loss only, on any number of processes.

    ``pairs`` are (part.share(loss), optimizer), all from one forward pass of modules that are *not*
    replicated (two backward passes from one forward do not fit DDP; start them equal with
    `evenly.match`). Parameters may be shared between optimizers. All gradients are computed before
    any step, so beyond plain training this holds one more copy of shared ones; they are then
    averaged over the ranks, which is a meeting of all. A parameter that no rank's loss depends on
    keeps no gradient. Gradients are cleared before and after.
    """
    if not pairs:
        raise SettingError("step_each() was given no (loss, optimizer) pairs.")
    for number, (loss, _) in enumerate(pairs):
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise SettingError(
                f"loss {number} of step_each() must be one number that depends on parameters; give "
                "part.share(loss)."
            )
    found = []
    for number, (loss, optimizer) in enumerate(pairs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [p for p in parameters if p.requires_grad]
        gradients = torch.autograd.grad(
            loss, parameters, retain_graph=number < len(pairs) - 1, allow_unused=True
        )
        found.append((optimizer, parameters, _averaged(parameters, gradients)))
    for optimizer, parameters, averaged in found:
        for parameter, gradient in zip(parameters, averaged, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def _averaged(parameters: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The mean over ranks of each gradient; None where no rank has one."""
    if current_world().size == 1:
        return list(gradients)
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float32)
    used = all_reduce(used)  # checked: ranks must bring the same parameters
    averaged: list[Tensor | None] = [None] * len(parameters)
    for piece in _pieces(parameters):
        chosen = [i for i in piece if used[i]]
        given = [gradients[i] for i in chosen]
        filled = [
            torch.zeros_like(parameters[i]) if gradient is None else gradient
            for i, gradient in zip(chosen, given, strict=True)
        ]
        for i, gradient in zip(chosen, all_reduce(filled, "mean", check=False), strict=True):
            averaged[i] = gradient
    return averaged


def _pieces(parameters: list[Tensor]) -> Iterator[list[int]]:
    piece: list[int] = []
    size = 0
    for number, parameter in enumerate(parameters):
        piece.append(number)
        size += parameter.numel() * parameter.element_size()
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
