"""Who moves the bytes: one wire an arena, shared by all comms of that arena."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.wire.host import HostWire
from fsdp_symm.wire.pulls import PullPlan


class Wire(Protocol):
    """Moves the bytes of one arena. Legend: W ranks, C elements of one rank's chunk.

    Attributes:
        pull_engine, gather_engine: who moves the bytes of :meth:`pull` and :meth:`all_gather`: ``"host"``, ``"nccl"``
            or ``"copy_engine"``.
        reduce_scatter_way: ``"copy_engine"`` or ``"nccl"``, for wires that have a choice.
        widens: whether :meth:`reduce_scatter` takes bf16 and fp16 inputs for an fp32 output, and sums in fp32.
    """

    pull_engine: str
    gather_engine: str
    reduce_scatter_way: str

    @property
    def widens(self) -> bool: ...

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        """Who will move the bytes of a reduce-scatter of ``input_ [W * C]``."""
        ...

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
        """Reduce every rank's chunk of this rank from ``input_ [W * C]``, the slot's tensor, into ``output [C]``.

        The input may be of a narrower type than the output where the wire :attr:`widens`.
        """
        ...

    def pull(
        self,
        lease: Lease,
        epoch: int,
        plan: PullPlan,
        targets: Sequence[torch.Tensor],
        *,
        what: str,
        async_op: bool,
    ) -> dist.Work | torch.cuda.Event | None:
        """Publish this rank's slot and fetch the plan's blocks from the peers' slots into ``targets``.

        Returns:
            What ends with the call: a host's work, or an event of this rank's GPU. ``None``: it has ended already, or
            is part of a CUDA graph that is being captured.
        """
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
    # These need a CUDA build of torch.
    from fsdp_symm.memory.device import DeviceSegment
    from fsdp_symm.memory.nccl import NcclSegment
    from fsdp_symm.wire.copy_engine import CopyEngineWire
    from fsdp_symm.wire.nccl import NcclWire

    if isinstance(arena.segment, NcclSegment):
        return NcclWire(arena.segment, arena.group)
    if isinstance(arena.segment, DeviceSegment):
        return CopyEngineWire(arena.segment)
    raise TypeError(f"no wire for {type(arena.segment).__name__}")
