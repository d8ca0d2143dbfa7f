"""Small exchanges between the ranks of a group over the CPU store, always with a timeout that names who is missing.

Used only at the switch and while memory is set up, never on the training path.

Every rank counts its exchanges with a set of ranks in the store itself, so a store that outlives a process group
(torchrun's agent keeps one) never shows an old answer, and a new store starts at zero for everybody. A rank that gives
up withdraws its payload and its count: the next attempt meets again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemPeerError, SymmMemTimeoutError, problem


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
            seats.append(_Seat.take(store, group, payload, what))
        return _collect(store, seats, what, timeout_s, fix)
    except BaseException:  # Ctrl-C too: the next attempt must meet the peers in the same round
        for seat in seats:
            with contextlib.suppress(RuntimeError):  # the store may be what failed
                seat.leave(store)
        raise


def _collect(store: compat.Store, seats: list[_Seat], what: str, timeout_s: float, fix: str) -> list[list[bytes]]:
    deadline = time.monotonic() + timeout_s
    answers = [seat.collect(store, deadline) for seat in seats]
    for seat, found in zip(seats, answers, strict=True):
        missing = [r for r in seat.ranks if r not in found]
        if missing:
            raise SymmMemTimeoutError(
                problem(
                    f"{what}: ranks {missing} of group {list(seat.ranks)} did not arrive within {timeout_s:g} s",
                    found=f"ranks {sorted(found)}",
                    expected=f"ranks {list(seat.ranks)}",
                    fix=fix,
                )
            )
    return [[found[r] for r in seat.ranks] for seat, found in zip(seats, answers, strict=True)]


@dataclass(frozen=True)
class _Seat:
    """This rank's place in one exchange."""

    table: str  # what meets: a set of ranks, and a step, so that steps never mix after one rank gave up
    ranks: tuple[int, ...]
    rank: int
    round: int

    @staticmethod
    def take(store: compat.Store, group: dist.ProcessGroup, payload: bytes, what: str) -> _Seat:
        ranks, rank = compat.group_ranks(group), dist.get_rank()
        table = f"fsdp_symm/{'-'.join(map(str, ranks))}/{hashlib.sha256(what.encode()).hexdigest()[:8]}"
        seat = _Seat(table, ranks, rank, store.add(f"{table}/rounds/{rank}", 1))
        store.set(seat.key(rank), payload)  # type: ignore[arg-type]  # the stub says str; bytes work
        return seat

    def key(self, rank: int) -> str:
        return f"{self.table}/{self.round}/{rank}"

    def collect(self, store: compat.Store, deadline: float) -> dict[int, bytes]:
        """Payloads of the ranks that came before the deadline."""
        found: dict[int, bytes] = {}
        for rank in self.ranks:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([self.key(rank)], timedelta(seconds=left_s))
                found[rank] = store.get(self.key(rank))
            except RuntimeError as error:  # FileStore raises no finer class for a timeout
                if time.monotonic() < deadline:
                    raise SymmMemPeerError(
                        problem(
                            f"the store of the process group failed while ranks {list(self.ranks)} met",
                            found=str(error).splitlines()[0],
                            expected="a store that answers",
                            fix="look for the first error of the rank or agent that hosts it",
                        )
                    ) from error
        return found

    def leave(self, store: compat.Store) -> None:
        store.delete_key(self.key(self.rank))
        store.add(f"{self.table}/rounds/{self.rank}", -1)
