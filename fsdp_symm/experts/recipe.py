"""What a call of the wire depends on by its sizes alone: where its parts lie in the slots, what every rank fetches, and
how this rank's own rows get to both of their places.

Legend as in :mod:`fsdp_symm.experts.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fsdp_symm.experts import routing
from fsdp_symm.experts.exchange import Layout, PartSpec
from fsdp_symm.plan import Lane
from fsdp_symm.wire.pulls import Block, PullPlan

PART_ALIGNMENT_BYTES = 256  # copy engines are fastest on whole lines


class Part(NamedTuple):
    """One kind of data in a call, and where its rows lie."""

    spec: PartSpec
    layout: Layout

    @property
    def row_bytes(self) -> int:
        return self.spec.width * self.spec.dtype.itemsize


class _Move(NamedTuple):
    """Rows ``[source, source + rows)`` of a rank's slot go to ``[target, ...)`` of the one who fetches."""

    peer: int
    source: int
    target: int
    rows: int


class Recipe:
    """All of a call that depends on its sizes alone.

    Args:
        lane, what: the call, for errors and traces.
        parts: what travels.
        rank, num_ranks: r, R.

    Attributes:
        nbytes: bytes of the slot; a rank without rows takes part too.
        plan: what this rank fetches.
    """

    def __init__(self, lane: Lane, what: str, parts: tuple[Part, ...], rank: int, num_ranks: int) -> None:
        self.what = what
        self._parts = parts
        self._offsets, nbytes = _offsets(lane, parts, rank)
        self.nbytes = max(nbytes, 1)
        self._rows = [_slot_rows(lane, part.layout, rank) for part in parts]
        self._targets = [sum(part.layout.received if lane == "dispatch" else part.layout.sent) for part in parts]
        self._own = [_move(lane, part.layout, rank) for part in parts]
        # Of each part, in bytes: where it starts in the slot, where its own rows do in the target; a row, and all rows.
        self._bytes = [
            (offset, own.target * part.row_bytes, part.row_bytes, rows * part.row_bytes)
            for part, offset, own, rows in zip(parts, self._offsets, self._own, self._rows, strict=True)
        ]
        self._by_token = all(part.layout.by_token for part in parts)
        self.plan = PullPlan(_blocks(lane, parts, rank, num_ranks), rank=rank, world_size=num_ranks)

    def place(
        self, slot: torch.Tensor, sources: Sequence[torch.Tensor], home: torch.Tensor, *, mark_missing: bool
    ) -> list[torch.Tensor]:
        """Copy a tensor a part, ``[T, W]``, into this rank's rows in the slot, and its own share into fresh targets.

        Rows without a token become -1 if ``mark_missing``, else anything.
        """
        if self._by_token and routing.on_gpu(slot, *sources):
            return self._place_at_once(slot, sources, mark_missing)

        def write(buffers: list[torch.Tensor]) -> None:
            for part, source, buffer in zip(self._parts, sources, buffers, strict=True):
                _place(source, home, part.layout, buffer, mark_missing=mark_missing)

        return self.write(slot, write)

    def _place_at_once(
        self, slot: torch.Tensor, sources: Sequence[torch.Tensor], mark_missing: bool
    ) -> list[torch.Tensor]:
        """Every row is read once and written to both places, in one launch."""
        from fsdp_symm.experts.device_parts import Placing, copy_parts

        start, sources = slot.data_ptr(), [source.contiguous() for source in sources]
        targets = [empty(part, rows) for part, rows in zip(self._parts, self._targets, strict=True)]
        places = []
        for source, target, (offset, own, row, room) in zip(sources, targets, self._bytes, strict=True):
            copied = min(source.shape[0] * row, room)  # more tokens than room: the overflow policy will see to it
            total = room if mark_missing else copied
            places.append(Placing(source.data_ptr(), start + offset, target.data_ptr() + own, copied, total))
        copy_parts(places, slot.get_device())
        return targets

    def write(self, slot: torch.Tensor, write: Callable[[list[torch.Tensor]], None]) -> list[torch.Tensor]:
        """Let ``write`` fill this rank's rows in the slot, and copy its own share of them into fresh targets."""
        buffers = [
            slot.narrow(0, offset, rows * part.row_bytes).view(part.spec.dtype).view(rows, part.spec.width)
            for part, offset, rows in zip(self._parts, self._offsets, self._rows, strict=True)
        ]
        targets = [empty(part, rows) for part, rows in zip(self._parts, self._targets, strict=True)]
        write(buffers)
        for own, buffer, target in zip(self._own, buffers, targets, strict=True):
            target.narrow(0, own.target, own.rows).copy_(buffer.narrow(0, own.source, own.rows))
        return targets


def empty(part: Part, rows: int) -> torch.Tensor:
    return torch.empty((rows, part.spec.width), dtype=part.spec.dtype, device=part.spec.device)


def _slot_rows(lane: Lane, layout: Layout, owner: int) -> int:
    """Rows of a part in the slot of ``owner``."""
    if lane == "combine":
        return sum(sizes[owner] for sizes in layout.sizes)
    return layout.sizes[owner][0] if layout.by_token else sum(layout.sizes[owner])


def _blocks(lane: Lane, parts: tuple[Part, ...], rank: int, num_ranks: int) -> list[Block]:
    """What ``rank`` fetches from its peers' slots."""
    blocks = []
    for peer in (p for p in range(num_ranks) if p != rank):
        offsets, _ = _offsets(lane, parts, peer)
        for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            move, row = _move(lane, part.layout, peer), part.row_bytes
            blocks.append(Block(peer, offset + move.source * row, index, move.target * row, move.rows * row))
    return blocks


def _offsets(lane: Lane, parts: tuple[Part, ...], owner: int) -> tuple[list[int], int]:
    """Where the parts start in the slot of ``owner``, and where the last one ends."""
    offsets, end = [], 0
    for part in parts:
        start = -(-end // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
        offsets.append(start)
        end = start + _slot_rows(lane, part.layout, owner) * part.row_bytes
    return offsets, end


def _move(lane: Lane, layout: Layout, peer: int) -> _Move:
    """What this rank fetches from the slot of ``peer`` (itself too), in rows."""
    me = layout.rank
    if lane == "combine":
        return _Move(peer, layout.first_received(me, peer), layout.first_sent(me, peer), layout.sizes[me][peer])
    source = 0 if layout.by_token else layout.first_sent(peer, me)
    return _Move(peer, source, layout.first_received(peer, me), layout.sizes[peer][me])


def _place(part: torch.Tensor, home: torch.Tensor, layout: Layout, buffer: torch.Tensor, *, mark_missing: bool) -> None:
    """``[T, W]`` into the slot's rows; rows without a token become -1 if ``mark_missing``, else anything."""
    if layout.by_token:
        rows = min(part.shape[0], buffer.shape[0])  # more tokens than room: the overflow policy will see to it
        buffer[:rows].copy_(part[:rows])
        if mark_missing:
            buffer[rows:].fill_(-1)
    else:
        index = routing.tokens_of(home, buffer.shape[0])
        routing.gather_rows(part, index, fill=-1 if mark_missing else 0, out=buffer)
