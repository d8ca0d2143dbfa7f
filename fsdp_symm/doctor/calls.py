"""The doctor's small collectives: buffers filled with known values, the call, and whether its result is right.

Legend: W ranks, C elements of one rank's chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter, compat
from fsdp_symm.plan import SLOT_ALIGNMENT_BYTES, Ring
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import Block, PullPlan

CHUNK_BYTES = 2**20  # of one rank: large enough for copies to be worth it, small enough to be done at once
_DTYPE = torch.float32

Call = Callable[[], object]
Check = Callable[[], bool]
Prepare = Callable[[], tuple[Call, Check]]  # fills buffers; the call issues the collective, the check judges the result


class Calls:
    """What can be called in one group.

    Args:
        group: the ranks.
        device: where the tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._chunk = CHUNK_BYTES // _DTYPE.itemsize

    @property
    def rings(self) -> list[Ring]:
        """Slots for all calls that use an arena."""
        whole = -(-self._group.size() * CHUNK_BYTES // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        return [Ring("all_gather", 2, whole), Ring("unshard", 2, CHUNK_BYTES), Ring("reduce_scatter", 2, whole)]

    def staged(self, arena: SymmMemArena) -> Prepare:
        """An all-gather of ``[C]`` into ``[W * C]`` that lies in a slot."""
        comm = SymmMemAllGather(arena, module="doctor", strict=True)
        rank, size = self._group.rank(), self._group.size()

        def prepare() -> tuple[Call, Check]:
            whole = comm.allocate((size * self._chunk,), dtype=_DTYPE, device=self._device)
            own = whole.narrow(0, rank * self._chunk, self._chunk).fill_(rank + 1)
            return lambda: comm(whole, own, self._group), lambda: self._equal(whole, [r + 1 for r in range(size)])

        return prepare

    def placed(self, arena: SymmMemArena) -> Prepare:
        """An all-gather by direct placement: peers' ``[C]`` are pulled from their slots into ``[W * C]``."""
        rank, size, wire = self._group.rank(), self._group.size(), wire_of(arena)
        blocks = [Block(peer, 0, 0, peer * CHUNK_BYTES, CHUNK_BYTES) for peer in range(size) if peer != rank]
        plan = PullPlan(blocks, rank=rank, world_size=size)

        def prepare() -> tuple[Call, Check]:
            slot, lease = arena.reserve("unshard", CHUNK_BYTES, owner="doctor")
            whole = torch.full((size * self._chunk,), -1, dtype=_DTYPE, device=self._device)
            compat.raw_tensor(slot, CHUNK_BYTES, self._device).view(_DTYPE).fill_(rank + 1)
            whole.narrow(0, rank * self._chunk, self._chunk).fill_(rank + 1)

            def call() -> None:
                with compat.annotate(
                    "fsdp_symm::all_gather",
                    module="doctor",
                    bytes=size * CHUNK_BYTES,
                    engine=wire.pull_engine,
                    group=arena.group_name,
                    group_size=size,
                    op="",
                ):
                    epoch = arena.next_epoch(lease)
                    wire.pull(lease, epoch, plan, [whole], what="the doctor's direct all-gather", async_op=False)

            return call, lambda: self._equal(whole, [r + 1 for r in range(size)])

        return prepare

    def reduce_scatter(self, arena: SymmMemArena, way: str) -> Prepare:
        """A reduce-scatter of ``[W * C]`` in a slot into ``[C]``; ``way``: ``"nccl"`` or ``"copy_engine"``."""
        comm = SymmMemReduceScatter(arena, module="doctor", strict=True)
        rank, size = self._group.rank(), self._group.size()

        def prepare() -> tuple[Call, Check]:
            wire_of(arena).reduce_scatter_way = way
            whole = comm.allocate((size * self._chunk,), dtype=_DTYPE, device=self._device)
            part = comm.allocate((self._chunk,), dtype=_DTYPE, device=self._device)
            for r in range(size):
                whole.narrow(0, r * self._chunk, self._chunk).fill_((rank + 1) * (r + 1))
            return (
                lambda: comm(part, whole, self._group, dist.ReduceOp.SUM),
                lambda: self._equal(part, [(rank + 1) * size * (size + 1) // 2]),
            )

        return prepare

    def all_to_all(self) -> tuple[Call, Check]:
        """Torch's own all-to-all of plain tensors, chunk r to rank r."""
        rank, size = self._group.rank(), self._group.size()
        sent = torch.empty(size * self._chunk, dtype=_DTYPE, device=self._device)
        for r in range(size):
            sent.narrow(0, r * self._chunk, self._chunk).fill_(10 * rank + r)
        got = torch.empty_like(sent)
        return (
            lambda: dist.all_to_all_single(got, sent, group=self._group),
            lambda: self._equal(got, [10 * r + rank for r in range(size)]),
        )

    def _equal(self, tensor: torch.Tensor, values: list[int]) -> bool:
        wanted = torch.tensor(values, dtype=_DTYPE).repeat_interleave(self._chunk)
        return bool(torch.equal(tensor.cpu(), wanted))
