"""How lists read in a message."""

from collections.abc import Sequence


def some(items: Sequence[object], most: int = 4) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 2", "ranks 0, 1, 3" or "ranks 0 to 62"; nothing for none."""
    if not numbers:
        return ""
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
