"""What is likely behind a difference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """What is likely behind a difference."""

    name: str
    """In one or two words, always the same for the same reason."""
    text: str
    remedy: str
    quantity: str
    """Where it shows first."""
    step: int | None = None
