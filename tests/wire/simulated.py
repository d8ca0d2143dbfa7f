"""A GPU's driver played on the CPU: ranks are threads, addresses are real, copies and flags happen at once.

It plays the part of :class:`fsdp_symm.memory.cuda_driver.CudaDriver` closely enough to run the whole copy-engine wire:
waits really wait for another thread's flag (with a timeout), and captured work runs when its graph is launched.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fsdp_symm import compat
from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.cuda_driver import Copies, MemOps
from fsdp_symm.memory.device import DeviceSegment, _LastUse
from fsdp_symm.memory.stream_flags import StreamFlags, control_nbytes, first_words
from fsdp_symm.plan import Lane
from fsdp_symm.wire import copy_engine
from fsdp_symm.wire.device_sum import PieceSum
from fsdp_symm.wire.reduce import reduce_chunks

CPU = torch.device("cpu")
WAIT_S = 20.0
NUM_SLOTS = 2


class FakeEvent:
    """Reached at once: work happens when it is enqueued."""

    def record(self, stream: Any = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream in which everything has happened already."""

    count = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        FakeStream.count += 1
        self.cuda_stream = FakeStream.count
        self.waited_for: list[Any] = []  # events

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> FakeEvent:
        return FakeEvent()


class SimulatedDriver:
    """One rank's driver."""

    def __init__(self) -> None:
        self._recording: list[Callable[[], None]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self.launches = 0
        self.user_captures = False  # into a graph of the program's own
        self.living: list[int] = []
        self.distinct: dict[int, Copies] = {}  # those that were enqueued

    def do(self, work: Callable[[], None]) -> None:
        """Run, or note down while capturing."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def mem_ops(self, ops: MemOps, stream: int) -> None:
        rows = np.frombuffer(ctypes.string_at(ops.address.value or 0, 48 * ops.count), np.uint8).reshape(-1, 48)
        for row in rows:
            kind = int(row[:4].view(np.uint32)[0])
            address, value = (int(row[at : at + 8].view(np.uint64)[0]) for at in (8, 16))
            if kind == 1:
                self.do(lambda a=address, v=value: self._wait(a, v))  # type: ignore[misc]
            else:
                word = ctypes.c_uint32 if kind == 2 else ctypes.c_uint64
                self.do(lambda a=address, v=value, w=word: setattr(w.from_address(a), "value", v))  # type: ignore[misc]

    def _wait(self, address: int, value: int) -> None:
        deadline = time.monotonic() + WAIT_S
        word = ctypes.c_uint32.from_address(address)
        while word.value < value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"word {address:#x} is {word.value}, not {value}")
            time.sleep(0)

    def copy(self, copies: Copies, stream: int, *, capturing: bool = False) -> None:
        assert capturing == (self._recording is not None), "a batch cannot be captured"
        self.distinct[id(copies)] = copies
        for target, source, nbytes in copies.flat:
            self.do(lambda t=target, s=source, n=nbytes: _copy_bytes(t, s, n))  # type: ignore[misc]
        for block in copies.pitched:
            for row in range(block.height):
                target, source = block.target + row * block.target_pitch, block.source + row * block.source_pitch
                self.do(lambda t=target, s=source, n=block.width: ctypes.memmove(t, s, n))  # type: ignore[misc]

    def user_capture(self, program: Callable[[], None]) -> int:
        """What ``torch.cuda.graph`` does."""
        self.user_captures = True
        try:
            return self.capture(0, program)
        finally:
            self.user_captures = False

    def capture(self, stream: int, enqueue: Callable[[], None]) -> int:
        assert self._recording is None, "a capture inside a capture"
        self._recording = []
        try:
            enqueue()
        finally:
            recorded, self._recording = self._recording, None
        self._graphs[len(self._graphs) + 1] = recorded
        self.living.append(len(self._graphs))
        return len(self._graphs)

    def launch(self, graph: int, stream: int) -> None:
        assert graph in self.living, "it was freed"
        self.launches += 1
        for work in self._graphs[graph]:
            work()

    def forget(self, graph: int) -> None:
        self.living.remove(graph)


def _copy_bytes(target: int, source: int, nbytes: int) -> None:
    """A copy; of a flag, by one store. The C library's memmove stores four bytes twice, from both ends: a peer could
    see the first, take the flag back, and be met by the second one in its next call."""
    if nbytes == 4:
        ctypes.c_uint32.from_address(target).value = ctypes.c_uint32.from_address(source).value
    else:
        ctypes.memmove(target, source, nbytes)


class SimulatedSegment(DeviceSegment):
    """A rank's memory, in reach of all ranks of the process."""

    engine = "simulated"

    def __init__(self, rank: int, memories: list[torch.Tensor], data_bytes: int, *, shares_gpu: bool = False) -> None:
        self.ranks = tuple(range(len(memories)))
        self.rank = rank
        self.device = CPU
        self.timeout_s = WAIT_S
        self.driver: Any = SimulatedDriver()
        self.peers = tuple(m.data_ptr() for m in memories)
        self._pointer, self._data_bytes = self.peers[rank], data_bytes
        self._uses: dict[int, _LastUse] = {}
        self._alive = {}
        self.flags = StreamFlags(self.driver, [p + data_bytes for p in self.peers], rank, NUM_SLOTS)
        self.notices = None
        self.shares_gpu = shares_gpu

    def _open(self) -> tuple[int, tuple[int, ...] | None]:
        return self._pointer, self.peers

    def _release(self, in_use: bool) -> None:
        pass


class Rank:
    """Hands out the slots of one lane in turn, as an arena does."""

    def __init__(self, segment: SimulatedSegment, lane: Lane, slots: int, slot_bytes: int) -> None:
        self.segment, self.lane, self.slots, self.slot_bytes = segment, lane, slots, slot_bytes
        self.wire = copy_engine.CopyEngineWire(segment)
        self._leases: dict[int, Lease] = {}
        self.calls = 0

    def acquire(self, nbytes: int) -> tuple[torch.Tensor, Lease]:
        index = self.calls % self.slots
        if index in self._leases:
            self.segment.before_reuse(self._leases[index], "t")
        tensor, alive = self.segment.lease(index * self.slot_bytes, nbytes)
        self.calls += 1
        lease = Lease(self.lane, index, index, index * self.slot_bytes, nbytes, "t", self.calls, alive, self.calls)
        self._leases[index] = lease
        self.segment.acquired(index)
        return tensor, lease


def memories(world_size: int, data_bytes: int) -> list[torch.Tensor]:
    """Every rank's slots and control block; slots poisoned, flags as they are at first."""
    made = []
    for _ in range(world_size):
        memory = torch.full((data_bytes + control_nbytes(world_size, NUM_SLOTS),), 0xFF, dtype=torch.uint8)
        memory[data_bytes:] = first_words(world_size, NUM_SLOTS).view(torch.uint8)
        made.append(memory)
    return made


def install(monkeypatch: Any) -> None:
    """Let the wire's modules see the simulated streams, and sums that read their output's address when they run."""
    local = threading.local()

    def current(device: torch.device) -> FakeStream:
        if not hasattr(local, "stream"):
            local.stream = FakeStream()
        return local.stream

    def launch(self: PieceSum, word: torch.Tensor, own: int, rows: int, start: int, nbytes: int, aligned: bool) -> None:
        def add() -> None:
            chunks = [compat.raw_tensor(rows + r * nbytes, nbytes, CPU) for r in range(self.world_size - 1)]
            chunks.insert(self.rank, compat.raw_tensor(own, nbytes, CPU))
            wider = self.output.itemsize // self.dtype.itemsize
            output = compat.raw_tensor(int(word[0]) + start * wider, nbytes * wider, CPU).view(self.output)
            reduce_chunks(output, [c.view(self.dtype) for c in chunks], torch.distributed.ReduceOp.SUM)
            output.mul_(self.scale)

        drivers[threading.get_ident()].do(add)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", _nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(compat, "current_stream", current)
    monkeypatch.setattr(PieceSum, "launch", launch)
    monkeypatch.setattr(copy_engine, "watch", lambda call: None)
    monkeypatch.setattr(copy_engine, "watch_captured", lambda segment, slot, what: None)
    monkeypatch.setattr(compat, "is_capturing", _user_captures)


drivers: dict[int, SimulatedDriver] = {}  # by thread, for kernels, which know no driver


def _user_captures() -> bool:
    driver = drivers.get(threading.get_ident())
    return driver is not None and driver.user_captures


class _nothing:
    def __init__(self, stream: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def run(
    world_size: int, data_bytes: int, program: Callable[[SimulatedSegment], None], *, shares_gpu: bool = False
) -> None:
    """``program`` on every rank; the first error is raised here."""
    shared = memories(world_size, data_bytes)
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            segment = SimulatedSegment(rank, shared, data_bytes, shares_gpu=shares_gpu)
            drivers[threading.get_ident()] = segment.driver
            program(segment)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
