"""What moves rows between the ranks of an expert group, seen from above; and who sends how many rows to whom.

Legend as in :mod:`fsdp_symm.experts.routing`; W columns of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows that travel, as numbers that the host knows. Compared by identity: it is part of every call's key.

    Attributes:
        sizes: rows from each rank (outer) to each rank (inner).
        rank: this rank's number in the group.
        by_token: a sender holds one copy of its tokens that serves all receivers, instead of a block for each.
    """

    sizes: tuple[tuple[int, ...], ...]
    rank: int
    by_token: bool = False

    @staticmethod
    @lru_cache(maxsize=256)
    def padded(num_ranks: int, rank: int, rows: int, *, by_token: bool) -> Layout:
        """``rows`` from everybody to everybody; the same object for the same numbers."""
        return Layout(((rows,) * num_ranks,) * num_ranks, rank, by_token)

    @property
    def num_ranks(self) -> int:
        return len(self.sizes)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Rows that this rank sends to each."""
        return self.sizes[self.rank]

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Rows that this rank gets from each."""
        return tuple(row[self.rank] for row in self.sizes)

    def first_sent(self, sender: int, receiver: int) -> int:
        """Row at which the block for ``receiver`` starts in the sender's rank-major buffer."""
        return sum(self.sizes[sender][:receiver])

    def first_received(self, sender: int, receiver: int) -> int:
        """Row at which the block of ``sender`` starts in the receiver's rank-major buffer."""
        return sum(self.sizes[s][receiver] for s in range(sender))


class Prepared(NamedTuple):
    """What the ranks tell each other before tokens travel.

    Attributes:
        home: int64 ``[T, R]``, see :class:`fsdp_symm.experts.routing.Route`.
        table: int64 ``[R, R + E + 1]``, every rank's ``facts``, see the same.
        ids: int32 ``[N, K]``, global expert ids of the rows that this rank receives.
    """

    home: torch.Tensor
    table: torch.Tensor
    ids: torch.Tensor


class PartSpec(NamedTuple):
    """One kind of data in a row: W elements of a type, on a device."""

    width: int
    dtype: torch.dtype
    device: torch.device


class Traffic(NamedTuple):
    """What an exchange holds and has moved on this rank, in numbers.

    Attributes:
        engine: who moves the rows: that of the symmetric memory (``"host"``, ``"nccl"``), or the transport's name.
        arena_bytes: symmetric bytes held now.
        bytes_moved: bytes fetched or received from peers so far.
        wait_s: seconds waited for peers so far, where that is known.
    """

    engine: str
    arena_bytes: int = 0
    bytes_moved: int = 0
    wait_s: float = 0.0


class Exchange(Protocol):
    """Moves rows there and back. All methods are collective over the group."""

    exact: bool
    """Whether the host knows every size, and no padding travels."""

    def prepare(self, ids: torch.Tensor) -> Prepared:
        """Send every rank the expert ids ``[T, K]`` of the rows that it will get."""
        ...

    def layout(self, num_rows: int, table: torch.Tensor) -> Layout:
        """The layout that :meth:`prepare` chose, from N and the table."""
        ...

    def to_experts(self, parts: Sequence[torch.Tensor], home: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """``[T, W]`` each -> ``[N, W]`` each; rows that hold no token are undefined."""
        ...

    def to_homes(
        self, specs: Sequence[PartSpec], write: Callable[[list[torch.Tensor]], None], layout: Layout
    ) -> list[torch.Tensor]:
        """Let ``write`` fill this rank's answers ``[N, W]``, one tensor a spec, and give back what all ranks answered
        to this rank's rows, in its own rank-major order."""
        ...

    def resize(self, max_tokens: int) -> None:
        """Make room for ``max_tokens`` rows between any two ranks."""
        ...

    def room(self) -> int | None:
        """Rows that fit between two ranks, ``None``: any number."""
        ...

    def traffic(self) -> Traffic:
        """Numbers of this moment; local, cheap."""
        ...

    def fail(self, text: str) -> None:
        """Tell the peers, as far as possible, that this rank will not come."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...
