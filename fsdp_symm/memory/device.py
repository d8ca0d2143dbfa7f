"""What NCCL windows and torch's peer memory have in common: symmetric memory on GPUs, ordered by streams.

A segment is one allocation: the slots, then a control block of flags (:mod:`fsdp_symm.memory.stream_flags`). Slots are
reused without a host's help: a slot's next use is ordered after its last one on the local streams, and after the
peers' reads by their ``done`` flags where our own wire moved the bytes. NCCL's collectives need no flags, since they
synchronise the ranks before and after they touch a window.

While a CUDA graph is captured, no events tie the capture to what ran before it: flags alone order the ranks, and
replays are ordered by the stream they are launched on, as for any other memory that a graph uses. Calls that take turns
on a slot must be captured on one stream, as expert layers are: across streams only events would order them.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemMemoryError, SymmMemPeerError
from fsdp_symm.memory.cuda_driver import CudaDriver, cuda_driver
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.memory.segment import SlotUse
from fsdp_symm.memory.stream_flags import StreamFlags, control_nbytes, first_words
from fsdp_symm.plan import Lane
from fsdp_symm.rendezvous import exchange

_ALIGNMENT_BYTES = 4096
# Nothing else uses this one (torch clamps it to what the GPU has): streams of one priority may share a hardware queue,
# and the watchdog must not stand behind the stream that is stuck.
_WATCHDOG_PRIORITY = -3


@dataclass
class _LastUse:
    """Streams and events of a slot's last use.

    Attributes:
        stream: where the use began.
        after: the end of the collective, where it is known.
        event: made once, recorded again by every use of NCCL's.
        pulled: whether peers read the slot by our own wire.
    """

    stream: torch.cuda.Stream
    after: torch.cuda.Event | None = None
    event: torch.cuda.Event | None = None
    pulled: bool = False


class DeviceSegment(abc.ABC):
    """Symmetric memory of one arena on GPUs; subclasses know where it comes from.

    Args:
        group: construction is collective over it.
        data_bytes: bytes of slots.
        num_slots: number of slots.
        timeout_s: seconds that the exchanges while setting up may last, and a call of our own wire.
        device: this rank's GPU.

    Attributes:
        shares_gpu: whether a peer runs on this rank's GPU.
        driver, flags: for the wire; ``flags`` is ``None`` where peers' memory cannot be addressed.
        peers: address of every rank's slots in this process, ``None`` as above.

    Raises:
        SymmMemMemoryError: on every rank, when memory could not be had on any.
        SymmMemUnavailableError: on every rank, when the group has no symmetric memory.
    """

    engine: str
    wait_s = 0.0  # ranks wait for each other on the GPU; the host never does

    def __init__(
        self, group: dist.ProcessGroup, data_bytes: int, num_slots: int, timeout_s: float, device: torch.device
    ) -> None:
        self.ranks = compat.group_ranks(group)
        self.rank = group.rank()
        self.device = device
        self.timeout_s = timeout_s
        self._group = group
        self._control_at = -(-data_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._data_bytes = data_bytes
        self.nbytes = self._control_at + control_nbytes(len(self.ranks), num_slots)
        self._uses: dict[int, _LastUse] = {}
        self._alive: dict[int, Callable[[], object | None]] = {}  # by offset: does a tensor still lie there?
        self._closed = False
        self._reading = threading.Lock()
        self._failure: str | None = None
        self._process = os.getpid()
        self.driver: CudaDriver = cuda_driver()
        with torch.cuda.device(device):
            self._pointer, self.peers = self._open()
            control = compat.raw_tensor(self._pointer + self._control_at, self.nbytes - self._control_at, device)
            control.copy_(first_words(len(self.ranks), num_slots).view(torch.uint8))
            torch.cuda.synchronize(device)
        self._tell(None)  # every rank's flags are set before any peer writes one
        self.flags: StreamFlags | None = None
        if self.peers is not None:
            self.flags = StreamFlags(self.driver, [p + self._control_at for p in self.peers], self.rank, num_slots)
        self.notices = self._notice_board(num_slots)
        self.shares_gpu = self._shares_gpu()
        self._mirror = torch.empty(control_nbytes(len(self.ranks), num_slots) // 4, dtype=torch.int32, pin_memory=True)
        self._mirror_on_device = compat.raw_tensor(self._mirror.data_ptr(), self._mirror.nbytes, device)
        self._mirror_stream = torch.cuda.Stream(device, priority=_WATCHDOG_PRIORITY)
        self.read_flags(self.timeout_s)  # loads the kernel now: later that could wait for a stuck device

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    # --- what subclasses do ---

    @abc.abstractmethod
    def _open(self) -> tuple[int, tuple[int, ...] | None]:
        """Allocate and share ``nbytes``: the own address, and every rank's address in this process if known."""

    @abc.abstractmethod
    def _release(self, in_use: bool) -> None:
        """Stop sharing, and free the memory unless a tensor still lies there. After a barrier."""

    # --- setting up ---

    def _tell(self, error: str | None) -> None:
        """Raise every rank's error on every rank, so that none goes on to a collective alone."""
        answers = exchange(
            self._group,
            (error or "").encode(),
            what=f"{self.engine} symmetric memory: allocating and sharing",
            timeout_s=self.timeout_s,
            fix="look for an error on the missing ranks; raise timeout_s if they are merely slow",
        )
        failed = [(rank, text.decode()) for rank, text in zip(self.ranks, answers, strict=True) if text]
        if failed:
            raise SymmMemMemoryError("\n".join(f"rank {rank}: {text}" for rank, text in failed))

    def _notice_board(self, num_slots: int) -> HostSegment | None:
        """Failure notices through shared memory where all ranks share a host; over hosts NCCL's watchdog remains."""
        with contextlib.suppress(SymmMemMemoryError):  # raised on every rank alike
            return HostSegment(self._group, 0, num_slots, self.timeout_s)
        return None

    def _shares_gpu(self) -> bool:
        names = exchange(
            self._group,
            compat.device_uuid(self.device).encode(),
            what=f"{self.engine} symmetric memory: comparing GPUs",
            timeout_s=self.timeout_s,
            fix="look for an error on the missing ranks; raise timeout_s if they are merely slow",
        )
        return names.count(names[self.rank]) > 1

    # --- memory ---

    def lease(self, offset: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], object | None]]:
        """See :class:`fsdp_symm.memory.segment.Segment`."""
        tensor, alive = compat.wrap_memory(self._pointer + offset, nbytes, self.device)
        self._alive[offset] = alive
        return tensor, alive

    def address(self, offset: int) -> int:
        """See :class:`fsdp_symm.memory.segment.Segment`."""
        return self._pointer + offset

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """See :class:`fsdp_symm.memory.segment.Segment`."""
        offset = compat.address(tensor) - self._pointer
        return offset if 0 <= offset < self._data_bytes else None

    def read_flags(self, patience_s: float) -> torch.Tensor | None:
        """This rank's flags as the device holds them now, ``int32``; ``None`` if it does not answer.

        For a watchdog, while streams are stuck: on a stream of its own, into memory pinned beforehand, since a new
        allocation could wait for the device; and by a kernel, since a copy could queue up behind copies that are stuck.
        """
        with self._reading:  # not while the memory is given back
            if self._closed:
                return None
            control = compat.raw_tensor(self._pointer + self._control_at, self.nbytes - self._control_at, self.device)
            with torch.cuda.stream(self._mirror_stream):
                torch.add(control.view(torch.int32), 0, out=self._mirror_on_device.view(torch.int32))
                event = self._mirror_stream.record_event()
            deadline = time.monotonic() + patience_s
            while not event.query():
                if time.monotonic() > deadline:
                    return None
                threading.Event().wait(0.01)
            return self._mirror

    # --- order ---

    def acquired(self, index: int) -> None:
        """Note the stream on which a slot's next use begins."""
        use = self._uses.get(index)
        stream = compat.current_stream(self.device)
        if (use is None or not use.pulled) and self.flags is not None and compat.is_capturing():
            # In the replays the slot's last use is that of the replay before.
            self.flags.await_readers(index, stream.cuda_stream)
        if use is None:
            self._uses[index] = _LastUse(stream, event=torch.cuda.Event())
        else:
            use.stream, use.after, use.pulled = stream, None, False

    def used(self, index: int) -> None:
        """Note the end of one of NCCL's collectives on the current stream."""
        use = self._uses[index]
        if use.event is not None and not compat.is_capturing():
            use.event.record(compat.current_stream(self.device))
            use.after = use.event

    def pulled(self, index: int, after: torch.cuda.Event | None) -> None:
        """Note that peers read the slot by our own wire, and the event that ends the local part of the call, which has
        none while a graph is captured."""
        use = self._uses[index]
        use.after, use.pulled = after, True

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
        current = compat.current_stream(self.device)
        capturing = compat.is_capturing()
        if use.after is not None and not capturing:
            # On another stream the *done* words might still be those of the call before: this one takes them back.
            current.wait_event(use.after)
        if use.pulled and self.flags is not None:
            self.flags.await_readers(last.index, current.cuda_stream)
        shards = use.pulled and last.role == "unshard"  # they have no later readers
        if current != use.stream and not shards and not capturing:
            current.wait_stream(use.stream)
            current.wait_stream(torch.cuda.default_stream(self.device))

    def issued(self, lane: Lane, epoch: int) -> None:
        """Note for the peers of this host that this rank's host has enqueued a call of our own wire."""
        if self.notices is not None:
            self.notices.note(lane, epoch)

    def not_issued(self, lane: Lane, epoch: int) -> list[int] | None:
        """Ranks whose hosts have not come to this call, ``None`` where that is not known."""
        return None if self.notices is None else self.notices.behind(lane, epoch)

    # --- failures and the end ---

    def check_health(self, call: str) -> None:
        """Raise if this arena has failed here, or on a peer of the same host.

        Raises:
            SymmMemPeerError: quotes the first failure.
        """
        if self._failure is not None:
            raise SymmMemPeerError(f"{call}: this group's symmetric memory has failed before: {self._failure}")
        if self.notices is not None:
            self.notices.check_health(call)

    def fail(self, text: str) -> None:
        """Remember a failure and tell the peers of the same host."""
        self._failure = self._failure or text
        if self.notices is not None:
            self.notices.fail(text)

    def close(self) -> None:
        """Stop sharing and let go of the memory. Collective, in the order of creation; safe to call twice.

        After a failure, or when the process group is gone, the memory is left to NCCL and the driver: peers may still
        read it, and a destroyed communicator cannot be asked.

        Raises:
            SymmMemTimeoutError: a living rank of this host did not close in time.
        """
        with self._reading:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._process:
            return  # a forked child: the parent goes on
        healthy = self._failure is None and compat.group_is_alive(self._group)
        if healthy:
            torch.cuda.synchronize(self.device)  # this rank reads nothing of its peers any more
        try:
            if self.notices is not None:
                self.notices.close()
        except BaseException:
            healthy = False
            raise
        finally:
            if healthy:
                with torch.cuda.device(self.device):
                    self._release(any(alive() is not None for alive in self._alive.values()))
            self._failure = self._failure or "it was closed"
