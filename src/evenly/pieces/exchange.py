"""The exchange: ranks finish the tree, each on its slice, and everybody gets all slices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenly.meeting import wire_for
from evenly.pieces.layout import Layout, Sheet
from evenly.pieces.tree import Node, Route, fold
from evenly.world import World

# torch renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """What ranks send each other in a step: for each bucket one all-to-all and one all-gather.

    With the last bucket goes a head: some bytes from every rank to every rank. Every rank must
    send the same buckets in the same order. A world of one sends nothing.
    """

    def __init__(self, layout: Layout, world: World, pieces: int, head: int) -> None:
        """``head`` is the number of its bytes, a multiple of 16."""
        self._layout, self._world, self._pieces, self._head = layout, world, pieces, head
        self._route: Route | None = None
        self._sent: list[tuple[Any, Tensor, Tensor]] = []
        self._rooms: dict[int, Tensor] = {}
        self._wires = [wire_for(b.device, world.group) for b in layout.buckets]

    def open(self, route: Route) -> None:
        """Start a step."""
        self._route, self._sent = route, []
        if self._world.board is not None:
            self._world.board.check()

    def send(self, bucket: int, sheets: list[Sheet], head: Tensor) -> None:
        """Send this rank's nodes of a bucket, each slice to the rank that works on it."""
        assert len(self._sent) == bucket, "buckets are sent in order"
        size, kind = self._world.size, self._layout.buckets[bucket]
        blocks = [sheet.flats[bucket].view(size, -1) for sheet in sheets]
        if bucket == len(self._layout.buckets) - 1:
            row = head.to(kind.device).view(kind.dtype)
            blocks.append(row.expand(size, -1))
        if len(blocks) == 1 and len(sheets) == 1:
            sent = sheets[0].flats[bucket]
        elif blocks:
            sent = torch.cat(blocks, dim=1).view(-1)
        else:
            sent = torch.empty(0, dtype=kind.dtype, device=kind.device)
        wire = self._wires[bucket]
        sent = sent.view(torch.uint8).to(wire)
        counts = [self._bytes_from(rank, bucket) for rank in range(size)]
        received = self._room(bucket, sum(counts), wire)
        work = dist.all_to_all_single(
            received,
            sent,
            counts,
            [counts[self._world.rank]] * size,
            group=self._world.group,
            async_op=True,
        )
        self._sent.append((work, received, sent))

    def finish(self, into: Sheet) -> list[Tensor]:
        """Finish the sums, put them on a sheet, and return every rank's head."""
        gathered: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        heads: list[Tensor] = []
        for bucket, (work, received, _) in enumerate(self._sent):
            work.wait()
            nodes, heads = self._opened(bucket, received)
            own = fold(self._pieces, nodes, Tensor.add_).view(torch.uint8)
            flat = into.flats[bucket].view(torch.uint8)
            wire = received.device
            target = flat if flat.device == wire else torch.empty_like(flat, device=wire)
            own = own.to(wire)
            gathering = _all_gather(target, own, group=self._world.group, async_op=True)
            gathered.append((gathering, target, flat, own))
        for gathering, target, flat, _ in gathered:
            gathering.wait()
            if target is not flat:
                flat.copy_(target)
        self._sent = []
        return heads

    def _opened(self, bucket: int, received: Tensor) -> tuple[dict[Node, Tensor], list[Tensor]]:
        """What every rank sent: its nodes' slices, on the bucket's device, and its head."""
        assert self._route is not None
        kind = self._layout.buckets[bucket]
        slices = kind.length // self._world.size * kind.dtype.itemsize
        here = received.to(kind.device)
        nodes: dict[Node, Tensor] = {}
        heads: list[Tensor] = []
        start = 0
        for rank, cover in enumerate(self._route.covers):
            stop = start + self._bytes_from(rank, bucket)
            for place, node in enumerate(cover):
                first = start + place * slices
                nodes[node] = here[first : first + slices].view(kind.dtype)
            heads.append(received[start + len(cover) * slices : stop])
            start = stop
        return nodes, heads

    def _bytes_from(self, rank: int, bucket: int) -> int:
        assert self._route is not None
        kind = self._layout.buckets[bucket]
        slices = kind.length // self._world.size * kind.dtype.itemsize
        last = bucket == len(self._layout.buckets) - 1
        return len(self._route.covers[rank]) * slices + (self._head if last else 0)

    def _room(self, bucket: int, length: int, wire: torch.device) -> Tensor:
        """Kept for the next step: making it anew takes longer than filling it."""
        room = self._rooms.get(bucket)
        if room is None or len(room) < length:
            pinned = wire.type == "cpu" and torch.cuda.is_initialized()
            room = torch.empty(length, dtype=torch.uint8, device=wire, pin_memory=pinned)
            self._rooms[bucket] = room
        return room[:length]
