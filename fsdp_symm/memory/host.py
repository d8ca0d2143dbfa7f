"""Symmetric memory for CPU ranks of one host: one POSIX shared-memory file a rank, mapped by all of its peers.

The file never has a name (``O_TMPFILE``): peers open it through ``/proc/PID/fd/N``, so nothing can stay behind in
``/dev/shm``, whenever a rank is killed. Pages are reserved when the file is made, so that a full ``/dev/shm`` is an
error at the switch and not a bus error in the middle of a step.

Layout of a segment, in bytes::

    0      failed   u32, then 64-byte cells: closed, and ready/done for each role
    1024   failure text: u32 length, then UTF-8
    2048   signatures: 256 bytes a slot (u16 length, then text), the call that a rank published
    C      data (C is the control size, a multiple of the page size)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import select
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.compat import ROLES, Role
from fsdp_symm.errors import SymmMemMemoryError, SymmMemPeerError, SymmMemTimeoutError, problem
from fsdp_symm.memory import signals
from fsdp_symm.memory.segment import SlotUse
from fsdp_symm.memory.signals import Word
from fsdp_symm.rendezvous import exchange

SHM_DIR_VARIABLE = "FSDP_SYMM_SHM_DIR"
_CELL_BYTES = 64  # one cache line a word, so that ranks do not fight over one
_TEXT_AT, _TEXT_BYTES = 1024, 1000
_SIGNATURES_AT, _SIGNATURE_BYTES = 2048, 256
_SPIN_S = 30e-6  # a peer that is nearly there costs less than two system calls
_SLICE_S = 0.1  # how often a sleeping rank looks whether its peers are alive

Kind = Literal["ready", "done"]


def shm_dir() -> str:
    """Where segments are made: ``/dev/shm`` unless ``FSDP_SYMM_SHM_DIR`` names another tmpfs."""
    return os.environ.get(SHM_DIR_VARIABLE, "/dev/shm")


def control_bytes(num_slots: int) -> int:
    """Size of a segment's control part."""
    needed = _SIGNATURES_AT + _SIGNATURE_BYTES * num_slots
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve(nbytes: int) -> int:
    """Make an unnamed file of ``nbytes`` with all its pages; returns the descriptor."""
    folder = shm_dir()
    what = f"host symmetric memory: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) in {folder} could not be had"
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SymmMemMemoryError(
            problem(
                what,
                found=error.strerror,
                expected="a writable tmpfs",
                fix=f"mount a tmpfs there (`mount -t tmpfs tmpfs {folder}`) or set {SHM_DIR_VARIABLE}",
            )
        ) from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        stat = os.statvfs(folder)
        raise SymmMemMemoryError(
            problem(
                what,
                found=f"{stat.f_bavail * stat.f_frsize} bytes free ({error.strerror})",
                expected=f"{nbytes} bytes free for this rank, and as much again for every other rank",
                fix=f"enlarge it (`mount -o remount,size=... {folder}`, `docker run --shm-size ...`), raise "
                f"min_bytes, or name fewer modules",
            )
        ) from error
    return descriptor


