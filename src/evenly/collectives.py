"""Collectives on tensors and on nested structures of them.

Every function here talks to the other ranks of ``group`` (all ranks of the world unless given),
must be called by all of them in the same order, leaves its input alone and is the identity in a
world of one. First dimensions may differ between ranks wherever results are joined. When a rank
has failed, the others raise its error here instead of waiting.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenly.errors import DisagreementError, SettingError
from evenly.meeting import Group, meeting, member, rank_in, size_of, wire_for
from evenly.packing import pack, packed_size, unpack
from evenly.plan import split
from evenly.tree import leaves, outline, replace_leaves
from evenly.world import current_world

T = TypeVar("T")
Operation = Literal["sum", "mean", "min", "max", "product"]

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided here: gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce(
    tree: T, operation: Operation = "sum", *, check: bool = True, group: Group = None
) -> T:
    """Each tensor reduced over the ranks, on every rank. One collective per type and device.

    ``check`` compares the shapes over the ranks first, by one small collective more: gloo gives
    wrong numbers, or none, where they differ. Leave it out where they cannot, in a hot loop.
    """
    return _reduced(tree, operation, group, None, check)


def reduce(
    tree: T,
    operation: Operation = "sum",
    *,
    to: int = 0,
    check: bool = True,
    group: Group = None,
) -> T | None:
    """As `all_reduce`, on rank ``to`` only; None elsewhere."""
    reduced = _reduced(tree, operation, group, member(to, group, "to"), check)
    return reduced if rank_in(group) == to else None


def broadcast(tree: T, *, source: int = 0, check: bool = True, group: Group = None) -> T:
    """Rank ``source``'s tensors, on every rank. The others pass tensors of the same shapes, which
    ``check`` compares as in `all_reduce`.
    """
    source = member(source, group, "source")
    if size_of(group) == 1:
        return tree
    if check:
        _same_shapes(tree, "a broadcast", group)

    def exchange(flat: Tensor) -> Tensor:
        dist.broadcast(flat, group_src=source, group=group)
        return flat

    return _flatwise(tree, exchange, "broadcast", group)


def all_gather(tree: T, *, grad: bool = False, group: Group = None) -> T:
    """Each tensor joined over the ranks along its first dimension, in rank order, on every rank.

    First dimensions may differ; numbers (no dimension) are stacked. Two collectives, whatever the
    structure. With ``grad=True`` gradients flow: the backward pass *sums* each slice's gradients
    over the ranks, which together with DDP's averaging and ``part.share`` is the gradient of the
    single-process program. Without DDP, add up the parameters' gradients over ranks yourself.
    """
    if grad:
        return replace_leaves(  # type: ignore[no-any-return]
            tree, iter([_GatherWithGradient.apply(leaf, group) for leaf in _tensors(tree)])
        )
    return _gathered(tree, group, None)


def gather(tree: T, *, to: int = 0, group: Group = None) -> T | None:
    """As `all_gather`, on rank ``to`` only; None elsewhere."""
    joined = _gathered(tree, group, member(to, group, "to"))
    return joined if rank_in(group) == to else None


def scatter(parts: Sequence[T] | None, *, source: int = 0, group: Group = None) -> T:
    """Rank r gets ``parts[r]`` of rank ``source``, on the world's device; others pass None.

    Shapes and structures may differ. One collective for the shapes and one for all values.
    """
    offers, total = None, 0
    if parts is not None and rank_in(group) == source:
        total = max((packed_size(_rows(part)) for part in parts), default=0)
        offers = [(replace_leaves(p, iter([_like(t) for t in _tensors(p)])), total) for p in parts]
    mine, total = scatter_object(offers, source=source, group=group)
    if parts is not None and size_of(group) == 1:
        return parts[0]
    device = current_world().device
    wire = wire_for(device, group)
    received = torch.empty(total, dtype=torch.uint8, device=wire)
    with meeting("scatter"):
        sent = None
        if parts is not None and rank_in(group) == source:
            sent = [pack([t.to(wire) for t in _rows(part)], total) for part in parts]
        dist.scatter(received, sent, group=group, group_src=source)
    tensors = unpack(received.to(device), _rows(mine))
    shaped = [t.reshape(like.shape) for t, like in zip(tensors, leaves(mine), strict=True)]
    return replace_leaves(mine, iter(shaped))  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, operation: Operation = "sum", *, group: Group = None) -> Tensor:
    """This rank's contiguous, balanced run of the rows of the reduced tensor."""
    start, stop = split(tensor.shape[0], rank_in(group), size_of(group))
    return all_reduce(tensor, operation, group=group)[start:stop]


