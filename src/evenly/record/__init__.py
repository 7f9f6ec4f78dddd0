"""The run record: what a run was, and every number of it, as JSON lines. No torch here.

writer    lines out, by one process, at most a second late
reading   whole lines in, from any offset, also while they are written
run       the lines put together: one run, whatever its launches
series    one number over the steps
sampling  fewer points that look the same
coverage  a digest of the samples used, and of the samples planned
summary   a run in one row; where runs lie
"""

from evenly.record.reading import FILE, VERSION, Tail
from evenly.record.run import Run, read_run
from evenly.record.writer import Writer

__all__ = ["FILE", "VERSION", "Run", "Tail", "Writer", "read_run"]
