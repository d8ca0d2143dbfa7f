"""Our own wire between GPUs: peers' bytes are pulled by copy engines, and ranks wait for each other by stream flags.

Protocol of a call, all on one stream of each rank and without its host:

1. this rank's slot holds its data, written after all peers had read what it held before; every peer's *ready* word is
   set, by four-byte copies;
2. the stream waits until every peer has set its word here, takes the words back, and pulls all blocks;
3. every peer's *done* word is set: it may use its slot again (:meth:`DeviceSegment.before_reuse`).

A pull of few blocks is enqueued anew every time, from C arrays that are kept; one of many blocks that comes again is a
replayed graph, waits included, but not where ranks share a GPU. Inside a CUDA graph of the user's it becomes part of
that one. All ranks issue the same calls in the same order, so the earliest call that has not ended can always go on:
what it waits for was enqueued, on every rank, before anything that waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemUnavailableError, problem
from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.cuda_driver import Copies, FlatCopy, PitchedCopy
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.stream_flags import StreamFlags
from fsdp_symm.wire.pull_reduce import PullReduce
from fsdp_symm.wire.pulls import Block, PullPlan
from fsdp_symm.wire.replays import Enqueueing, Replays, spread
from fsdp_symm.wire.watchdog import Pending, watch, watch_captured

# A graph's copies start some 30 microseconds later than a batch of them, whose every block costs the host one or two.
# Measured over NVLink with 8 blocks: 114 against 138 microseconds for 32 MiB, 377 against 411 for 128 MiB.
_BATCHED_BLOCKS = 32


class CopyEngineWire:
    """Moves the bytes of one arena; see the module's text for the protocol.

    Raises:
        SymmMemUnavailableError: the segment's peers cannot be addressed.
    """

    pull_engine = gather_engine = "copy_engine"
    reduce_scatter_way = "copy_engine"
    widens = True

    def __init__(self, segment: DeviceSegment) -> None:
        if segment.flags is None or segment.peers is None:
            raise SymmMemUnavailableError(
                problem(
                    f"copy engine: the memory of ranks {list(segment.ranks)} cannot be addressed from here",
                    found="no peer addresses",
                    expected="all ranks within reach of each other's GPUs, and NCCL 2.29 or newer",
                    fix="use all_gather='staged' and reduce_scatter='nccl'",
                )
            )
        self._segment = segment
        self._flags: StreamFlags = segment.flags
        self._peers = segment.peers
        # In a graph, the driver gives small copies within one GPU to kernels (seen with driver 580): ranks that share a
        # GPU enqueue every copy, which costs their hosts more and takes no SM.
        self._batched_blocks = sys.maxsize if segment.shares_gpu else _BATCHED_BLOCKS
        self._replays = Replays(segment.driver, segment.device)
        self._side = torch.cuda.Stream(segment.device)  # for calls on the legacy default stream, which takes no batch
        self._reduce = PullReduce(segment, self._flags, self._peers, self._replays)
        self._gathers: dict[int, PullPlan] = {}  # plans of all_gather, by chunk bytes

    # --- the primitive ---

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
        """Publish this rank's slot and fetch the plan's blocks from the peers' slots, ordered by the current stream.

        Returns:
            The end of the call on this rank's GPU; ``None`` while a CUDA graph is captured.

        Args:
            lease, epoch, plan: as for the host wire.
            targets: contiguous tensors that the blocks go to. They must live until the current stream has run this.
            what: the call, for the watchdog.
            async_op: the host never waits, so it makes no difference.

        Raises:
            SymmMemError: the targets do not fit the plan.
        """
        places = [(t.data_ptr(), t.nbytes) for t in targets]
        key = (plan.number, lease.index, lease.offset, *places)
        if not self._replays.knows(key):  # before any peer hears of the call
            plan.check_targets([nbytes for _, nbytes in places], what)
        stream = self._enter(lease, epoch)
        batched = len(plan.blocks) <= self._batched_blocks
        self._replays.run(
            key, lambda where: self._exchange(key, plan, lease, places, where), stream, graphed=not batched
        )
        return self._leave(stream, lease, epoch, what)

    def _enter(self, lease: Lease, epoch: int) -> torch.cuda.Stream:
        """Note that a call begins, and give its stream: the current one, or one forked from it where that is the legacy
        default stream, which takes no graphs."""
        self._segment.issued(lease.role, epoch)
        stream = compat.current_stream(self._segment.device)
        if stream.cuda_stream == 0:
            self._side.wait_stream(stream)
            stream = self._side
        return stream

    def _leave(self, stream: torch.cuda.Stream, lease: Lease, epoch: int, what: str) -> torch.cuda.Event | None:
        """Note the end of a call, and order the current stream after it."""
        if compat.is_capturing():
            self._segment.pulled(lease.index, None)
            watch_captured(self._segment, lease.index, what)
            return None
        event = torch.cuda.Event()
        event.record(stream)
        self._segment.pulled(lease.index, event)
        watch(Pending(self._segment, lease.index, lease.role, epoch, what, event))
        if stream is self._side:
            compat.current_stream(self._segment.device).wait_event(event)
        return event

    def _exchange(
        self, key: Hashable, plan: PullPlan, lease: Lease, places: list[tuple[int, int]], where: Enqueueing
    ) -> None:
        """The protocol, with all blocks copied to ``places`` (address and bytes of each target)."""
        self._flags.publish(lease.index, where.handle, capturing=where.capturing)
        self._flags.await_data(lease.index, where.handle)
        copies = self._replays.kept_copies(key, lambda parts: self._copies(plan, lease, places, parts), where)
        self._replays.copy(copies, where)
        self._flags.finish(lease.index, where.handle, capturing=where.capturing)

    def _copies(self, plan: PullPlan, lease: Lease, places: list[tuple[int, int]], parts: int) -> list[Copies]:
        flat: list[FlatCopy] = []
        pitched: list[PitchedCopy] = []
        for block in plan.blocks:
            target = places[block.target][0] + block.offset
            source = self._peers[block.peer] + lease.offset + block.source
            if block.rows == 1:
                flat.append((target, source, block.nbytes))
            else:
                pitched.append((target, source, block.nbytes, block.rows, block.pitch, block.nbytes))
        return spread(flat, pitched, parts)

    # --- FSDP2's collectives ---

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        """Always copy engines."""
        return "copy_engine"

    def all_gather(
        self, output: torch.Tensor, lease: Lease, epoch: int, *, module: str, async_op: bool
    ) -> dist.Work | None:
        """Fill ``output [W * C]``, the slot's tensor in which this rank's chunk is in place."""
        world_size, rank = len(self._segment.ranks), self._segment.rank
        chunk = output.nbytes // world_size
        plan = self._gathers.get(chunk)
        if plan is None:
            blocks = [Block(p, p * chunk, 0, p * chunk, chunk) for p in range(world_size) if p != rank]
            plan = self._gathers[chunk] = PullPlan(blocks, rank=rank, world_size=world_size)
        what = f"all_gather of {module!r}, {lease.nbytes} bytes"
        self.pull(lease, epoch, plan, [output], what=what, async_op=async_op)
        return None

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

        Raises:
            SymmMemError: an op or a type that cannot be summed; or the first call is inside a CUDA graph.
        """
        stream = self._enter(lease, epoch)
        self._reduce.run(output, input_, op, lease, stream)
        end = self._leave(stream, lease, epoch, f"reduce_scatter of {module!r}, {lease.nbytes} bytes")
        self._reduce.ended(stream, end)
        return None

    def close(self) -> None:
        """Free what is kept for calls that come again, once they have ended."""
        self._replays.close()
