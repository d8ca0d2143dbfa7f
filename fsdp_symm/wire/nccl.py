"""NCCL's own collectives on registered slots: copy engines for all-gather under the zero-CTA policy, symmetric kernels
for reduce-scatter.

NCCL recognises a slot by its address and picks the engine; the calls are FSDP2's own. Only the reduce-scatter's op is
rewritten, since symmetric kernels know SUM, and AVG from NCCL 2.30.3 on (sym_kernels.cc, symmetric_sched.cc).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_symm import compat, compat_nccl
from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.nccl import NcclSegment
from fsdp_symm.wire.copy_engine import CopyEngineWire
from fsdp_symm.wire.device_sum import summable
from fsdp_symm.wire.pulls import PullPlan

_FIRST_SYMMETRIC_AVG = (2, 30, 3)


def rewrite_op(op: object, world_size: int, nccl_version: tuple[int, ...]) -> tuple[object, float | None]:
    """The op that a symmetric kernel can run, and the factor for its output (``None``: none).

    AVG stays AVG where NCCL has it, else it is SUM and 1/W; PREMUL_SUM(f) is SUM and f; all others stay. Scaling after
    the sum equals NCCL's scaling of each input for powers of two and rounds less otherwise.
    """
    kinds = compat.ReduceOpKind
    kind = op.op if hasattr(op, "op") else op  # type: ignore[attr-defined]
    factor = compat.premul_factor(op)
    if factor is not None:
        return dist.ReduceOp.SUM, None if factor == 1.0 else factor
    if kind == kinds.AVG and nccl_version < _FIRST_SYMMETRIC_AVG:
        return dist.ReduceOp.SUM, 1.0 / world_size
    return op, None


class NcclWire:
    """Runs the collectives of one arena: NCCL's on its group, and pulls on our own wire.

    Args:
        segment: the arena's window.
        group: whose communicator has the window.
    """

    pull_engine = "copy_engine"
    gather_engine = "nccl"
    reduce_scatter_way: str = "nccl"

    def __init__(self, segment: NcclSegment, group: dist.ProcessGroup) -> None:
        self._segment = segment
        self._group = group
        self._version = compat_nccl.nccl_runtime_version()
        self._copies = CopyEngineWire(segment) if segment.peers is not None else None

    @property
    def widens(self) -> bool:
        """Only our own wire sums in another type than it is given."""
        return self._copies is not None and self.reduce_scatter_way == "copy_engine"

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        """Our own wire's copy engines, or NCCL."""
        return "copy_engine" if self._pulls(input_, op) else "nccl"

    def all_gather(
        self, output: torch.Tensor, lease: Lease, epoch: int, *, module: str, async_op: bool
    ) -> dist.Work | None:
        """In-place all-gather on the slot; arguments as for the host wire.

        Peers' failures are looked at when the slot is acquired, right before.
        """
        chunk = output.numel() // self._group.size()
        own = output.narrow(0, self._group.rank() * chunk, chunk)
        work = compat.plain_comm("all_gather")(output, own, self._group, async_op)
        if async_op and work is not None:
            return work  # the event of a stream that waits for the work is FSDP2's own copy-out
        self._segment.used(lease.index)
        return work

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
        """Reduce-scatter from the slot into ordinary memory; arguments as for the host wire."""
        if self._copies is not None and self._pulls(input_, op):  # the first half is for the type checker
            return self._copies.reduce_scatter(output, input_, op, lease, epoch, module=module, async_op=async_op)
        rewritten, factor = rewrite_op(op, self._group.size(), self._version)
        work = compat.plain_comm("reduce_scatter")(output, input_, self._group, rewritten, async_op)
        if factor is not None:
            if work is not None:
                work.wait()  # orders the current stream, not the host
            output.mul_(factor)
        if not async_op:
            self._segment.used(lease.index)
        return work

    def _pulls(self, input_: torch.Tensor, op: object) -> bool:
        """Whether our own wire runs this reduce-scatter; the same answer on every rank."""
        return self._copies is not None and self.reduce_scatter_way == "copy_engine" and summable(op, input_.dtype)

    def pull(
        self,
        lease: Lease,
        epoch: int,
        plan: PullPlan,
        targets: Sequence[torch.Tensor],
        *,
        what: str,
        async_op: bool,
    ) -> torch.cuda.Event | None:
        """See :meth:`CopyEngineWire.pull`.

        Raises:
            SymmMemUnavailableError: peers' memory cannot be addressed.
        """
        if self._copies is None:
            self._copies = CopyEngineWire(self._segment)
        return self._copies.pull(lease, epoch, plan, targets, what=what, async_op=async_op)

    def close(self) -> None:
        """See :meth:`CopyEngineWire.close`; NCCL itself runs nothing beside the caller's streams."""
        if self._copies is not None:
            self._copies.close()
