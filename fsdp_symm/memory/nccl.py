"""Symmetric memory for CUDA ranks under NCCL: one allocation and one window an arena, registered once.

The memory comes from ``ncclMemAlloc`` itself and not from a MemPool over it: the caching allocator would round an arena
of a few MiB up to a 20 MiB segment and may move segments under ``expandable_segments``; the window covers exactly what
was planned. Slots are stream-ordered: NCCL's collectives synchronise the ranks before and after they touch a window, so
a slot needs no barrier of its own, only the order of the local streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_symm import compat, compat_nccl
from fsdp_symm.errors import SymmMemMemoryError, SymmMemPeerError, SymmMemUnavailableError, problem
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.memory.nccl_library import NcclLibrary, nccl_library
from fsdp_symm.memory.segment import SlotUse
from fsdp_symm.rendezvous import exchange

# Memory of closed segments over which a tensor was still alive: never freed, since torch does not own it.
_kept: list[int] = []


@dataclass
class _LastUse:
    """Streams and the event of a slot's last use."""

    stream: torch.cuda.Stream
    after: torch.cuda.Event | None = None
    event: torch.cuda.Event | None = None  # made once, recorded again by every use


class NcclSegment:
    """Windows of one communicator.

    Args:
        group: an NCCL process group; construction is collective over it.
        data_bytes: bytes of slots.
        num_slots: number of slots.
        timeout_s: seconds that the exchanges while setting up may last.
        device: this rank's GPU.

    Raises:
        SymmMemMemoryError: on every rank, when memory could not be had or registered on any.
        SymmMemUnavailableError: on every rank, when NCCL gave no window.
    """

    engine = "nccl"
    wait_s = 0.0  # ranks wait for each other on the GPU; the host never does

    def __init__(
        self, group: dist.ProcessGroup, data_bytes: int, num_slots: int, timeout_s: float, device: torch.device
    ) -> None:
        self.ranks = compat.group_ranks(group)
        self.rank = group.rank()
        self.nbytes = data_bytes
        self.device = device
        self._group = group
        self._timeout_s = timeout_s
        self._uses: dict[int, _LastUse] = {}
        self._alive: dict[int, Callable[[], object | None]] = {}  # by offset: does a tensor still lie there?
        self._closed = False
        self._failure: str | None = None
        with torch.cuda.device(device):
            self._library, self._pointer = self._allocate()
            self._communicator, self._window = self._register()
        self._notices = self._notice_board(num_slots)

    # --- setting up ---

    def _tell(self, error: str | None) -> None:
        """Raise every rank's error on every rank, so that none goes on to a collective alone."""
        answers = exchange(
            self._group,
            (error or "").encode(),
            what="NCCL symmetric memory: allocating and registering",
            timeout_s=self._timeout_s,
            fix="look for an error on the missing ranks; raise timeout_s if they are merely slow",
        )
        failed = [(rank, text.decode()) for rank, text in zip(self.ranks, answers, strict=True) if text]
        if failed:
            raise SymmMemMemoryError("\n".join(f"rank {rank}: {text}" for rank, text in failed))

    def _allocate(self) -> tuple[NcclLibrary, int]:
        library, pointer, error = None, 0, None
        try:
            library = nccl_library()
            pointer = library.mem_alloc(self.nbytes)
        except SymmMemMemoryError as failure:
            error = str(failure)
        self._tell(error)
        if library is None:
            raise SymmMemMemoryError(f"rank {self.ranks[self.rank]}: {error}")
        return library, pointer

    def _register(self) -> tuple[int, int]:
        # A communicator is made by its first collective unless device_id was given; windows need it to exist.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        torch.cuda.synchronize(self.device)
        communicator = compat_nccl.comm_pointer(self._group, self.device)
        window, error = None, None
        try:
            window = self._library.window_register(communicator, self._pointer, self.nbytes)
        except SymmMemMemoryError as failure:
            error = str(failure)
        self._tell(error)
        if window is None:  # the same on every rank: NCCL decides it for the communicator
            self._library.mem_free(self._pointer)
            raise SymmMemUnavailableError(
                problem(
                    f"NCCL gave no window to the group of ranks {list(self.ranks)}",
                    found="ncclCommWindowRegister succeeded with a NULL window",
                    expected="a communicator with symmetric support: CUDA P2P between all its ranks, NCCL_CUMEM_ENABLE "
                    "and NCCL_WIN_ENABLE not 0",
                    fix="run fsdp-symm doctor under torchrun; it names the first unmet condition",
                )
            )
        return communicator, window

    def _notice_board(self, num_slots: int) -> HostSegment | None:
        """Failure notices through shared memory where all ranks share a host; over hosts NCCL's watchdog remains."""
        with contextlib.suppress(SymmMemMemoryError):  # raised on every rank alike
            return HostSegment(self._group, 0, num_slots, self._timeout_s)
        return None

    # --- memory ---

    def lease(self, offset: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], object | None]]:
        """See :class:`fsdp_symm.memory.segment.Segment`."""
        tensor, alive = compat.wrap_memory(self._pointer + offset, nbytes, self.device)
        self._alive[offset] = alive
        return tensor, alive

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """See :class:`fsdp_symm.memory.segment.Segment`."""
        offset = tensor.data_ptr() - self._pointer
        return offset if 0 <= offset < self.nbytes else None

    # --- order ---

    def acquired(self, index: int) -> None:
        """Note the stream on which a slot's next use begins."""
        use = self._uses.get(index)
        stream = torch.cuda.current_stream(self.device)
        if use is None:
            self._uses[index] = _LastUse(stream, event=torch.cuda.Event())
        else:
            use.stream, use.after = stream, None

    def used(self, index: int) -> None:
        """Note the end of the collective on the current stream."""
        use = self._uses[index]
        if use.event is not None:
            use.event.record(torch.cuda.current_stream(self.device))
            use.after = use.event

    def before_reuse(self, last: SlotUse, call: str) -> None:
        """Order the current stream after the slot's last use.

        FSDP2 orders its own streams: before it drops an all-gather output, its copy-in stream waits for the copy-out.
        So on the stream of the last use only the collective itself is waited for, which costs no overlap. On another
        stream (``unshard()`` by hand) nothing is known about the copy-out but that it is enqueued already: wait for
        the default stream, where FSDP2 copies out, and for the last stream.
        """
        use = self._uses.get(last.index)
        if use is None:
            return
        current = torch.cuda.current_stream(self.device)
        if use.after is not None:
            current.wait_event(use.after)
        if current != use.stream:
            current.wait_stream(use.stream)
            current.wait_stream(torch.cuda.default_stream(self.device))

    # --- failures and the end ---

    def check_health(self, call: str) -> None:
        """Raise if this arena has failed here, or on a peer of the same host.

        Raises:
            SymmMemPeerError: quotes the first failure.
        """
        if self._failure is not None:
            raise SymmMemPeerError(f"{call}: this group's symmetric memory has failed before: {self._failure}")
        if self._notices is not None:
            self._notices.check_health(call)

    def fail(self, text: str) -> None:
        """Remember a failure and tell the peers of the same host."""
        self._failure = self._failure or text
        if self._notices is not None:
            self._notices.fail(text)

    def close(self) -> None:
        """Deregister the window and let go of the memory. Collective, in the order of creation; safe to call twice.

        After a failure, or when the process group is gone, window and memory are left to NCCL and the driver:
        deregistering waits for all ranks, and a destroyed communicator cannot be asked.

        Raises:
            SymmMemTimeoutError: a living rank of this host did not close in time.
        """
        if self._closed:
            return
        self._closed = True
        healthy = self._failure is None and compat.group_is_alive(self._group)
        try:
            if self._notices is not None:
                self._notices.close()
        except BaseException:
            healthy = False
            raise
        finally:
            if healthy:
                with torch.cuda.device(self.device):
                    torch.cuda.synchronize(self.device)
                    self._library.window_deregister(self._communicator, self._window)
                    self._release()
            self._failure = self._failure or "it was closed"

    def _release(self) -> None:
        """Free the memory, unless a tensor still lies there: it would be left pointing at nothing."""
        if any(alive() is not None for alive in self._alive.values()):
            _kept.append(self._pointer)
        else:
            self._library.mem_free(self._pointer)
