"""Symmetric memory for CUDA ranks without NCCL: torch's own "CUDA" backend, peer memory mapped through the driver.

It needs a process group for its setup only, of any backend; our own wire moves all bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_symm import compat_symm
from fsdp_symm.errors import SymmMemMemoryError, SymmMemUnavailableError
from fsdp_symm.memory.device import DeviceSegment

# Tensors of closed segments over which another one was still alive: torch would free the memory under it.
_kept: list[Any] = []


class CudaSegment(DeviceSegment):
    """One shared tensor. See :class:`DeviceSegment`.

    ``torch.distributed._symmetric_memory`` has one backend a process; another user's choice is respected, and is an
    error here if it is not ``"CUDA"`` and cannot be changed.
    """

    engine = "cuda"

    def _open(self) -> tuple[int, tuple[int, ...] | None]:
        tensor, error = None, None
        try:
            compat_symm.choose_symm_backend("CUDA", self.device)
            tensor = compat_symm.symm_empty(self.nbytes, self.device)
        except SymmMemUnavailableError as failure:
            error = str(failure)
        except RuntimeError as failure:  # torch.OutOfMemoryError is one
            error = f"{self.nbytes} bytes of shared GPU memory could not be had: {str(failure).splitlines()[0]}"
        self._tell(error)
        if tensor is None:
            raise SymmMemMemoryError(f"rank {self.ranks[self.rank]}: {error}")
        self._tensor: torch.Tensor | None = tensor
        self._handle: Any = compat_symm.symm_rendezvous(tensor, self._group)
        peers = compat_symm.peer_addresses(self._handle, self.nbytes, len(self.ranks))
        return tensor.data_ptr(), tuple(peers)

    def _release(self, in_use: bool) -> None:
        if in_use:
            _kept.append((self._tensor, self._handle))
        self._tensor = self._handle = None
