"""How lists read in a message."""

from collections.abc import Sequence


def some(items: Sequence[object], most: int = 4) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 3" or "ranks 3, 5"; nothing for none."""
    if not numbers:
        return ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
