"""Who is stuck, and who waits for whom. Arithmetic on beats alone: no store, no clock, no torch.

A rank has moved when it entered or left something, or entered a collective. One that has not moved
for the time allowed is stuck, unless it waits for another. A rank waits if it is in a collective
that another has not entered, or in a wait for one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from evenly.watchdog.beats import Beat

# A rank whose last beat is older than this many seconds, and than three beats, is silent.
_SILENT = 5.0


class Standing(NamedTuple):
    """What is known of a rank now."""

    rank: int
    beat: Beat | None
    """None: it has not opened the world yet."""
    silent: float
    """Seconds since its last beat."""

    @property
    def idle(self) -> float:
        """Seconds since it last moved."""
        return self.silent + (self.beat.idle if self.beat is not None else 0.0)

    @property
    def is_silent(self) -> bool:
        if self.beat is None:
            return False
        return self.silent > min(_SILENT, max(1.0, 0.75 * self.beat.report))

    @property
    def place(self) -> tuple[int, float]:
        """How far it has come: the world, and the collective in it."""
        if self.beat is None:
            return (0, 0.0)
        if self.beat.phase == "left":
            return (self.beat.world, float("inf"))
        return (self.beat.world, float(self.beat.collectives))


@dataclass(frozen=True)
class Finding:
    """Ranks that have not moved for longer than allowed."""

    stuck: tuple[Standing, ...]
    waiting: tuple[Standing, ...]
    """Those that wait for them."""
    apart: bool
    """Whether all wait for each other, each in something else."""
    seconds: float
    """How long nobody of the stuck has moved."""
    end: bool
    """Whether it is time to end the run."""

    @property
    def incident(self) -> tuple[object, ...]:
        """The same as long as the same ranks are stuck at the same place."""
        return tuple((s.rank, s.place, s.beat.phase if s.beat else "") for s in self.stuck)


def judge(standings: Sequence[Standing]) -> Finding | None:
    """What is wrong, if something is. The limits are those that the ranks gave with their beats."""
    beats = [s.beat for s in standings if s.beat is not None]
    if not beats:
        return None  # nobody has opened a world: a program that does without is not watched
    report = min((b.report for b in beats if b.report), default=0.0)
    if not report:
        return None
    waits = {s.rank: waits_for(s, standings) for s in standings}
    awaited = set().union(*waits.values())
    stuck = [
        s
        for s in standings
        if s.idle >= report
        and (s.is_silent or not waits[s.rank])
        and (s.rank in awaited or _responsible(s))
    ]
    silent = [s for s in stuck if s.is_silent]
    if silent:  # its last beat may be from before it entered what the others wait in
        waits |= {s.rank: waits[s.rank] | {one.rank for one in silent} for s in stuck}
        awaited = set().union(*waits.values())
        stuck = silent
    if stuck:
        ranks = {s.rank for s in stuck}
        waiting = [s for s in standings if s.rank not in ranks and waits[s.rank]]
        return Finding(
            tuple(stuck),
            tuple(waiting),
            apart=False,
            seconds=min(s.idle for s in stuck),
            end=bool(waiting) and any(_over(s) for s in stuck if s.rank in awaited),
        )
    return _all_waiting(standings, waits, report)


def _all_waiting(
    standings: Sequence[Standing], waits: Mapping[int, set[int]], report: float
) -> Finding | None:
    """All are in collectives and nobody moves: they are in different ones, or a line is dead."""
    there = [s for s in standings if s.beat is not None and s.beat.phase != "left"]
    if len(there) < 2 or not all(waits[s.rank] and s.idle >= report for s in there):
        return None
    return Finding(
        tuple(there),
        (),
        apart=True,
        seconds=min(s.idle for s in there),
        end=all(_over(s) for s in there),
    )


def waits_for(standing: Standing, standings: Sequence[Standing]) -> set[int]:
    beat = standing.beat
    if beat is None or beat.phase == "left":
        return set()
    if beat.waits is not None and beat.waits >= 0:
        return {beat.waits}
    behind = {s.rank for s in standings if s.place < standing.place}
    if behind or beat.waits is None:
        return behind
    return {s.rank for s in standings if s.rank != standing.rank}


def _responsible(standing: Standing) -> bool:
    """Whether we know that it ought to move. A program's own code may take as long as it likes,
    as long as nobody waits for it.
    """
    return standing.beat is not None and standing.beat.phase not in ("program", "left")


def _over(standing: Standing) -> bool:
    """Whether this can only be a hang. What comes before the first step can be a compilation or a
    download; there the waits' own limits count.
    """
    beat = standing.beat
    if beat is None or not beat.timeout or not beat.made:
        return False
    return standing.idle >= max(beat.timeout, beat.allowed)
