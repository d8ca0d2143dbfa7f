"""Tensors in symmetric memory for tokens: peers fetch rows straight from them, without a copy into a slot first."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.experts.agreement import agree
from fsdp_symm.experts.config import refuse
from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.plan import SLOT_ALIGNMENT_BYTES, Ring
from fsdp_symm.wire import wire_of

_arenas: list[SymmMemArena] = []


def backend_of(group: dist.ProcessGroup) -> str:
    """Who provides symmetric memory for a group: ``"nccl"`` where its tensors are on GPUs, else ``"host"``."""
    return "nccl" if "nccl" in dist.get_backend(group) else "host"


def align(nbytes: int) -> int:
    """Bytes rounded up to whole slots."""
    return max(-(-nbytes // SLOT_ALIGNMENT_BYTES), 1) * SLOT_ALIGNMENT_BYTES


def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    timeout_s: float = 60.0,
) -> torch.Tensor:
    """A tensor in symmetric memory. Collective over the group; all ranks pass the same shape and dtype.

    The memory is held until :func:`fsdp_symm.experts.ep_finalize`. Given to ``ep_dispatch`` as ``tokens``, it (or its
    first rows) is read by the peers in place, if it has room for ``max_tokens_per_rank`` rows and rows are not packed.

    Raises:
        SymmMemConfigError: a negative size; another shape or dtype on some rank (raised on all).
        SymmMemMemoryError: the memory could not be had on some rank (raised on all).
    """
    if min(shape, default=0) < 0:
        refuse("symm_mem_alloc: shape", found=list(shape), expected="sizes >= 0", fix="pass the rows and the width")
    mine = {"shape": str(list(shape)), "dtype": str(dtype)}
    agree(ep_group, "symm_mem_alloc", mine, timeout_s=timeout_s)
    nbytes = prod(shape) * dtype.itemsize
    ring = Ring("dispatch", 1, align(nbytes))
    arena = SymmMemArena(ep_group, [ring], backend=backend_of(ep_group), device=device, timeout_s=timeout_s)
    _arenas.append(arena)
    return arena.acquire("dispatch", nbytes, owner="symm_mem_alloc").view(dtype).view(list(shape))


def find(tensor: torch.Tensor) -> tuple[SymmMemArena, Lease] | None:
    """The arena that a tensor of :func:`symm_mem_alloc` starts in, or ``None``."""
    for arena in _arenas:
        if not arena.closed and arena.device.type == tensor.device.type:
            lease = arena.lease_of(tensor)
            if lease is not None:
                return arena, lease
    return None


def is_symm_backed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous and starts where one of :func:`symm_mem_alloc` does."""
    return find(tensor) is not None


def close_all() -> None:
    """Give all of it back, in the order of allocation. Collective over the groups."""
    while _arenas:
        arena = _arenas.pop(0)
        if compat.group_is_alive(arena.group):
            wire_of(arena).close()
            arena.close()
