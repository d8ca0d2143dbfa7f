"""Symmetric memory for CPU ranks of one host: one POSIX shared-memory file a rank, mapped by all of its peers.

The file never has a name (``O_TMPFILE``): peers open it through ``/proc/PID/fd/N``, so nothing can stay behind in
``/dev/shm``, whenever a rank is killed. Pages are reserved when the file is made, so that a full ``/dev/shm`` is an
error at the switch and not a bus error in the middle of a step.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemMemoryError, SymmMemPeerError, SymmMemTimeoutError, problem
from fsdp_symm.memory import signals
from fsdp_symm.memory.segment import SlotUse
from fsdp_symm.memory.shared_file import (
    Answer,
    Invitation,
    Kind,
    Mapping,
    close_all,
    control_bytes,
    digest,
    fit,
    host_identity,
    inode_of,
    is_dead,
    reserve,
)
from fsdp_symm.plan import Lane
from fsdp_symm.rendezvous import exchange

_SPIN_S = 30e-6  # a peer that is nearly there costs less than two system calls
_MEETINGS = 8  # while memory is set up: two, and one more each time that a rank was interrupted and came back
_SLICE_S = 0.1  # how often a sleeping rank looks whether its peers are alive


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
        self._mappings: list[Mapping] = []
        self._pidfds: list[int | None] = []
        # Mappings go with this object, also where nobody calls close(); descriptors would not.
        weakref.finalize(self, close_all, self._pidfds).atexit = False
        self._open(group)
        self._own = self._mappings[self.rank]
        self._base = self._own.bytes.data_ptr() + self.data_at  # a number: it may outlive the mapping
        self._pid = os.getpid()

    # --- setting up ---

    def _open(self, group: dist.ProcessGroup) -> None:
        """Make the own file and meet the peers, raising the same error on every rank when one rank has one."""
        descriptor, error = -1, signals.unsupported_reason()
        if error is None:
            try:
                descriptor = reserve(self.nbytes)
            except SymmMemMemoryError as failure:
                error = str(failure)
        try:
            inode = inode_of(descriptor) if descriptor >= 0 else ""
            self._meet(group, Invitation(host_identity(), os.getpid(), descriptor, inode, self.nbytes, error))
        except BaseException:
            self._unmap()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)  # the mappings keep the memory

    def _meet(self, group: dist.ProcessGroup, mine: Invitation) -> None:
        """Map what all ranks offer, until all have mapped the same.

        Every answer repeats the invitation and names what the sender has mapped. So a rank that was interrupted, and
        comes back with another file, is met again by peers that have read about its first one.
        """
        mapped, error = "", None
        for _ in range(_MEETINGS):
            answers = [Answer.load(d) for d in self._exchange(group, Answer(mine, mapped, error).dump())]
            invitations = [answer.invitation for answer in answers]
            offered = digest(invitations)
            if all(answer.mapped == offered for answer in answers):
                self._refuse_errors([i.error for i in invitations])
                self._refuse_other_hosts(invitations)
                return self._refuse_errors([answer.error for answer in answers])
            self._unmap()
            mapped, error = offered, self._map(invitations, mine.descriptor)
        raise SymmMemMemoryError(
            problem(
                f"host symmetric memory: the ranks of group {list(self.ranks)} keep starting over",
                found=f"{_MEETINGS} meetings, in each of which a rank had begun again",
                expected="every rank to stay until all have mapped the others' memory",
                fix="look for what interrupts those ranks (a signal handler, a time limit around the switch)",
            )
        )

    def _unmap(self) -> None:
        self._mappings = []
        close_all(self._pidfds)

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

    def _away(self, invitations: list[Invitation]) -> list[int]:
        return [r for r, i in zip(self.ranks, invitations, strict=True) if i.host != invitations[0].host]

    def _refuse_other_hosts(self, invitations: list[Invitation]) -> None:
        if away := self._away(invitations):
            raise SymmMemMemoryError(
                problem(
                    f"host symmetric memory: the ranks of group {list(self.ranks)} do not share one host",
                    found=f"ranks {away} on another host or in another PID namespace than rank {self.ranks[0]}",
                    expected="all ranks of a group in one container on one host",
                    fix="shard over the ranks of one host (HSDP), or use another backend",
                )
            )

    def _map(self, invitations: list[Invitation], descriptor: int) -> str | None:
        """Map everybody's segment; returns the error as text so that all ranks hear of it."""
        if any(i.error for i in invitations) or self._away(invitations):
            return None  # refused as soon as all ranks have seen it
        for index, invitation in enumerate(invitations):
            own = index == self.rank
            path = f"/proc/{invitation.pid}/fd/{invitation.descriptor}"
            try:
                peer = descriptor if own else os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if inode_of(peer) != invitation.inode:
                        raise FileNotFoundError(0, "another file by now: the rank has gone on without this one")
                    self._mappings.append(Mapping(peer, invitation.nbytes))
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

    def address(self, offset: int) -> int:
        """Where the own data byte ``offset`` lies in this process."""
        return self._base + offset

    def data(self, peer: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the segment of group rank ``peer``, as ``uint8 [nbytes]``."""
        return self._mappings[peer].bytes.narrow(0, self.data_at + offset, nbytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor starts among the own data bytes, or ``None`` if it lies elsewhere."""
        offset = compat.address(tensor) - self._base
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

    def publish(self, kind: Kind, role: Lane, epoch: int) -> None:
        """Tell the peers that this rank's data of call ``epoch`` is ready, or that it has read everybody's."""
        self._own.word(kind, role).publish(epoch)

    def note(self, role: Lane, epoch: int) -> None:
        """Write down that this rank has issued call ``epoch``, for peers that ask who is :meth:`behind`."""
        self._own.word("ready", role).note(epoch)

    def behind(self, role: Lane, epoch: int) -> list[int]:
        """Ranks that have not noted call ``epoch``; local, cheap."""
        return self._late("ready", role, epoch)

    def sign(self, slot_index: int, text: str) -> None:
        """Write down which call this rank is about to publish."""
        self._own.sign(slot_index, text)

    def check_signature(self, peer: int, slot_index: int, mine: str) -> None:
        """Refuse to touch a peer's data when the peer published another call.

        Raises:
            SymmMemPeerError: quotes both calls.
        """
        theirs = self._mappings[peer].signature(slot_index)
        if theirs != fit(mine).decode(errors="replace"):
            raise SymmMemPeerError(
                problem(
                    "the ranks of one group issued different collectives",
                    found=f"rank {self.ranks[peer]}: {theirs}",
                    expected=f"rank {self.ranks[self.rank]}: {mine}",
                    fix="all ranks must run the same modules in the same order; a parameter that is unused on some "
                    "ranks needs FSDP2's reduce_scatter_unused_params",
                )
            )

    def wait(self, kind: Kind, role: Lane, epoch: int, peer: int, call: str) -> None:
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

    def _late(self, kind: Kind, role: Lane, epoch: int) -> list[int]:
        return [r for r, m in zip(self.ranks, self._mappings, strict=True) if not m.word(kind, role).reached(epoch)]

    def _raise_timeout(self, kind: Kind, role: Lane, epoch: int, call: str) -> None:
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

    def check_health(self, call: str, waiting: tuple[Kind, Lane, int] | None = None) -> None:
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
        # Who has left is read first: a rank signals before it leaves, so one that is late after that stays late.
        has_closed = {r for r, m in zip(self.ranks, self._mappings, strict=True) if m.closed.reached(1)}
        has_ended = set(self.dead_ranks())
        late = self._late(*waiting)
        closed = [r for r in late if r in has_closed]
        dead = [r for r in late if r in has_ended]
        if closed:
            raise SymmMemPeerError(
                problem(
                    f"{call}: ranks {closed} of group {list(self.ranks)} have closed their symmetric memory",
                    found="they will not come",
                    expected="every rank to reach this call",
                    fix="call disable() and close() on every rank alike, between steps",
                )
            )
        if dead:
            raise SymmMemPeerError(
                problem(
                    f"{call}: ranks {dead} of group {list(self.ranks)} are gone",
                    found="their processes have ended",
                    expected="every rank to reach this call",
                    fix="look at the first error those ranks printed, or at the kernel's log for an out-of-memory kill",
                )
            )

    def reported(self) -> str | None:
        """The first failure that a peer has reported, ``None`` while all is well."""
        for rank, mapping in zip(self.ranks, self._mappings, strict=False):
            if mapping is not self._own and (text := mapping.failure()) is not None:
                return f"rank {rank} reported: {text}"
        return None

    def dead_ranks(self) -> list[int]:
        """Peers whose processes have ended."""
        pairs = zip(self.ranks, self._pidfds, strict=False)
        return [] if self._closed else [r for r, pidfd in pairs if pidfd is not None and is_dead(pidfd)]

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
            self._unmap()
            self._broken = self._broken or "it was closed"
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
            if pidfd is not None and not mapping.closed.reached(1) and mapping.failure() is None and not is_dead(pidfd)
        ]
