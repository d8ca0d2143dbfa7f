"""SymmMemArena: the symmetric memory of one process group, taken once and handed out in slots by call order.

Every rank of the group must ask for slots in the same order; the slot is the call's number modulo the ring's length,
so all ranks use the same offset without talking. Nothing here depends on a garbage collector, a reference count or an
allocator: those only decide whether a slot's turn comes too early, which is an error on every rank.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SlotShortageError, SymmMemConfigError, SymmMemError, problem, told
from fsdp_symm.memory.host import HostSegment
from fsdp_symm.memory.segment import Segment
from fsdp_symm.plan import Lane, Ring

# backend -> type of the devices that it serves
BACKENDS = {"host": "cpu", "nccl": "cuda", "cuda": "cuda"}


def _segment(
    backend: str, group: dist.ProcessGroup, data_bytes: int, slots: int, timeout_s: float, device: torch.device
) -> Segment:
    if backend == "host":
        return HostSegment(group, data_bytes, slots, timeout_s)
    # These need a CUDA build of torch.
    from fsdp_symm.memory.cuda import CudaSegment
    from fsdp_symm.memory.nccl import NcclSegment

    kind = NcclSegment if backend == "nccl" else CudaSegment
    return kind(group, data_bytes, slots, timeout_s, device)


_Made = TypeVar("_Made")


def _nothing() -> None:
    """Of a slot without a tensor."""


@dataclass
class Lease:
    """A slot in use.

    Attributes:
        role, slot: which slot of which ring.
        index: the slot's number among all slots of the arena.
        offset, nbytes: where the tensor lies among the arena's bytes.
        owner: the module that asked.
        sequence: the call's number in its ring.
        alive: ``None`` when called once no tensor lies over the slot any more.
        epoch: number of the collective that used it, ``None`` while there was none.
    """

    role: Lane
    slot: int
    index: int
    offset: int
    nbytes: int
    owner: str
    sequence: int
    alive: Callable[[], object | None] = _nothing
    epoch: int | None = None


@dataclass(frozen=True)
class ArenaStats:
    """One arena in numbers.

    Attributes:
        nbytes: symmetric bytes that this rank holds, control page included; constant after construction.
        slots: slots by role.
        handed_out: slots handed out so far by role.
        in_use: slots by role whose tensors are alive now; none of ``unshard``, whose slots have no tensors.
        wait_s: seconds this rank has waited for its peers.
    """

    nbytes: int
    slots: dict[Lane, int]
    handed_out: dict[Lane, int]
    in_use: dict[Lane, int]
    wait_s: float


def _device_of(backend: str, device: torch.device | None) -> torch.device:
    if backend not in BACKENDS:
        raise SymmMemConfigError(
            problem(
                "SymmMemArena: unknown backend",
                found=repr(backend),
                expected=sorted(BACKENDS),
                fix="host, nccl or cuda",
            )
        )
    wanted = BACKENDS[backend]
    if device is None:
        device = torch.device(wanted) if wanted == "cpu" else torch.device(wanted, torch.cuda.current_device())
    if device.type != wanted or (wanted == "cuda" and device.index is None):
        raise SymmMemConfigError(
            problem(
                f"SymmMemArena: backend {backend!r} does not serve this device",
                found=device,
                expected=f"a {wanted} device" + (" with its index" if wanted == "cuda" else ""),
                fix="pass the device that the tensors live on",
            )
        )
    return device


class PeersTold:
    """A block whose error the peers hear of, see :meth:`SymmMemArena.peers_told`. A class, since it is entered in every
    call, and one made by contextlib costs four times as much."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._segment.fail(told(error))


