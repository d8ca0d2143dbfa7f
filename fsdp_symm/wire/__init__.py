"""Who moves the bytes: one wire an arena, shared by all comms of that arena."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.wire.host import HostWire


class Wire(Protocol):
    """Moves the bytes of one arena. Legend: W ranks, C elements of one rank's chunk."""

    def all_gather(
        self, output: torch.Tensor, lease: Lease, epoch: int, *, module: str, async_op: bool
    ) -> dist.Work | None:
        """Fill ``output [W * C]``, the slot's tensor in which this rank's chunk is in place."""
        ...

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        op: object,
        lease: Lease,
        epoch: int,
        *,
        module: str,
        async_op: bool,
    ) -> dist.Work | None:
        """Reduce every rank's chunk of this rank from ``input_ [W * C]``, the slot's tensor, into ``output [C]``."""
        ...

    def close(self) -> None:
        """Let queued work end."""
        ...


_wires: weakref.WeakKeyDictionary[SymmMemArena, Wire] = weakref.WeakKeyDictionary()


def wire_of(arena: SymmMemArena) -> Wire:
    """The wire of an arena; made on first use, on every rank alike."""
    if arena not in _wires:
        _wires[arena] = _make(arena)
    return _wires[arena]


def _make(arena: SymmMemArena) -> Wire:
    if isinstance(arena.segment, HostSegment):
        return HostWire(arena.segment)
    from fsdp_symm.wire.nccl import NcclWire  # needs a CUDA build of torch

    return NcclWire(arena.segment, arena.group)  # type: ignore[arg-type]  # the one other segment there is