def all_to_all(parts: Sequence[Tensor], *, group: Group = None) -> list[Tensor]:
    """Send ``parts[r]`` to rank r; returns what each rank sent here. First sizes may differ."""
    size = size_of(group)
    if len(parts) != size:
        raise SettingError(f"all_to_all: {len(parts)} parts for {size} ranks; give one for each.")
    if size == 1:
        return list(parts)
    _same_everywhere([_signature(p) for p in parts], "all_to_all", group)
    device = parts[0].device
    wire = wire_for(device, group)
    with meeting("all_to_all"):
        sent = torch.tensor([p.shape[0] for p in parts], device=wire)
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=group)
        taken = counts.tolist()
        received = parts[0].new_empty((sum(taken), *parts[0].shape[1:]), device=wire)
        dist.all_to_all_single(
            received,
            torch.cat([p.detach().to(wire) for p in parts]).contiguous(),
            taken,
            [p.shape[0] for p in parts],
            group=group,
        )
    return list(received.to(device).split(taken))


def barrier(*, group: Group = None) -> None:
    """Wait until every rank is here; after the world's timeout LateError names who is not."""
    if size_of(group) > 1:
        with meeting("barrier"):
            # A reduction rather than dist.barrier, which on nccl needs to guess a device.
            dist.all_reduce(
                torch.zeros(1, device=wire_for(torch.device("cpu"), group)), group=group
            )


def all_gather_object(value: T, *, group: Group = None) -> list[T]:
    """Any picklable value of each rank, in rank order, on every rank."""
    values: list[Any] = [value] * size_of(group)
    if len(values) > 1:
        with meeting("all_gather_object"):
            dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: T, *, to: int = 0, group: Group = None) -> list[T] | None:
    """Any picklable value of each rank, in rank order, on rank ``to``; None elsewhere."""
    to = member(to, group, "to")
    values: list[Any] | None = [value] * size_of(group) if rank_in(group) == to else None
    if size_of(group) > 1:
        with meeting("gather_object"):
            dist.gather_object(value, values, group=group, group_dst=to)
    return values


def broadcast_object(value: T, *, source: int = 0, group: Group = None) -> T:
    """Rank ``source``'s picklable value, on every rank; what the others pass is ignored."""
    values: list[Any] = [value]
    source = member(source, group, "source")
    if size_of(group) > 1:
        with meeting("broadcast_object"):
            dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]  # type: ignore[no-any-return]


def scatter_object(values: Sequence[T] | None, *, source: int = 0, group: Group = None) -> T:
    """Rank r gets the picklable ``values[r]`` of rank ``source``; the others pass None."""
    size, sent, problem = size_of(group), values, ""
    if rank_in(group) == member(source, group, "source") and (
        values is None or len(values) != size
    ):
        given = "None" if values is None else f"{len(values)} values"
        problem = f"scatter: rank {source} gave {given} for {size} ranks; give one for each."
        sent = None
    # Sent with the values, so that a mistake on the source is an error on every rank.
    sent, problem = broadcast_object((sent, problem), source=source, group=group)
    if sent is None:
        raise SettingError(problem)
    return sent[rank_in(group)]


def agree(value: T, name: str = "value", *, group: Group = None) -> T:
    """Return ``value`` if it is the same on every rank; else raise on every rank, naming all."""
    _compare(
        value,
        name,
        "Set it from the same configuration, or take rank 0's with evenly.broadcast_object().",
        group,
    )
    return value


def agree_on(values: dict[str, object], *, group: Group = None) -> None:
    """As `agree`, for several values at once; the error is about the first that differs."""
    ranks = all_gather_object(values, group=group)
    for name in values:
        _same([other[name] for other in ranks], name, "Set it alike on every rank.")


def any_rank(flag: bool, *, group: Group = None) -> bool:
    """Whether it is so on any rank; one small collective."""
    return largest([float(flag)], group=group)[0] > 0


def largest(numbers: list[float], *, group: Group = None) -> list[float]:
    """The largest of each number over the ranks; one small collective."""
    if size_of(group) == 1:
        return numbers
    wire = wire_for(torch.device("cpu"), group)
    sent = torch.tensor(numbers, dtype=torch.float64, device=wire)
    found: list[float] = all_reduce(sent, "max", check=False, group=group).tolist()
    return found


def _compare(value: object, name: str, advice: str, group: Group) -> None:
    _same(all_gather_object(value, group=group), name, advice)


def _same(values: list[Any], name: str, advice: str) -> None:
    if not all(_equal(other, values[0]) for other in values):
        listing = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
        raise DisagreementError(f"{name} differs between ranks ({listing}). {advice}")


def _equal(one: object, other: object) -> bool:
    """Equality that holds for nan, and does not choke on arrays."""
    try:
        if pickle.dumps(one) == pickle.dumps(other):
            return True
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError, pickle.PicklingError):
        return False


