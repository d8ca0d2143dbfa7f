"""Symmetric memory for CUDA ranks under NCCL: one allocation and one window an arena, registered once.

The memory comes from ``ncclMemAlloc`` itself and not from a MemPool over it: the caching allocator would round an arena
of a few MiB up to a 20 MiB segment and may move segments under ``expandable_segments``; the window covers exactly what
was planned.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_symm import compat_nccl
from fsdp_symm.errors import SymmMemMemoryError, SymmMemUnavailableError, problem
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.nccl_library import NcclLibrary, nccl_library, peer_addresses_known

# Memory of closed segments over which a tensor was still alive: never freed, since torch does not own it.
_kept: list[int] = []


class NcclSegment(DeviceSegment):
    """One window of a communicator. See :class:`DeviceSegment`."""

    engine = "nccl"

    def _open(self) -> tuple[int, tuple[int, ...] | None]:
        self._library, self._memory = self._allocate()
        self._communicator, self._window = self._register()
        if not peer_addresses_known():
            return self._memory, None
        peers = [
            self._memory if peer == self.rank else self._library.peer_pointer(self._window, peer)
            for peer in range(len(self.ranks))
        ]
        # Over several hosts some are out of reach: NCCL's collectives work there, our own copies do not.
        reached = [p for p in peers if p]
        return self._memory, tuple(reached) if len(reached) == len(peers) else None

    def _allocate(self) -> tuple[NcclLibrary, int]:
        library, pointer, error = None, 0, None
        try:
            library = nccl_library()
            pointer = library.mem_alloc(self.nbytes)
        except SymmMemMemoryError as failure:
            error = str(failure)
        self._tell(error)
        if library is None:
            raise SymmMemMemoryError(f"rank {self.ranks[self.rank]}: {error}")
        return library, pointer

    def _register(self) -> tuple[int, int]:
        # A communicator is made by its first collective unless device_id was given; windows need it to exist.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        torch.cuda.synchronize(self.device)
        communicator = compat_nccl.comm_pointer(self._group, self.device)
        window, error = None, None
        try:
            window = self._library.window_register(communicator, self._memory, self.nbytes)
        except SymmMemMemoryError as failure:
            error = str(failure)
        self._tell(error)
        if window is None:  # the same on every rank: NCCL decides it for the communicator
            self._library.mem_free(self._memory)
            raise SymmMemUnavailableError(
                problem(
                    f"NCCL gave no window to the group of ranks {list(self.ranks)}",
                    found="ncclCommWindowRegister succeeded with a NULL window",
                    expected="a communicator with symmetric support: CUDA P2P between all its ranks, NCCL_CUMEM_ENABLE "
                    "and NCCL_WIN_ENABLE not 0",
                    fix="run fsdp-symm doctor under torchrun; it names the first unmet condition",
                )
            )
        return communicator, window

    def _release(self, in_use: bool) -> None:
        self._library.window_deregister(self._communicator, self._window)
        if in_use:
            _kept.append(self._memory)
        else:
            self._library.mem_free(self._memory)