class _Mapping:
    """One rank's segment in this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.failed = Word(self.map, 0)
        self.closed = Word(self.map, _CELL_BYTES)
        self._words = {
            (kind, role): Word(self.map, _CELL_BYTES * (2 + 2 * index + offset))
            for index, role in enumerate(ROLES)
            for offset, kind in enumerate(("ready", "done"))
        }
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def word(self, kind: Kind, role: Role) -> Word:
        return self._words[kind, role]

    def fail(self, text: str) -> None:
        data = text.encode()[:_TEXT_BYTES]
        self.map[_TEXT_AT : _TEXT_AT + 4 + len(data)] = struct.pack("<I", len(data)) + data
        self.failed.publish(1)
        for word in self._words.values():
            word.wake()
        self.closed.wake()

    def failure(self) -> str | None:
        if not self.failed.reached(1):
            return None
        (length,) = struct.unpack_from("<I", self.map, _TEXT_AT)
        return self.map[_TEXT_AT + 4 : _TEXT_AT + 4 + length].decode(errors="replace")

    def sign(self, index: int, text: str) -> None:
        data = _fit(text)
        at = _SIGNATURES_AT + index * _SIGNATURE_BYTES
        self.map[at : at + 2 + len(data)] = struct.pack("<H", len(data)) + data

    def signature(self, index: int) -> str:
        at = _SIGNATURES_AT + index * _SIGNATURE_BYTES
        (length,) = struct.unpack_from("<H", self.map, at)
        return self.map[at + 2 : at + 2 + length].decode(errors="replace")


def _fit(text: str) -> bytes:
    """The text, or its head and a digest of the whole where it is longer than a signature has room for."""
    data, room = text.encode(), _SIGNATURE_BYTES - 2
    if len(data) <= room:
        return data
    mark = f"...#{hashlib.sha256(data).hexdigest()[:16]}".encode()
    return data[: room - len(mark)].decode(errors="ignore").encode() + mark


@dataclass(frozen=True)
class _Invitation:
    """What a rank tells its peers about its segment; ``inode`` proves that a descriptor is still the same file."""

    host: str
    pid: int
    descriptor: int
    inode: str
    nbytes: int
    error: str | None

    def dump(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @staticmethod
    def load(data: bytes) -> _Invitation:
        return _Invitation(**json.loads(data))


def _inode(descriptor: int) -> str:
    stat = os.fstat(descriptor)
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}"


def _host_identity() -> str:
    """Kernel boot and PID namespace: ranks that share both can open each other's descriptors."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class HostSegment:
    """The memory of one arena: this rank's segment, its peers' segments, and the signals between them.

    Args:
        group: the ranks that share; construction is collective over it.
        data_bytes: bytes of slots.
        num_slots: number of slots, for the signatures.
        timeout_s: seconds that any wait for a peer may last.

    Raises:
        SymmMemMemoryError: on every rank, when any rank cannot make or map a segment.
        SymmMemTimeoutError: a rank did not come.
    """

    engine = "host"

    def __init__(self, group: dist.ProcessGroup, data_bytes: int, num_slots: int, timeout_s: float) -> None:
        self.ranks = compat.group_ranks(group)
        self.rank = group.rank()
        self.timeout_s = timeout_s
        self.wait_s = 0.0
        self.data_at = control_bytes(num_slots)
        self.nbytes = self.data_at + data_bytes
        self._broken: str | None = None
        self._closed = False
        self._mappings: list[_Mapping] = []
        self._pidfds: list[int | None] = []
        self._open(group)
        self._own = self._mappings[self.rank]
        self._base = self._own.bytes.data_ptr() + self.data_at  # a number: it may outlive the mapping
        self._pid = os.getpid()

    # --- setting up ---

    def _open(self, group: dist.ProcessGroup) -> None:
        descriptor, error = -1, signals.unsupported_reason()
        if error is None:
            try:
                descriptor = _reserve(self.nbytes)
            except SymmMemMemoryError as failure:
                error = str(failure)
        inode = _inode(descriptor) if descriptor >= 0 else ""
        mine = _Invitation(_host_identity(), os.getpid(), descriptor, inode, self.nbytes, error)
        try:
            invitations = [_Invitation.load(d) for d in self._exchange(group, mine.dump())]
            self._refuse_errors([i.error for i in invitations])
            self._refuse_other_hosts(invitations)
            error = self._map(invitations, descriptor)
            self._refuse_errors([d.decode() or None for d in self._exchange(group, (error or "").encode())])
        finally:
            if descriptor >= 0:
                os.close(descriptor)  # the mappings keep the memory

    def _exchange(self, group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
        return exchange(
            group,
            payload,
            what="host symmetric memory: mapping the ranks' segments",
            timeout_s=self.timeout_s,
            fix="look for an error on the missing ranks; raise timeout_s if they are merely slow",
        )

    def _refuse_errors(self, errors: list[str | None]) -> None:
        failed = [(rank, text) for rank, text in zip(self.ranks, errors, strict=True) if text]
        if failed:
            raise SymmMemMemoryError("\n".join(f"rank {rank}: {text}" for rank, text in failed))

    def _refuse_other_hosts(self, invitations: list[_Invitation]) -> None:
        away = [r for r, i in zip(self.ranks, invitations, strict=True) if i.host != invitations[0].host]
        if away:
            raise SymmMemMemoryError(
                problem(
                    f"host symmetric memory: the ranks of group {list(self.ranks)} do not share one host",
                    found=f"ranks {away} on another host or in another PID namespace than rank {self.ranks[0]}",
                    expected="all ranks of a group in one container on one host",
                    fix="shard over the ranks of one host (HSDP), or use another backend",
                )
            )

    def _map(self, invitations: list[_Invitation], descriptor: int) -> str | None:
        """Map everybody's segment; returns the error as text so that all ranks hear of it."""
        for index, invitation in enumerate(invitations):
            own = index == self.rank
            path = f"/proc/{invitation.pid}/fd/{invitation.descriptor}"
            try:
                peer = descriptor if own else os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if _inode(peer) != invitation.inode:
                        raise FileNotFoundError(0, "another file by now: the rank has gone on without this one")
                    self._mappings.append(_Mapping(peer, invitation.nbytes))
                finally:
                    if not own:
                        os.close(peer)
                self._pidfds.append(None if own else os.pidfd_open(invitation.pid))
            except OSError as error:
                return problem(
                    f"host symmetric memory: the segment of rank {self.ranks[index]} could not be mapped",
                    found=f"{path}: {error.strerror}",
                    expected="a process of the same user in the same PID namespace",
                    fix="start all ranks as one user in one container",
                )
        return None

    # --- memory ---

    def lease(self, offset: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], object | None]]:
        """A fresh tensor over own data bytes ``[offset, offset + nbytes)``, and a reference that dies with its storage.

        torch keeps the Python buffer behind a storage alive exactly as long as any tensor or view uses that storage,
        so the weak reference sees views and C++ holders too, which one on the tensor object would not.
        """
        window = (ctypes.c_uint8 * nbytes).from_buffer(self._own.map, self.data_at + offset)
        return torch.frombuffer(window, dtype=torch.uint8), weakref.ref(window)

    def data(self, peer: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the segment of group rank ``peer``, as ``uint8 [nbytes]``."""
        return self._mappings[peer].bytes.narrow(0, self.data_at + offset, nbytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor starts among the own data bytes, or ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.nbytes - self.data_at else None

    # --- signals ---

    def acquired(self, index: int) -> None:
        """Nothing to note: host memory has no streams."""

    def before_reuse(self, last: SlotUse, call: str) -> None:
        """Wait until every peer has read what the slot held.

        Raises:
            SymmMemTimeoutError, SymmMemPeerError: see :meth:`wait`.
        """
        if last.epoch is None:
            return
        for peer in range(len(self.ranks)):
            if peer != self.rank:
                self.wait("done", last.role, last.epoch, peer, call)

    def publish(self, kind: Kind, role: Role, epoch: int) -> None:
        """Tell the peers that this rank's data of call ``epoch`` is ready, or that it has read everybody's."""
        self._own.word(kind, role).publish(epoch)

    def sign(self, slot_index: int, text: str) -> None:
        """Write down which call this rank is about to publish."""
        self._own.sign(slot_index, text)

    def check_signature(self, peer: int, slot_index: int, mine: str) -> None:
        """Refuse to touch a peer's data when the peer published another call.

        Raises:
            SymmMemPeerError: quotes both calls.
        """
        theirs = self._mappings[peer].signature(slot_index)
        if theirs != _fit(mine).decode(errors="replace"):
            raise SymmMemPeerError(
                problem(
                    "the ranks of one group issued different collectives",
                    found=f"rank {self.ranks[peer]}: {theirs}",
                    expected=f"rank {self.ranks[self.rank]}: {mine}",
                    fix="all ranks must run the same modules in the same order; a parameter that is unused on some "
                    "ranks needs FSDP2's reduce_scatter_unused_params",
                )
            )

    def wait(self, kind: Kind, role: Role, epoch: int, peer: int, call: str) -> None:
        """Wait until group rank ``peer`` has signalled ``epoch``.

        Raises:
            SymmMemTimeoutError: names the call, the epoch and every rank that has not arrived.
            SymmMemPeerError: the peer is gone, or a rank reported a failure.
        """
        word = self._mappings[peer].word(kind, role)
        if word.reached(epoch):
            return
        start = time.monotonic()
        try:
            while time.monotonic() - start < _SPIN_S:
                if word.reached(epoch):
                    return
            while not word.reached(epoch):
                self.check_health(f"{call} (epoch {epoch})", waiting=(kind, role, epoch))
                left_s = start + self.timeout_s - time.monotonic()
                if left_s <= 0:
                    self._raise_timeout(kind, role, epoch, call)
                word.sleep_until_change(epoch, min(left_s, _SLICE_S))
        finally:
            self.wait_s += time.monotonic() - start

    def _late(self, kind: Kind, role: Role, epoch: int) -> list[int]:
        return [r for r, m in zip(self.ranks, self._mappings, strict=True) if not m.word(kind, role).reached(epoch)]

    def _raise_timeout(self, kind: Kind, role: Role, epoch: int, call: str) -> None:
        # Own words lag behind what this rank waits for ("done" of a call it is in), so it is never listed.
        late = [r for r in self._late(kind, role, epoch) if r != self.ranks[self.rank]]
        verb = "published their data" if kind == "ready" else "read this rank's data"
        raise SymmMemTimeoutError(
            problem(
                f"{call}, epoch {epoch}: ranks {late} of group {list(self.ranks)} have not {verb}",
                found=f"no signal within {self.timeout_s:g} s",
                expected="every rank to reach this call",
                fix="look at what those ranks are doing (py-spy dump); raise timeout_s if they are merely slow",
            )
        )

    def check_health(self, call: str, waiting: tuple[Kind, Role, int] | None = None) -> None:
        """Raise if this arena has failed before, a peer reports a failure, or a peer that is waited for is dead.

        Raises:
            SymmMemPeerError: quotes the first failure.
        """
        if self._broken is not None:
            raise SymmMemPeerError(f"{call}: this group's symmetric memory has failed before: {self._broken}")
        for rank, mapping in zip(self.ranks, self._mappings, strict=True):
            if mapping is not self._own and (text := mapping.failure()) is not None:
                raise SymmMemPeerError(f"{call}: rank {rank} reported: {text}")
        if waiting is None:
            return
        late = set(self._late(*waiting))
        closed = [r for r, m in zip(self.ranks, self._mappings, strict=True) if r in late and m.closed.reached(1)]
        if closed:
            raise SymmMemPeerError(
                problem(
                    f"{call}: ranks {closed} of group {list(self.ranks)} have closed their symmetric memory",
                    found="they will not come",
                    expected="every rank to reach this call",
                    fix="call disable() and close() on every rank alike, between steps",
                )
            )
        dead = [
            r
            for r, pidfd in zip(self.ranks, self._pidfds, strict=True)
            if r in late and pidfd is not None and _is_dead(pidfd)
        ]
        if dead:
            raise SymmMemPeerError(
                problem(
                    f"{call}: ranks {dead} of group {list(self.ranks)} are gone",
                    found="their processes have ended",
                    expected="every rank to reach this call",
                    fix="look at the first error those ranks printed, or at the kernel's log for an out-of-memory kill",
                )
            )

    def fail(self, text: str) -> None:
        """Remember a failure and tell the peers, so that none of them waits for this rank."""
        if self._broken is None:
            self._broken = text
            if os.getpid() == self._pid:  # a forked child must not speak for its parent
                self._own.fail(text)

    # --- the end ---

    def close(self) -> None:
        """Wait until every living rank is here too, then let go of the memory. Collective; safe to call twice.

        Tensors that still use the memory keep their mapping alive, so a late reader sees old data, never a fault.

        Raises:
            SymmMemTimeoutError: names the ranks that did not close; the own memory is released all the same.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a forked child: the parent goes on
        self._own.closed.publish(1)
        try:
            if self._broken is None:
                self._await_close()
        finally:
            for pidfd in self._pidfds:
                if pidfd is not None:
                    os.close(pidfd)
            self._broken = self._broken or "it was closed"
            self._mappings = []
            del self._own  # only tensors that are still alive keep the memory now

    def _await_close(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        open_ranks = self._open_ranks()
        while open_ranks:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SymmMemTimeoutError(
                    problem(
                        "closing symmetric memory: not every rank did",
                        found=f"ranks {[self.ranks[p] for p in open_ranks]} have not called close()",
                        expected=f"all ranks of group {list(self.ranks)} within {self.timeout_s:g} s",
                        fix="call close() on every rank, before the process group is destroyed",
                    )
                )
            self._mappings[open_ranks[0]].closed.sleep_until_change(1, min(left_s, _SLICE_S))
            open_ranks = self._open_ranks()

    def _open_ranks(self) -> list[int]:
        """Group ranks that are alive, have not failed and have not closed."""
        return [
            p
            for p, (mapping, pidfd) in enumerate(zip(self._mappings, self._pidfds, strict=True))
            if pidfd is not None and not mapping.closed.reached(1) and mapping.failure() is None and not _is_dead(pidfd)
        ]


def _is_dead(pidfd: int) -> bool:
    """A pidfd turns readable when its process ends, also while it is an unreaped zombie (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
