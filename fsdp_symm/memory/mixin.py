"""SymmMemAllocMixin: FSDP2's ``allocate()`` answered from an arena's slots."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from fsdp_symm.compat import Role
from fsdp_symm.errors import SymmMemConfigError, problem
from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.memory.counters import Counters

ArenaChoice = SymmMemArena | Callable[[], SymmMemArena | None]


class SymmMemFallbackWarning(UserWarning):
    """A buffer or a call took FSDP2's plain path."""


class SymmMemAllocMixin:
    """Allocation half of a comm for FSDP2's ``set_custom_all_gather`` / ``set_custom_reduce_scatter``.

    Args:
        arena: where buffers come from. A callable is asked at every allocation, for param groups whose process group
            changes between calls; ``None`` from it means ordinary memory.
        module: the module's name for errors and traces.
        strict: raise instead of taking the plain path.
        counters: shared statistics; own ones by default.
    """

    role: Role

    def __init__(
        self,
        arena: ArenaChoice,
        *,
        module: str = "",
        strict: bool = False,
        counters: Counters | None = None,
    ) -> None:
        super().__init__()
        self._choose = (lambda: arena) if isinstance(arena, SymmMemArena) else arena
        self.module = module
        self.strict = strict
        self.counters = counters if counters is not None else Counters()
        self._current: SymmMemArena | None = None  # the arena that the last buffer came from
        self._last: tuple[int, Lease] | None = None  # where the last buffer lies, and its slot
        self._warned: set[str] = set()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of ``size`` and ``dtype`` from the arena's next slot, or from ordinary memory if unplanned.

        Whether a buffer is planned depends on its size and the process group alone, so all ranks decide alike.

        Raises:
            SymmMemConfigError: unplanned, under ``strict``.
            SlotShortageError, SymmMemTimeoutError, SymmMemPeerError: see :meth:`SymmMemArena.acquire`.
        """
        return self._allocate_from(self._choose(), size, dtype, device)

    def _allocate_from(
        self, arena: SymmMemArena | None, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        numel = math.prod(int(s) for s in size)
        nbytes = numel * dtype.itemsize
        self._current, self._last = None, None
        reason = "its process group has no arena" if arena is None else arena.why_not(self.role, nbytes)
        if arena is not None and arena.device != device:
            reason = f"a buffer on {device} was asked for, the arena is on {arena.device}"
        if arena is None or reason is not None:
            self.plain_path(str(reason))
            return torch.empty(tuple(size), dtype=dtype, device=device)
        if nbytes == 0:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        tensor, lease = arena.acquire_lease(self.role, nbytes, owner=self.module)
        self._current, self._last = arena, (tensor.data_ptr(), lease)
        return tensor.view(dtype).view(tuple(size))

    def lease_of(self, tensor: torch.Tensor) -> tuple[SymmMemArena, Lease] | None:
        """The arena and slot that hold ``tensor``, or ``None`` for ordinary memory."""
        arena = self._current
        if arena is not None and self._last is not None and tensor.data_ptr() == self._last[0]:
            return (arena, self._last[1]) if tensor.is_contiguous() else None
        lease = None if arena is None else arena.lease_of(tensor)
        return None if arena is None or lease is None else (arena, lease)

    def plain_path(self, reason: str) -> None:
        """Say once why the plain path is taken.

        Raises:
            SymmMemConfigError: under ``strict``.
        """
        text = problem(
            f"{self.role} of {self.module!r} takes the plain path",
            found=reason,
            expected="what was planned when set_symm_mem_for_comm was called",
            fix="call set_symm_mem_for_comm last: after parameters, groups, prefetch lists and buffers are set",
        )
        if self.strict:
            raise SymmMemConfigError(text)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, SymmMemFallbackWarning, stacklevel=3)
