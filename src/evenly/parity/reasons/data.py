"""Samples that are repeated, missing, in another order, or augmented by rank."""

from __future__ import annotations

from collections import Counter

from evenly.parity.case import Case
from evenly.parity.reading import Key
from evenly.parity.reasons.reason import Reason
from evenly.wording import some


def explain_samples(case: Case, key: Key) -> Reason:
    if (case.of("samples").step or 0) > case.last:
        return Reason(
            "number of steps",
            f"the run makes {case.of('samples').note}: an incomplete last batch is dropped or "
            "split otherwise, or the batch size is per process.",
            "use evenly.Loader, whose steps do not depend on the process count.",
            "samples",
            case.of("samples").step,
        )
    one, other = case.reference.samples(key) or [], case.run.samples(key) or []
    later = (key[0], key[1] + 1)
    if later in case.reference.keys:
        following = case.reference.samples(later) or []
        if sorted(following) == sorted(other):
            return Reason(
                "samples missing",
                f"at step {key[1]} the run leaves out the {len(one)} samples of the reference and "
                "goes on with those of the next step: an incomplete last batch is dropped.",
                "use evenly.Loader, which splits a step of any length, or tail='drop' at all "
                "counts.",
                "samples",
                key[1],
            )
    seen = Counter(i for k in case.keys if k <= key for i in case.reference.samples(k) or ())
    return _data(one, other, seen, case.run.size, key[1], "samples")


def inputs(case: Case, key: Key) -> Reason | None:
    """What goes into the model is not the same."""
    one, other = case.reference.prints(key), case.run.prints(key)
    if not one or not other or Counter(one) == Counter(other):
        return None
    if case.reference.samples(key) is not None and case.run.samples(key) is not None:
        share = (Counter(one) - Counter(other)).total() / len(one)
        if share < 0.5:
            return None  # padding, or a model that is given something else besides
        return Reason(
            "augmentation",
            f"at step {key[1]} the samples are the same, but {share:.0%} of the rows that enter "
            "the model are not: random augmentation depends on rank, worker or process count.",
            "draw it by sample: evenly.Loader does so for data sets that use torch's, NumPy's or "
            "Python's generators, or use evenly.sample_generator.",
            "gradient",
            key[1],
        )
    seen = Counter(p for k in case.keys if k <= key for p in case.reference.prints(k))
    return _data(one, other, seen, case.run.size, key[1], "rows")


def _data(
    one: list[int], other: list[int], seen: Counter[int], size: int, step: int, what: str
) -> Reason:
    """What became of a step's samples; ``seen`` are those of the reference until then."""
    extra, lacking = Counter(other) - Counter(one), Counter(one) - Counter(other)
    count = f"step {step} has {len(other)} {what}, that of the reference {len(one)}"
    shown = some(sorted(extra)[:8]) if what == "samples" else _rows(extra)
    if extra and not lacking and all(seen[index] for index in extra):
        return Reason(
            "samples repeated",
            f"{count}; used a second time: {shown}. torch's DistributedSampler repeats samples "
            "until their number divides by the processes.",
            "use evenly.Loader, which gives each sample once at any length and process count.",
            "samples",
            step,
        )
    if size > 1 and len(other) == len(one) * size:
        return Reason(
            "batch size",
            f"{count}, {size} times as many. The batch size is per process.",
            "divide it by the process count; evenly.Loader(batch_size=) is what all see together.",
            "samples",
            step,
        )
    if lacking and not extra:
        shown = some(sorted(lacking)[:8]) if what == "samples" else _rows(lacking)
        return Reason(
            "samples missing",
            f"{count}; left out: {shown}. Batches or shards that do not come out even are cut "
            "off (drop_last, len // size).",
            "use evenly.Loader, which splits a step of any length; or drop the same at one "
            "process.",
            "samples",
            step,
        )
    return Reason(
        "order of samples",
        f"{count}; {lacking.total()} of these it does not have. The order depends on the process "
        "count: shuffled by rank, sharded before shuffling, or by a generator that is used for "
        "other things too.",
        "shuffle by (seed, epoch) alone, then split: evenly.Loader(shuffle=True, seed=) does.",
        "samples",
        step,
    )


def _rows(found: Counter[int]) -> str:
    return "one row" if found.total() == 1 else f"{found.total()} rows"
