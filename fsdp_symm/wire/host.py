"""All-gather and reduce-scatter between CPU ranks that map each other's memory.

Protocol of call ``e`` of a role (numbers grow by one a call, see :meth:`SymmMemArena.next_epoch`):

1. a rank writes its data into its own slot, signs the slot with the call, and sets its ``ready`` word to ``e``;
2. it waits for each peer's ``ready`` to reach ``e``, checks the peer's signature, and pulls what it needs;
3. it sets its ``done`` word to ``e``: its peers may use the slot they shared with it again.

A slot's next user waits for all ``done`` words (:meth:`SymmMemArena.acquire`), so there is no barrier in a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemTimeoutError, told
from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.plan import LANES, Lane
from fsdp_symm.wire.pulls import Block, PullPlan
from fsdp_symm.wire.reduce import op_name, reduce_chunks

_CPU = torch.device("cpu")


class HostWork(dist.Work):
    """A collective that runs on the wire's own thread."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective.

        Raises:
            SymmMemTimeoutError: not done within ``timeout``. Without one, the wire's own timeout ends the wait.
            SymmMemError: whatever the collective raised.
        """
        limit_s = timeout.total_seconds() if timeout else None
        try:
            self._future.result(limit_s)
        except FutureTimeoutError as error:
            if self._future.done():  # the collective's own timeout error, not ours
                raise
            raise SymmMemTimeoutError(f"Work.wait: the collective is not done after {limit_s:g} s") from error
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised, if it has ended."""
        return self._future.exception() if self._future.done() else None

    def get_future(self) -> torch.futures.Future[None]:
        """A torch future that ends with the collective."""
        bridge: torch.futures.Future[None] = torch.futures.Future()

        def forward(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                bridge.set_result(None)
            else:
                bridge.set_exception(error)  # type: ignore[arg-type]  # the stub has a type variable for it

        self._future.add_done_callback(forward)
        return bridge


class _Job:
    """Holds the tensors of a queued collective, and lets go of them before its future is done.

    An executor drops its own references only some time after it has set the result; a slot must not look used then.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def __call__(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()


class _Queue:
    """Keeps the calls of one lane in order: at once, or on a thread when a call is asynchronous.

    Lanes have epochs of their own, so the order between an all-gather and a reduce-scatter does not matter.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._lock = threading.Lock()

    def start(self, run: Callable[[], None], async_op: bool) -> HostWork | None:
        """Run now, or on the queue's thread when asked to or when a queued call must come first."""
        with self._lock:
            queued = self._last is not None and not self._last.done()
            if not async_op and not queued:
                run()
                return None
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"fsdp_symm_{self._lane}")
            self._last = self._executor.submit(_Job(run))
            work = HostWork(self._last)
        if async_op:
            return work
        work.wait()
        return None

    def close(self) -> None:
        """Let the thread end after what is queued."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


class HostWire:
    """Moves the bytes of one arena in shared memory; see the module's text for the protocol."""

    pull_engine = gather_engine = "host"
    reduce_scatter_way = "nccl"  # has no choice
    widens = True

    def __init__(self, segment: HostSegment) -> None:
        self._segment = segment
        self._queues: dict[Lane, _Queue] = {lane: _Queue(lane) for lane in LANES}

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        """Always the host."""
        return "host"

    def all_gather(
        self, output: torch.Tensor, lease: Lease, epoch: int, *, module: str, async_op: bool
    ) -> HostWork | None:
        """Fill ``output`` with every rank's chunk.

        Args:
            output: ``[W * C]``, the slot's tensor; this rank's chunk is in place.
            lease: the slot.
            epoch: the call's number.
            module: for errors.
            async_op: return at once with a :class:`HostWork`.
        """
        call = f"all_gather of {module!r}, {lease.nbytes} bytes {_name(output)}"
        # Not `output` itself: an inference tensor cannot be written by the queue's thread, which is not in that mode.
        flat = self._segment.data(self._segment.rank, lease.offset, lease.nbytes)

        def run() -> None:
            self._guarded(call, lambda: self._all_gather(flat, lease, epoch, call))
            _ = output  # a queued call keeps its slot in use

        return self._queues["all_gather"].start(run, async_op)

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
    ) -> HostWork | None:
        """Reduce every rank's ``input_`` chunk of this rank into ``output``.

        Args:
            output: ``[C]``, ordinary memory.
            input_: ``[W * C]``, the slot's tensor; also bf16 or fp16 for an fp32 output.
            op: see :mod:`fsdp_symm.wire.reduce`.
            lease, epoch, module, async_op: as for :meth:`all_gather`.
        """
        call = f"reduce_scatter of {module!r}, {lease.nbytes} bytes {_name(input_)}, {op_name(op)}"
        target, source = output.view(-1), input_.view(-1)
        return self._queues["reduce_scatter"].start(
            lambda: self._guarded(call, lambda: self._reduce_scatter(target, source, op, lease, epoch, call)),
            async_op,
        )

    def pull(
        self,
        lease: Lease,
        epoch: int,
        plan: PullPlan,
        targets: Sequence[torch.Tensor],
        *,
        what: str,
        async_op: bool,
    ) -> HostWork | None:
        """Publish this rank's slot and fetch the plan's blocks from the peers' slots.

        Args:
            lease: the slot, whose bytes are in place.
            epoch: the call's number.
            plan: the blocks.
            targets: contiguous tensors that the blocks go to; their version counters stay as they are.
            what: the call, for errors; every rank must say the same.
            async_op: return at once with a :class:`HostWork`.

        Raises:
            SymmMemError: the targets do not fit the plan.
            SymmMemTimeoutError, SymmMemPeerError: a rank did not arrive, died, or issued another call.
        """
        sizes = [t.numel() * t.element_size() for t in targets]
        plan.check_targets(sizes, what)
        places = [(t.data_ptr(), size) for t, size in zip(targets, sizes, strict=True)]
        keep = tuple(targets)  # not the slot: its next user waits until every peer has read it, which is all it needs

        def run() -> None:
            # Fresh tensors over the same bytes, made on the thread that writes them: neither version counters nor
            # the caller's inference mode are in the way.
            raw = [compat.raw_tensor(address, size, _CPU) for address, size in places]
            self._guarded(what, lambda: self._pull(plan, raw, lease, epoch, what))
            _ = keep  # a queued call keeps them

        return self._queues[lease.role].start(run, async_op)

    def close(self) -> None:
        """Let the threads end after what is queued."""
        for queue in self._queues.values():
            queue.close()

    def _guarded(self, call: str, run: Callable[[], None]) -> None:
        try:
            self._segment.check_health(call)
            run()
        except BaseException as error:  # MemoryError and Ctrl-C too: the peers must not wait for this rank
            self._segment.fail(told(error))
            raise

    # --- the bytes ---

    def _peers(self) -> list[int]:
        """Group ranks in rotated order, so that not all ranks read the same peer at once."""
        world_size, rank = len(self._segment.ranks), self._segment.rank
        return [(rank + step) % world_size for step in range(1, world_size)]

    def _arrive(self, lease: Lease, epoch: int, call: str) -> str:
        # With the epoch: what an earlier call left in this slot must never pass for this one.
        signature = f"call {epoch}, slot {lease.slot}: {call}"
        self._segment.sign(lease.index, signature)
        self._segment.publish("ready", lease.role, epoch)
        return signature

    def _meet(self, peer: int, lease: Lease, epoch: int, call: str, signature: str) -> None:
        self._segment.wait("ready", lease.role, epoch, peer, call)
        self._segment.check_signature(peer, lease.index, signature)

    def _all_gather(self, output: torch.Tensor, lease: Lease, epoch: int, call: str) -> None:
        signature = self._arrive(lease, epoch, call)
        chunk = output.numel() // len(self._segment.ranks)
        for peer in self._peers():
            self._meet(peer, lease, epoch, call, signature)
            source = self._segment.data(peer, lease.offset + peer * chunk, chunk)
            output.narrow(0, peer * chunk, chunk).copy_(source)
        self._segment.publish("done", lease.role, epoch)

    def _reduce_scatter(
        self, output: torch.Tensor, input_: torch.Tensor, op: object, lease: Lease, epoch: int, call: str
    ) -> None:
        signature = self._arrive(lease, epoch, call)
        for peer in self._peers():
            self._meet(peer, lease, epoch, call, signature)
        numel, rank = output.numel(), self._segment.rank
        nbytes = numel * input_.element_size()  # which may be of a narrower type than the sum
        chunks = [
            input_.narrow(0, rank * numel, numel)
            if peer == rank
            else self._segment.data(peer, lease.offset + rank * nbytes, nbytes).view(input_.dtype)
            for peer in range(len(self._segment.ranks))
        ]
        reduce_chunks(output, chunks, op)
        self._segment.publish("done", lease.role, epoch)

    def _pull(self, plan: PullPlan, targets: Sequence[torch.Tensor], lease: Lease, epoch: int, what: str) -> None:
        signature = self._arrive(lease, epoch, what)
        for peer in self._peers():
            self._meet(peer, lease, epoch, what, signature)
            for block in plan.by_peer.get(peer, ()):
                source = self._segment.data(peer, lease.offset + block.source, block.packed_nbytes)
                _copy_block(targets[block.target], source, block)
        self._segment.publish("done", lease.role, epoch)


def _copy_block(target: torch.Tensor, source: torch.Tensor, block: Block) -> None:
    if block.rows == 1:
        target.narrow(0, block.offset, block.nbytes).copy_(source)
    else:
        rows = target.as_strided((block.rows, block.nbytes), (block.pitch, 1), block.offset)
        rows.copy_(source.view(block.rows, block.nbytes))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
