"""Small exchanges between the ranks of a group over the CPU store, always with a timeout that names who is missing.

Used only at the switch and while memory is set up, never on the training path.

Every rank counts its exchanges with a set of ranks in the store itself, so a store that outlives a process group
(torchrun's agent keeps one) never shows an old answer, and a new store starts at zero for everybody. A rank that gives
up takes its count back and leaves a reason in place of its payload: the next attempt meets again, and peers that wait
until their time is up can say why it did not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemPeerError, SymmMemTimeoutError, problem

_HERE, _GONE = b"+", b"-"  # how what a rank has written begins
_LOOK_S = 0.05  # how often a rank looks whether a peer that gave up has come back


def exchange(group: dist.ProcessGroup, payload: bytes, *, what: str, timeout_s: float, fix: str) -> list[bytes]:
    """Give every rank of ``group`` everybody's payload, in group order. Collective over the group.

    Args:
        group: the ranks that take part.
        payload: this rank's bytes; a few kilobytes, since a store is no data path.
        what: the step, for the error text.
        timeout_s: seconds to wait for all ranks together.
        fix: the line that tells a user what to do when a rank does not come.

    Raises:
        SymmMemTimeoutError: names the ranks that did not arrive.
        SymmMemPeerError: the store itself is gone.
    """
    return exchange_many([(group, payload)], what=what, timeout_s=timeout_s, fix=fix)[0]


def exchange_many(
    items: list[tuple[dist.ProcessGroup, bytes]], *, what: str, timeout_s: float, fix: str
) -> list[list[bytes]]:
    """:func:`exchange` over several groups at once: all payloads are published before any is awaited, so that the
    order in which different ranks list their groups cannot deadlock."""
    store = compat.default_store()
    seats: list[_Seat] = []
    try:
        for group, payload in items:
            seat = _Seat.next(store, group, what)
            seats.append(seat)  # before anything is written: a signal may come at any moment
            seat.take(store, payload)
        return _collect(store, seats, what, timeout_s, fix)
    except BaseException as error:  # Ctrl-C too: the next attempt must meet the peers in the same round
        for seat in reversed(seats):  # several may be of one group
            with contextlib.suppress(RuntimeError):  # the store may be what failed
                seat.leave(store, f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": "))
        raise


def _collect(store: compat.Store, seats: list[_Seat], what: str, timeout_s: float, fix: str) -> list[list[bytes]]:
    deadline = time.monotonic() + timeout_s
    answers = [seat.collect(store, deadline) for seat in seats]
    for seat, (found, gone) in zip(seats, answers, strict=True):
        missing = [r for r in seat.ranks if r not in found]
        if missing:
            reasons = "".join(f"; rank {rank} gave up ({reason})" for rank, reason in gone.items())
            raise SymmMemTimeoutError(
                problem(
                    f"{what}: ranks {missing} of group {list(seat.ranks)} did not arrive within {timeout_s:g} s",
                    found=f"ranks {sorted(found)}{reasons}",
                    expected=f"ranks {list(seat.ranks)}",
                    fix=fix,
                )
            )
    return [[found[r] for r in seat.ranks] for seat, (found, _) in zip(seats, answers, strict=True)]


@dataclass(frozen=True)
class _Seat:
    """This rank's place in one exchange. Legend: a key holds ``_HERE`` and a payload, or ``_GONE`` and a reason."""

    table: str  # what meets: a set of ranks, and a step, so that steps never mix after one rank gave up
    ranks: tuple[int, ...]
    rank: int
    round: int

    @staticmethod
    def next(store: compat.Store, group: dist.ProcessGroup, what: str) -> _Seat:
        """The place that comes next; writes nothing."""
        ranks, rank = compat.group_ranks(group), dist.get_rank()
        table = f"fsdp_symm/{'-'.join(map(str, ranks))}/{hashlib.sha256(what.encode()).hexdigest()[:8]}"
        return _Seat(table, ranks, rank, store.add(f"{table}/rounds/{rank}", 0) + 1)

    def key(self, rank: int) -> str:
        return f"{self.table}/{self.round}/{rank}"

    def take(self, store: compat.Store, payload: bytes) -> None:
        self._write(store, _HERE + payload, self.round)

    def leave(self, store: compat.Store, reason: str) -> None:
        """Undo :meth:`take`, however far it came."""
        self._write(store, _GONE + reason.encode(), self.round - 1)

    def _write(self, store: compat.Store, data: bytes, rounds: int) -> None:
        store.set(self.key(self.rank), data)  # type: ignore[arg-type]  # the stub says str; bytes work
        store.set(f"{self.table}/rounds/{self.rank}", str(rounds))  # nobody else writes it

    def collect(self, store: compat.Store, deadline: float) -> tuple[dict[int, bytes], dict[int, str]]:
        """Payloads of the ranks that came before the deadline, and the reasons of those that gave up."""
        found: dict[int, bytes] = {}
        gone: dict[int, str] = {}
        try:
            for rank in self.ranks:
                data = self._read(store, rank, deadline)
                if data is not None and data.startswith(_HERE):
                    found[rank] = data[1:]
                elif data is not None:
                    gone[rank] = data[1:].decode(errors="replace")
        except RuntimeError as error:
            raise SymmMemPeerError(
                problem(
                    f"the store of the process group failed while ranks {list(self.ranks)} met",
                    found=str(error).splitlines()[0],
                    expected="a store that answers",
                    fix="look for the first error of the rank or agent that hosts it",
                )
            ) from error
        return found, gone

    def _read(self, store: compat.Store, rank: int, deadline: float) -> bytes | None:
        """What a rank has written before the deadline, ``None`` if nothing: its payload, else why it gave up."""
        key, data = self.key(rank), None
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                store.wait([key], timedelta(seconds=max(left_s, 0.001)))
            except RuntimeError:  # FileStore raises no finer class for a timeout
                if time.monotonic() < deadline:
                    raise
                break
            data = store.get(key)
            if data.startswith(_HERE):
                return data
            # It may come back with a payload; a store tells nobody when a value changes.
            threading.Event().wait(min(left_s, _LOOK_S))
        return store.get(key) if data is not None or store.check([key]) else None
