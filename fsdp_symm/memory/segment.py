"""What an arena needs from the memory below it; each provider is one class with these methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fsdp_symm.plan import Lane


class SlotUse(Protocol):
    """What a segment may know about the last use of a slot (see :class:`fsdp_symm.memory.arena.Lease`)."""

    @property
    def role(self) -> Lane: ...
    @property
    def index(self) -> int: ...
    @property
    def epoch(self) -> int | None: ...


class Segment(Protocol):
    """The symmetric memory of one arena.

    Attributes:
        engine: who moves the bytes: ``"host"``, ``"nccl"``.
        rank: this rank's number in the group.
        ranks: global ranks of the group.
        nbytes: bytes that this rank holds, for slots and bookkeeping.
        wait_s: seconds this rank's host has waited for its peers.
        timeout_s: seconds that a wait for a peer may last, or a call of our own wire on a GPU.
    """

    engine: str
    rank: int
    ranks: tuple[int, ...]
    nbytes: int
    wait_s: float
    timeout_s: float

    def lease(self, offset: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], object | None]]:
        """A fresh ``uint8 [nbytes]`` over the slots' bytes, and a call that is ``None`` once its storage is gone."""
        ...

    def address(self, offset: int) -> int:
        """Where this rank's slots' byte ``offset`` lies in this process."""
        ...

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor starts among the slots' bytes, or ``None`` if it lies elsewhere."""
        ...

    def acquired(self, index: int) -> None:
        """A slot was handed out, on the caller's stream."""
        ...

    def before_reuse(self, last: SlotUse, call: str) -> None:
        """Order the next use of a slot after everything that its last use left behind, here and on the peers."""
        ...

    def check_health(self, call: str) -> None:
        """Raise if this arena, or a peer as far as is known, has failed."""
        ...

    def fail(self, text: str) -> None:
        """Remember a failure and tell the peers as far as they can be reached."""
        ...

    def close(self) -> None:
        """Give the memory back. Collective; safe to call twice."""
        ...