class _GatherWithGradient(torch.autograd.Function):
    """Gather rows; give each row the sum of the gradients that all ranks have for it."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Group) -> Tensor:
        rows = tensor if tensor.dim() else tensor.reshape(1)
        # In the description, because a rank that needs no gradient would miss the backward meeting.
        pieces = _exchanged([rows], f"with gradient: {context.needs_input_grad[0]}", group)
        context.shape, context.group = tensor.shape, group
        context.start = sum(piece[0].shape[0] for piece in pieces[: rank_in(group)])
        context.rows = rows.shape[0]
        return torch.cat([piece[0] for piece in pieces])

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = all_reduce(gradients[0].contiguous(), check=False, group=context.group)
        own = total[context.start : context.start + context.rows]
        return own.reshape(context.shape), None


def _reduced(tree: T, operation: Operation, group: Group, to: int | None, check: bool) -> T:
    if operation not in _OPERATIONS:
        raise SettingError(f"operation={operation!r}; choose from {', '.join(_OPERATIONS)}.")
    size, tensors = size_of(group), _tensors(tree)
    if operation == "mean" and any(not t.is_floating_point() for t in tensors):
        raise SettingError("a mean of whole numbers is not one; use float tensors, or 'sum'.")
    if size == 1:
        return tree
    if check:
        _same_shapes(tree, f"a {operation} over ranks", group)

    def exchange(flat: Tensor) -> Tensor:
        if operation == "mean" and flat.element_size() < 4:
            flat = flat.float()  # the sum may not fit a half
        if to is None:
            dist.all_reduce(flat, _OPERATIONS[operation], group=group)
        else:
            dist.reduce(flat, op=_OPERATIONS[operation], group=group, group_dst=to)
        return flat / size if operation == "mean" else flat

    return _flatwise(tree, exchange, f"a {operation} over ranks", group)


def _flatwise(tree: T, exchange: Any, what: str, group: Group) -> T:
    """Apply ``exchange`` to the tensors of a structure, joined by type and device."""
    tensors = _tensors(tree)
    results: list[Tensor] = list(tensors)
    kinds = {(t.dtype, t.device): None for t in tensors}
    for dtype, device in kinds:
        chosen = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == (dtype, device)]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in chosen])
        with meeting(what):
            done = exchange(flat.to(wire_for(device, group))).to(device, dtype)
        sizes = [tensors[i].numel() for i in chosen]
        for i, piece in zip(chosen, done.split(sizes), strict=True):
            results[i] = piece.reshape(tensors[i].shape)
    return replace_leaves(tree, iter(results))  # type: ignore[no-any-return]


def _gathered(tree: T, group: Group, to: int | None) -> T:
    tensors = _rows(tree)
    if size_of(group) == 1:
        return replace_leaves(tree, iter(tensors))  # type: ignore[no-any-return]
    pieces = _exchanged(tensors, outline(tree), group, to)
    if not pieces:
        return tree
    joined = [torch.cat([piece[i] for piece in pieces]) for i in range(len(tensors))]
    return replace_leaves(tree, iter(joined))  # type: ignore[no-any-return]


def _exchanged(
    tensors: list[Tensor], structure: str, group: Group, to: int | None = None
) -> list[list[Tensor]]:
    """Each rank's tensors, in rank order; with ``to``, on that rank alone (empty elsewhere)."""
    if size_of(group) == 1:
        return [tensors]
    what = f"{structure} {[_signature(t) for t in tensors]}"
    sizes = _same_everywhere(what, "a gather", group, extra=packed_size(tensors))
    if not tensors:
        return []
    wire = wire_for(tensors[0].device, group)
    mine = to is None or rank_in(group) == to
    with meeting("a gather"):
        sent = pack([t.to(wire) for t in tensors], max(sizes))
        received = sent.new_empty((len(sizes) if mine else 0, max(sizes)))
        rows = list(received.unbind())
        if to is None:
            dist.all_gather(rows, sent, group=group)
        else:
            dist.gather(sent, rows if mine else None, group=group, group_dst=to)
    return [
        [piece.to(t.device) for piece, t in zip(unpack(row, tensors), tensors, strict=True)]
        for row in rows
    ]


def _same_shapes(tree: Any, name: str, group: Group) -> None:
    shapes = [(str(t.dtype), list(t.shape), t.device.type) for t in _tensors(tree)]
    _same_everywhere(f"{outline(tree)} {shapes}", name, group)


def _same_everywhere(what: object, name: str, group: Group, extra: int = 0) -> list[int]:
    """Compare a description over the ranks before exchanging by it; returns each rank's extra.

    A mismatch raises on all ranks, where the exchange itself would hang or mix up bytes.
    """
    wire = wire_for(torch.device("cpu"), group)
    mark = zlib.crc32(repr(what).encode())
    with meeting(name):
        sent = torch.tensor([mark, extra], dtype=torch.int64, device=wire)
        received = sent.new_empty((size_of(group), 2))
        dist.all_gather(list(received.unbind()), sent, group=group)
    marks, extras = received.t().tolist()
    if any(other != marks[0] for other in marks):
        advice = "Structure, types and sizes (in gathers, all but the first) must be the same."
        _compare(str(what), f"what was given to {name}", advice, group)
    return list(extras)


def _tensors(tree: Any) -> list[Tensor]:
    found = list(leaves(tree))
    for leaf in found:
        if not isinstance(leaf, Tensor):
            raise SettingError(
                f"a collective on tensors was given a {type(leaf).__name__}; wrap numbers in "
                "torch.tensor(), or use the _object version for other values."
            )
    return found


def _rows(tree: Any) -> list[Tensor]:
    return [t if t.dim() else t.reshape(1) for t in _tensors(tree)]


def _signature(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype), list(tensor.shape[1:])


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
