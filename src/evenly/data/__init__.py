"""Data sets."""

from evenly.data.digits import digits

__all__ = ["digits"]
