"""fsdp_symm: FSDP2's communication buffers in symmetric memory.

The public names load on first use, so that tools that need no torch (``fsdp-symm inspect``) start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_symm.collectives import SymmMemAllGather, SymmMemReduceScatter
    from fsdp_symm.fsdp import SymmMemHandle, set_symm_mem_for_comm
    from fsdp_symm.memory.arena import SymmMemArena
    from fsdp_symm.memory.mixin import SymmMemAllocMixin
    from fsdp_symm.zero_cta import cta_policy, zero_cta_mesh, zero_cta_options

__all__ = [
    "SymmMemAllGather",
    "SymmMemAllocMixin",
    "SymmMemArena",
    "SymmMemHandle",
    "SymmMemReduceScatter",
    "cta_policy",
    "set_symm_mem_for_comm",
    "zero_cta_mesh",
    "zero_cta_options",
]

__version__ = "0.1.0"

_HOMES = {
    "SymmMemAllGather": "fsdp_symm.collectives",
    "SymmMemAllocMixin": "fsdp_symm.memory.mixin",
    "SymmMemArena": "fsdp_symm.memory.arena",
    "SymmMemHandle": "fsdp_symm.fsdp",
    "SymmMemReduceScatter": "fsdp_symm.collectives",
    "cta_policy": "fsdp_symm.zero_cta",
    "set_symm_mem_for_comm": "fsdp_symm.fsdp",
    "zero_cta_mesh": "fsdp_symm.zero_cta",
    "zero_cta_options": "fsdp_symm.zero_cta",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
