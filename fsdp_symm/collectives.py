"""SymmMemAllGather and SymmMemReduceScatter: FSDP2's two comm interfaces over an arena and its wire.

Give them to one module with ``set_custom_all_gather`` / ``set_custom_reduce_scatter``, or to a whole model with
:func:`fsdp_symm.set_symm_mem_for_comm`.

Legend: W ranks, C elements of one rank's chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.compat import Role
from fsdp_symm.compat_reduce import narrower
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.memory.mixin import SymmMemAllocMixin
from fsdp_symm.plan import part_elements
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.reduce import op_name

PLAIN = "plain"


class _SymmMemComm(SymmMemAllocMixin):
    """What both collectives share: finding the slot, the plain path, counting, the trace range."""

    def _slot(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[SymmMemArena, Lease] | None:
        """The slot that holds the symmetric buffer of this call, or ``None`` for the plain path."""
        found = self.lease_of(buffer)
        if found is None:
            if self._current is not None and buffer.numel():
                self.plain_path("the buffer was not allocated by this comm")
            return None
        return found if self._serves(found[0], group) else None

    def _serves(self, arena: SymmMemArena, group: dist.ProcessGroup) -> bool:
        if arena.serves is group or arena.group_name == compat.group_name(group):
            return True
        self.plain_path(f"the call's process group {compat.group_name(group)} is not the arena's")
        return False

    def _range(self, nbytes: int, engine: str, group: dist.ProcessGroup, op: str) -> AbstractContextManager[object]:
        world_size = group.size()
        self.counters.add(self.role, engine, nbytes * (world_size - 1) // world_size)
        return compat.annotate(
            f"fsdp_symm::{self.role}",
            module=self.module,
            bytes=nbytes,
            engine=engine,
            group=compat.group_name(group),
            group_size=world_size,
            op=op,
        )

    def _check(
        self, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, *, narrow: torch.dtype | None = None
    ) -> None:
        if whole.numel() != part.numel() * group.size() or whole.dtype not in (part.dtype, narrow):
            names = ("output", "input") if self.role == "all_gather" else ("input", "output")
            raise SymmMemError(
                problem(
                    f"{self.role} of {self.module!r}: the tensors do not fit together",
                    found=f"{names[0]} {whole.numel()} x {whole.dtype}, {names[1]} {part.numel()} x {part.dtype}, "
                    f"{group.size()} ranks",
                    expected=f"{names[0]} = ranks x {names[1]}, of one dtype",
                    fix=f"allocate the {names[0]} with this comm's allocate()",
                )
            )


class SymmMemAllGather(_SymmMemComm, compat.AllGather):
    """All-gather whose output lies in an arena's slot; bit-identical to the plain one."""

    role: Role = "all_gather"

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor [C]`` of every rank into ``output_tensor [W * C]``.

        Returns:
            A ``Work`` if ``async_op``, else ``None`` with the output complete.

        Raises:
            SymmMemError: sizes or dtypes do not fit together.
            SymmMemTimeoutError, SymmMemPeerError: a rank did not arrive, died, or issued another call.
        """
        self._check(output_tensor, input_tensor, group)
        slot = self._slot(output_tensor, group)
        nbytes = output_tensor.numel() * output_tensor.element_size()
        if slot is None:
            with self._range(nbytes, PLAIN, group, ""):
                return compat.plain_comm(self.role)(output_tensor, input_tensor, group, async_op)
        arena, lease = slot
        wire = wire_of(arena)
        with self._range(nbytes, wire.gather_engine, group, ""):
            own = output_tensor.view(-1).narrow(0, group.rank() * input_tensor.numel(), input_tensor.numel())
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor.view(-1))
            return wire.all_gather(output_tensor, lease, arena.next_epoch(lease), module=self.module, async_op=async_op)


@dataclass(frozen=True)
class _Parts:
    """An input that is larger than a slot: the arena, and the elements of a rank's chunk that pass at a time."""

    arena: SymmMemArena
    elements: int


