"""Eval mode for a while, and every module's own mode afterwards."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """The modules in eval mode; afterwards each of their parts is as it was."""
    given = [module for module in modules if module is not None]
    modes = [(part, part.training) for module in given for part in module.modules()]
    for module in given:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
