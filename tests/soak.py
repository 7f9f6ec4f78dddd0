"""How long `make soak` is: EVENLY_SOAK=0.1 does a tenth of everything."""

import os


def share(count: int) -> int:
    """So many of ``count`` repetitions, one at least."""
    return max(1, round(count * float(os.environ.get("EVENLY_SOAK", "1"))))