class SymmMemArena:
    """Symmetric memory of one process group.

    Args:
        group: the ranks that share the memory. Construction is collective over it.
        rings: slots by role; :func:`fsdp_symm.plan.make_plan` computes them from a model.
        backend: ``"host"``: POSIX shared memory for CPU tensors; ``"nccl"``: NCCL windows, ``"cuda"``: torch's
            peer memory, for CUDA tensors.
        device: where the tensors live; by default the CPU, or the current CUDA device.
        serves: the process group whose calls this arena answers when they run on another one (``group``) instead,
            such as a dedicated communicator; by default ``group`` itself.
        timeout_s: seconds that any wait for a peer may last.

    Raises:
        SymmMemConfigError: unknown backend, a device that it does not serve, no ring, or two rings of one role.
        SymmMemMemoryError: the memory could not be had on some rank (raised on all).
        SymmMemUnavailableError: the group has no symmetric memory (raised on all).
        SymmMemTimeoutError: a rank did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rings: Sequence[Ring],
        *,
        backend: str = "host",
        device: torch.device | None = None,
        serves: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.device = _device_of(backend, device)
        if not rings or len({r.role for r in rings}) != len(rings):
            raise SymmMemConfigError(
                problem(
                    "SymmMemArena: the rings do not make an arena",
                    found=[f"{r.role} x {r.slots}" for r in rings],
                    expected="one or more rings, each of another lane",
                    fix="pass one fsdp_symm.plan.Ring a lane",
                )
            )
        self.group = group
        self.serves = group if serves is None else serves
        self.group_name = compat.group_name(self.serves)
        self.ranks = compat.group_ranks(group)
        self.backend = backend
        self._rings: dict[Lane, Ring] = {ring.role: ring for ring in rings}
        self._starts: dict[Lane, tuple[int, int]] = {}  # role -> (offset of slot 0, index of slot 0)
        offset = index = 0
        for ring in rings:
            self._starts[ring.role] = (offset, index)
            offset, index = offset + ring.nbytes, index + ring.slots
        self._leases: list[Lease | None] = [None] * index
        self._handed_out: dict[Lane, int] = dict.fromkeys(self._rings, 0)
        self._epochs: dict[Lane, int] = dict.fromkeys(self._rings, 0)
        self._lock = threading.Lock()
        self._closed = False
        self.segment = _segment(backend, group, offset, index, timeout_s, self.device)

    def __repr__(self) -> str:
        rings = ", ".join(f"{r.slots} x {r.slot_bytes} bytes for {r.role}" for r in self._rings.values())
        return f"SymmMemArena(ranks={list(self.ranks)}, {rings}{', closed' if self._closed else ''})"

    @property
    def engine(self) -> str:
        """Whose memory this is: ``"host"``, ``"nccl"`` or ``"cuda"``."""
        return self.segment.engine

    @property
    def nbytes(self) -> int:
        """Symmetric bytes that this rank holds, control page included."""
        return self.segment.nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes of all slots; they lie one after the other, ring by ring."""
        return sum(ring.nbytes for ring in self._rings.values())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def slot_bytes(self, role: Lane) -> int:
        """Bytes of one slot of a ring; 0 if there is none, or the arena is closed."""
        ring = self._rings.get(role)
        return 0 if ring is None or self._closed else ring.slot_bytes

    def why_not(self, role: Lane, nbytes: int) -> str | None:
        """Why a buffer cannot come from this arena, or ``None``. The answer is the same on every rank."""
        if self._closed:
            return "the arena is closed"
        ring = self._rings.get(role)
        if ring is None:
            return f"the arena has no {role} ring"
        if nbytes > ring.slot_bytes:
            return f"{nbytes} bytes were asked for, {ring.slot_bytes} are planned"
        return None

    def acquire(self, role: Lane, nbytes: int, *, owner: str = "") -> torch.Tensor:
        """:meth:`acquire_lease` without the lease, for those who find it by its tensor (:meth:`lease_of`)."""
        return self.acquire_lease(role, nbytes, owner=owner)[0]

    def acquire_lease(self, role: Lane, nbytes: int, *, owner: str = "") -> tuple[torch.Tensor, Lease]:
        """The next slot of a ring as ``uint8 [nbytes]``. Waits until peers have read what the slot held before.

        All ranks must call it in the same order. The slot is in use until the last tensor over it is gone.

        Raises:
            SymmMemError: the buffer does not fit (see :meth:`why_not`).
            SlotShortageError: the slot's turn has come while it is in use; the same on every rank.
            SymmMemTimeoutError, SymmMemPeerError: a peer has not read the slot.
        """
        return self._next(role, nbytes, owner, self._tensor)

    def _next(self, role: Lane, nbytes: int, owner: str, make: Callable[[Lease], _Made]) -> tuple[_Made, Lease]:
        """The next lease, and what is made of it; the ring moves on only when both are there."""
        if (reason := self.why_not(role, nbytes)) is not None:
            raise SymmMemError(f"{role} buffer of {owner!r}: {reason}")
        self.segment.check_health(f"{role} buffer of {owner!r}")
        with self._lock:
            sequence = self._handed_out[role]
            lease = self._hand_out(role, nbytes, owner, sequence)
            made = make(lease)
            self._handed_out[role] = sequence + 1
            return made, lease

    def _tensor(self, lease: Lease) -> torch.Tensor:
        tensor, lease.alive = self.segment.lease(lease.offset, lease.nbytes)
        return tensor

    def reserve(self, role: Lane, nbytes: int, *, owner: str = "") -> tuple[int, Lease]:
        """:meth:`acquire_lease` for those who need no tensor: the address of the bytes in this process.

        Only the collective that the slot is reserved for uses it: the slot's next user waits for that one, and slots
        that are reserved without a collective may be the same.

        Raises:
            SymmMemError, SymmMemTimeoutError, SymmMemPeerError: as :meth:`acquire_lease`.
        """
        return self._next(role, nbytes, owner, lambda lease: self.segment.address(lease.offset))

    def renew(self, lease: Lease, nbytes: int) -> tuple[torch.Tensor, Lease]:
        """The slot of ``lease`` once more, for the next part of the same buffer: the ring's turn does not move on.

        Raises:
            SymmMemError, SlotShortageError, SymmMemTimeoutError, SymmMemPeerError: as :meth:`acquire_lease`.
        """
        if (reason := self.why_not(lease.role, nbytes)) is not None:
            raise SymmMemError(f"{lease.role} buffer of {lease.owner!r}: {reason}")
        with self._lock:
            again = self._hand_out(lease.role, nbytes, lease.owner, lease.sequence)
            return self._tensor(again), again

    def peers_told(self) -> PeersTold:
        """Tell peers of an error between a slot and its call (out of memory, Ctrl-C): none may wait for this rank."""
        return PeersTold(self.segment)

    def _hand_out(self, role: Lane, nbytes: int, owner: str, sequence: int) -> Lease:
        ring = self._rings[role]
        slot = sequence % ring.slots
        start, first = self._starts[role]
        with self.peers_told():  # of a timeout too
            self._retire(role, first + slot, owner)
        offset = start + slot * ring.slot_bytes
        lease = Lease(role, slot, first + slot, offset, nbytes, owner, sequence)
        self._leases[first + slot] = lease
        self.segment.acquired(first + slot)
        return lease

    def _retire(self, role: Lane, index: int, owner: str) -> None:
        last = self._leases[index]
        if last is None:
            return
        if last.alive() is not None:
            gc.collect()  # a cycle (a kept traceback) may hold what the program has let go of
            if last.alive() is not None:
                raise SlotShortageError(self._shortage(role, owner))
        call = f"{role} buffer of {owner!r}: slot {last.slot} held the {role} of {last.owner!r}"
        self.segment.before_reuse(last, call)

    def _shortage(self, role: Lane, owner: str) -> str:
        ring = self._rings[role]
        _, first = self._starts[role]
        users = [
            f"slot {lease.slot}: {lease.owner!r} (call {lease.sequence})"
            for lease in self._leases[first : first + ring.slots]
            if lease is not None and lease.alive() is not None
        ]
        fix = (
            "call set_symm_mem_for_comm after set_modules_to_forward_prefetch / set_modules_to_backward_prefetch, or "
            f"pass slots={ring.slots + 1} or more when modules are unsharded early by hand"
            if role in ("all_gather", "unshard")
            else "call set_symm_mem_for_comm after set_reduce_scatter_max_input_buffers"
        )
        return problem(
            f"{role} of {owner!r}: the ring of {ring.slots} slots (ranks {list(self.ranks)}) is too short",
            found=f"the next slot is still in use; {'; '.join(users)}",
            expected=f"at least {ring.slots + 1} slots of {ring.slot_bytes} bytes, or buffers released in call order",
            fix=fix,
        )

    def lease_of(self, tensor: torch.Tensor) -> Lease | None:
        """The slot that the tensor starts in, or ``None`` when it lies outside the arena or its slot moved on."""
        offset = self.segment.offset_of(tensor)
        if offset is None or not tensor.is_contiguous():
            return None
        return next((x for x in self._leases if x is not None and x.offset == offset), None)

    def next_epoch(self, lease: Lease) -> int:
        """Number the collective that is about to use the slot; numbers grow by one a call and role."""
        with self._lock:
            self._epochs[lease.role] += 1
            lease.epoch = self._epochs[lease.role]
            return lease.epoch

    def stats(self) -> ArenaStats:
        """Numbers of this moment; local, cheap."""
        in_use: dict[Lane, int] = dict.fromkeys(self._rings, 0)
        for lease in self._leases:
            if lease is not None and lease.alive() is not None:
                in_use[lease.role] += 1
        return ArenaStats(
            nbytes=self.nbytes,
            slots={role: ring.slots for role, ring in self._rings.items()},
            handed_out=dict(self._handed_out),
            in_use=in_use,
            wait_s=self.segment.wait_s,
        )

    def abandon(self, reason: str) -> None:
        """Give the memory back without waiting for anybody, and make peers that still use it fail with ``reason``."""
        self.segment.fail(reason)
        self.close()

    def close(self) -> None:
        """Give the memory back. Collective over the group, in the order of creation; a second call does nothing.

        Raises:
            SymmMemTimeoutError: a living rank did not close in time; this rank's memory is released all the same.
        """
        if self._closed:
            return
        self._closed = True
        self.segment.close()
