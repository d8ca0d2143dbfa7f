"""Expert parallelism: tokens travel to the ranks that hold their experts, and back."""

from fsdp_symm.experts.all_reduce import AllReduceEP
from fsdp_symm.experts.all_to_all import AllToAllEP
from fsdp_symm.experts.api import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
)
from fsdp_symm.experts.auto import AutoEP
from fsdp_symm.experts.config import EpConfig
from fsdp_symm.experts.copy_engine import CopyEngineEP, CopyEngineExactEP
from fsdp_symm.experts.module import ExpertParallel, GroupedExperts, scale_expert_gradients
from fsdp_symm.experts.registry import EPImplementation, EPImplementationInterface
from fsdp_symm.experts.symmetric import is_symm_backed, symm_mem_alloc

__all__ = [
    "AllReduceEP",
    "AllToAllEP",
    "AutoEP",
    "CopyEngineEP",
    "CopyEngineExactEP",
    "EPImplementation",
    "EPImplementationInterface",
    "EpBuffer",
    "EpConfig",
    "ExpertParallel",
    "GroupedExperts",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "scale_expert_gradients",
    "symm_mem_alloc",
]

EPImplementationInterface.register("auto", AutoEP)
EPImplementationInterface.register("all_to_all", AllToAllEP)
EPImplementationInterface.register("all_reduce", AllReduceEP)
EPImplementationInterface.register("copy_engine", CopyEngineEP)
EPImplementationInterface.register("copy_engine_exact", CopyEngineExactEP)
