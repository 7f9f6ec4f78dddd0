"""The words for who is stuck, and who is slow."""

from __future__ import annotations

from collections.abc import Sequence

from evenly.watchdog.activity import EVERYBODY
from evenly.watchdog.judge import Finding, Standing
from evenly.wording import ranks

_NOWHERE = "has not opened the world"


def where(standing: Standing) -> str:
    """Where a rank is: "in a callback (on_step_end of Timer), at step 5 of epoch 1"."""
    beat = standing.beat
    if beat is None:
        return _NOWHERE
    at, after = f"at step {beat.position} of epoch {beat.epoch}", f"after {beat.step} steps"
    doing = f" ({beat.doing})" if beat.doing else ""
    if beat.waits == EVERYBODY and beat.doing:
        doing = f" (in {beat.doing})"
    match beat.phase:
        case "start-up":
            return f"in start-up, before the first step{doing}"
        case "program":
            return f"in the program's own code{doing}"
        case "data":
            if beat.doing in ("step", ""):
                return f"waiting for data, {at}"
            return f"waiting for data of {_stage(beat.doing)}, {after}"
        case "step":
            return f"in the step{doing}, {at}"
        case "callback":
            return f"in a callback{doing}, {at}"
        case "saving":
            return f"saving a checkpoint{doing}, {after}"
        case "left":
            return "outside the world, which it has left"
    return f"in {beat.phase}{doing}, {after}"


def report(finding: Finding, stacks: dict[int, str], notes: dict[int, str]) -> str:
    """A report for the user: who, since when, where, what the others wait for, and stacks."""
    if finding.apart:
        return _apart(finding, stacks)
    lines = []
    for standing in finding.stuck:
        note = f" ({notes[standing.rank]})" if notes.get(standing.rank) else ""
        lines.append(f"{_stuck(standing)}{note}.")
    if finding.waiting:
        lines.append(f"{_waiting(finding)}.")
    elif len(finding.stuck) > 1:
        lines.append("Nobody waits for another rank.")
    return " ".join(lines) + _stacks(stacks)


def ending(finding: Finding) -> str:
    """What was wrong, as the cause of a failure, without the rank's own name."""
    if finding.apart:
        return f"waited for the others, in different places, for {finding.seconds:.0f} s"
    standing = _first(finding)
    return f"was stuck for {standing.idle:.0f} s, {where(standing)}"


def _first(finding: Finding) -> Standing:
    return finding.stuck[0]


def slow(rank: int, own: float, others: float, data: float) -> str:
    """A rank that is slower than the others."""
    share = data / own if own else 0.0
    why = f"{share:.0%} of it waiting for data" if share >= 0.2 else "computing, not data"
    return (
        f"rank {rank} is {own / others:.1f}x slower than the other ranks: {own * 1e3:.0f} ms a "
        f"step of its own against {others * 1e3:.0f} ms, {why}. The others wait for it."
    )


def _stuck(standing: Standing) -> str:
    beat, seconds = standing.beat, f"{standing.idle:.0f} s"
    if beat is None:
        return f"rank {standing.rank} {_NOWHERE} {seconds} after its start"
    process = f" (process {beat.pid} on {beat.host})"
    if standing.is_silent:
        return (
            f"rank {standing.rank} has given no sign of life for {seconds}{process}: "
            f"{where(standing)}"
        )
    return f"rank {standing.rank} has not moved for {seconds}{process}: {where(standing)}"


def _waiting(finding: Finding) -> str:
    groups: dict[str, list[int]] = {}
    for standing in finding.waiting:
        groups.setdefault(_wait(standing), []).append(standing.rank)
    it = "it" if len(finding.stuck) == 1 else "them"
    texts = []
    for place, members in groups.items():
        verb = "waits" if len(members) == 1 else "wait"
        texts.append(f"{ranks(members)} {verb} for {it} in {place}")
    return _sentence("; ".join(texts))


def _wait(standing: Standing) -> str:
    beat = standing.beat
    assert beat is not None
    at = f" of step {beat.position} of epoch {beat.epoch}"
    if beat.waits is not None and beat.doing:
        where = "" if beat.phase in ("start-up", "program") else f", in {_stage(beat.phase)}"
        return f"{beat.doing}{where}"
    if beat.phase == "step":
        return f"the exchange of gradients{at}"
    return _stage(beat.phase)


def _apart(finding: Finding, stacks: dict[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for standing in finding.stuck:
        groups.setdefault(where(standing), []).append(standing.rank)
    texts = [f"{ranks(members)} {place}" for place, members in groups.items()]
    if len(groups) == 1:
        why = "All are in the same place: a connection between them may be dead."
    else:
        why = "A rank skipped a collective, or called one that the others did not."
    text = f"all ranks wait for each other since {finding.seconds:.0f} s: {'; '.join(texts)}. {why}"
    return text + _stacks(stacks)


def _stacks(stacks: dict[int, str]) -> str:
    texts = [
        f"\nStack of rank {rank}, the innermost call first:\n{text.rstrip()}"
        for rank, text in stacks.items()
        if text
    ]
    return "".join(texts)


def _stage(phase: str) -> str:
    words = {"step": "training", "program": "the program's own code", "callback": "a callback"}
    return words.get(phase, phase)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def places(standings: Sequence[Standing]) -> str:
    """Where each rank was: "ranks 0, 2 in the step, at step 5 of epoch 1; rank 1 saving ..."."""
    groups: dict[str, list[int]] = {}
    for standing in standings:
        if standing.beat is not None:
            groups.setdefault(where(standing), []).append(standing.rank)
    return "; ".join(f"{ranks(members)} {place}" for place, members in groups.items())


def outlook(finding: Finding) -> str:
    """What will become of a run in which some do not move."""
    beats = [s.beat for s in finding.stuck if s.beat is not None]
    if finding.end:
        return "this is the time that a hang may last (hang_timeout)."
    if not (finding.waiting or finding.apart):
        return "the run goes on: this may just take long."
    limits = [max(b.timeout, b.allowed) for b in beats if b.timeout and b.made]
    if not limits:
        return "the run goes on, until a wait for a rank reaches its own limit."
    return f"the run goes on; it is ended when this lasts {max(limits):g} s (hang_timeout)."