class SymmMemReduceScatter(_SymmMemComm, compat.ReduceScatter):
    """Reduce-scatter whose input lies in an arena's slot.

    Sums run in rank order with fp32 accumulation (fp64 for fp64). The output comes from ordinary memory, since FSDP2
    keeps it as the parameters' gradients.
    """

    role: Role = "reduce_scatter"

    gradient_dtype: Callable[[], torch.dtype | None] | None = None
    """Asked for the type of the gradients that are about to be reduced, where it is known."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks twice a call: for the input (a slot), then for the output, ``1 / W`` of it (ordinary memory).

        The input may be of a narrower type than was asked for: that of the gradients, where the wire sums in the wider
        one. FSDP2's copy-in takes either. One that is larger than a slot planned for narrow gradients is ordinary
        memory, and passes through the slot in parts.
        """
        numel = math.prod(int(s) for s in size)
        expected, self._output_numel = self._output_numel, None
        if numel == expected:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        arena = self._choose()
        self._narrow = self._narrower(dtype, arena)
        kind = self._narrow or dtype
        if arena is not None:
            self._output_numel = numel // len(arena.ranks)
            if (parts := self._in_parts(arena, numel, kind, device)) is not None:
                tensor = torch.empty(tuple(size), dtype=kind, device=device)
                self._parts[tensor.data_ptr()] = parts
                return tensor
        tensor = self._allocate_from(arena, size, kind, device)
        if kind != dtype and self._current is None:  # no slot: the plain path sums in the type it is given
            tensor = torch.empty(tuple(size), dtype=dtype, device=device)
        return tensor

    _output_numel: int | None = None  # size of the output that belongs to the last input
    _narrow: torch.dtype | None = None  # type of the last input, where it is not that of the sum

    @functools.cached_property
    def _parts(self) -> dict[int, _Parts]:
        """How inputs pass through a slot that is too small for them, by address, until they are reduced."""
        return {}

    def _narrower(self, dtype: torch.dtype, arena: SymmMemArena | None) -> torch.dtype | None:
        """The type that may travel for a sum in ``dtype``, if it is a narrower one; the same on every rank."""
        kind = narrower(None if self.gradient_dtype is None else self.gradient_dtype(), dtype)
        if kind is None or arena is None or arena.closed or not wire_of(arena).widens:
            return None
        return kind

    def _in_parts(self, arena: SymmMemArena, numel: int, dtype: torch.dtype, device: torch.device) -> _Parts | None:
        """How an input passes through a slot that is too small for it: only where the wire sums by itself."""
        slot = arena.slot_bytes(self.role)
        if not slot or numel * dtype.itemsize <= slot or arena.device != device or not wire_of(arena).widens:
            return None
        ranks = len(arena.ranks)
        part = part_elements(slot, numel // ranks, ranks, dtype.itemsize)
        return None if part is None else _Parts(arena, part)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor [W * C]`` over the ranks; this rank's chunk goes to ``output_tensor [C]``.

        Args:
            op: SUM, AVG, PREMUL_SUM, MAX or MIN.

        Raises:
            SymmMemError: sizes or dtypes do not fit together, or another op.
            SymmMemTimeoutError, SymmMemPeerError: a rank did not arrive, died, or issued another call.
        """
        self._check(input_tensor, output_tensor, group, narrow=self._narrow)
        parts = self._parts.pop(input_tensor.data_ptr(), None)
        if parts is not None and self._serves(parts.arena, group):
            return self._pass_in_parts(parts, output_tensor, input_tensor, group, op, async_op)
        slot = self._slot(input_tensor, group)
        if slot is None:
            input_tensor = input_tensor.to(output_tensor.dtype)
        nbytes = input_tensor.numel() * input_tensor.element_size()
        if slot is None:
            with self._range(nbytes, PLAIN, group, op_name(op)):
                return compat.plain_comm(self.role)(output_tensor, input_tensor, group, op, async_op)
        arena, lease = slot
        wire = wire_of(arena)
        with self._range(nbytes, wire.reduce_engine(input_tensor, op), group, op_name(op)):
            return wire.reduce_scatter(
                output_tensor,
                input_tensor,
                op,
                lease,
                arena.next_epoch(lease),
                module=self.module,
                async_op=async_op,
            )

    def _pass_in_parts(
        self,
        parts: _Parts,
        output: torch.Tensor,
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool,
    ) -> dist.Work | None:
        """One reduce-scatter as several on one slot; each element is summed as ever. Ends before it returns, also if a
        work is asked for: a part that is pending would keep the slot from the next call."""
        arena, wire = parts.arena, wire_of(parts.arena)
        chunk, ranks = output.numel(), len(arena.ranks)
        rows, kind, lease, work = input_.view(ranks, chunk), input_.dtype, None, None
        with arena.peers_told(), self._range(input_.nbytes, wire.reduce_engine(input_, op), group, op_name(op)):
            for number, start in enumerate(range(0, chunk, parts.elements), start=1):
                size = min(parts.elements, chunk - start)
                nbytes = ranks * size * kind.itemsize
                memory, lease = (
                    arena.acquire_lease(self.role, nbytes, owner=self.module)
                    if lease is None
                    else arena.renew(lease, nbytes)
                )
                slot = memory.view(kind)
                slot.view(ranks, size).copy_(rows.narrow(1, start, size))
                part = output.view(-1).narrow(0, start, size)
                # The part stands in the call's signature: no rank may take one for another.
                module = f"{self.module}, part {number}"
                epoch = arena.next_epoch(lease)
                work = wire.reduce_scatter(part, slot, op, lease, epoch, module=module, async_op=async_op)
                if work is not None:
                    work.wait()
                del memory, slot  # nothing may use the slot when it is renewed
        return work
