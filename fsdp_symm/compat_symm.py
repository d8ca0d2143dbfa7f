"""Private attributes of torch's own symmetric memory (``torch.distributed._symmetric_memory``); the companion of
:mod:`fsdp_symm.compat`, under the same rule. Read in torch 2.13.0 (CPU build) and 2.14.1 (CUDA build)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as _symm

from fsdp_symm.errors import SymmMemUnavailableError, problem


def symm_backend(device: torch.device) -> str | None:
    """The process-wide symmetric-memory backend of torch (``get_backend``, 2.13-2.14).

    CUDA builds answer ``"CUDA"`` even when nobody chose; builds without a backend for the device answer ``None``.
    """
    try:
        return _symm.get_backend(device)
    except RuntimeError:  # 2.13 raises for devices it has no allocator for
        return None


def choose_symm_backend(name: Literal["CUDA", "NCCL", "NVSHMEM"], device: torch.device) -> None:
    """Make ``name`` the process-wide backend, unless it is already.

    ``set_backend`` is not called without need: for ``"CUDA"`` it raises in 2.14.1 although ``get_backend`` answers
    ``"CUDA"``, and after the first allocation it always raises.

    Raises:
        SymmMemUnavailableError: another backend is in use and cannot be changed any more.
    """
    current = symm_backend(device)
    if current == name:
        return
    try:
        _symm.set_backend(name)
    except RuntimeError as error:
        raise SymmMemUnavailableError(
            problem(
                f"torch's symmetric memory: the backend {name!r} could not be chosen",
                found=f"{current!r} is in use in this process ({str(error).splitlines()[0]})",
                expected=f"{name!r}, or a process in which no symmetric memory was allocated yet",
                fix="backend='nccl' of this package works beside any choice; or unset TORCH_SYMMMEM and call the "
                "switch before anything else allocates symmetric memory",
            )
        ) from error


def symm_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """``uint8 [nbytes]`` that can be shared (``symm_mem.empty``)."""
    return _symm.empty(nbytes, dtype=torch.uint8, device=device)


def symm_rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Share a tensor of :func:`symm_empty` with the group. Collective; waits as long as the group's store does."""
    return _symm.rendezvous(tensor, group)


def peer_addresses(handle: Any, nbytes: int, world_size: int) -> list[int]:
    """Where every rank's tensor lies in this process (``SymmetricMemory.get_buffer``)."""
    return [handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in range(world_size)]
