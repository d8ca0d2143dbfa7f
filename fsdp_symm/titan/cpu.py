"""What torchtitan 0.3.0 needs on a machine without a GPU, and on torch 2.13. One function per reason.

``prepare`` must run before anything else imports torchtitan: its modules bind the device's name and module by value.
Every workaround was read in, and run with, torchtitan 0.3.0 on torch 2.13.0 (CPU); where a newer torch needs none,
none is applied.
"""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend
from torch.torch_version import TorchVersion

from fsdp_symm import compat
from fsdp_symm.titan.overlay import FieldError


def on_cpu() -> bool:
    """Whether this process trains without an accelerator."""
    return not torch.accelerator.is_available()


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the calls that torchtitan makes on ``torch.cuda``; memory figures are this process's RSS."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def set_device(device: object) -> None:
        """There is one CPU device: nothing to choose."""

    @staticmethod
    def current_device() -> int:
        """Index 0; ``torch.cpu.current_device`` answers "cpu", which ``barrier(device_ids=...)`` refuses."""
        return 0

    @staticmethod
    def device_count() -> int:
        """One device, shared by all local ranks: torchtitan then uses index 0 for each of them."""
        return 1

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """A name for the log."""
        return "CPU"

    @staticmethod
    def get_device_properties(device: object = None) -> types.SimpleNamespace:
        """``total_memory`` in bytes: the machine's physical memory."""
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        """The peak resident set size of this process, under the two names that torchtitan logs."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak_bytes,
            "reserved_bytes.all.peak": peak_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The kernel keeps the peak; it cannot be reset."""

    @staticmethod
    def empty_cache() -> None:
        """No caching allocator on CPU."""


def prepare() -> None:
    """Make torchtitan importable and runnable here. Idempotent; does nothing on a GPU with torch 2.14 or newer."""
    _provide_set_timeout()
    if on_cpu():
        _use_cpu_device_module()


def _provide_set_timeout() -> None:
    # torchtitan 0.3.0 calls torch.distributed.set_timeout after the first step; torch has it since 2.14. The private
    # function was read in torch 2.13.0 (distributed_c10d.py) and has the same arguments.
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = compat.set_pg_timeout  # type: ignore[attr-defined]


def _use_cpu_device_module() -> None:
    # torchtitan.tools.utils says "cuda" where torch finds no accelerator, and other modules copy the two names when
    # they are imported. There is no setting for it in 0.3.0.
    import torchtitan.tools.utils as titan_utils

    titan_utils.device_type, titan_utils.device_module = "cpu", CpuDeviceModule("fsdp_symm_cpu_device")
    # It would take an A100's figure for an unknown device: an MFU of 0 is less wrong than one of another machine.
    titan_utils.get_peak_flops = lambda device_name: math.inf


def adapt_defaults(config: Any) -> Any:
    """Replace the registry's defaults that cannot run here; what a user then writes in TOML still wins.

    Args:
        config: a ``Trainer.Config``.

    Returns:
        A config with ``spmd_backend="partial_dtensor"`` where "spmd_types" cannot run, and without CUDA graphs and
        torchtitan's profiler on CPU.
    """
    parallelism, training, profiler = config.parallelism, config.training, config.profiler
    # fully_shard of torch 2.13 refuses the mixed placements of "spmd_types"; on gloo its list all_to_all fails as well
    # (seen on torch 2.14.1).
    if on_cpu() or _before_2_14():
        parallelism = dataclasses.replace(parallelism, spmd_backend="partial_dtensor")
    if on_cpu():
        training = dataclasses.replace(training, disable_cuda_graphs=True)
        profiler = dataclasses.replace(profiler, enable_profiling=False)  # the registry turns it on for real sizes
    return dataclasses.replace(config, parallelism=parallelism, training=training, profiler=profiler)


def _before_2_14() -> bool:
    return TorchVersion(torch.__version__) < "2.14"


def check(config: Any) -> None:
    """Refuse settings that are known not to run on CPU, or on this torch.

    Raises:
        FieldError: with the dotted key and what to write instead.
    """
    if config.parallelism.pipeline_parallel_degree > 1 and _before_2_14():
        # torchtitan 0.3.0 hands ready-made microbatches to the schedule's step; torch 2.13 takes the whole batch.
        degree = config.parallelism.pipeline_parallel_degree
        raise FieldError("parallelism.pipeline_parallel_degree", f"found {degree}; allowed before torch 2.14: 1")
    if not on_cpu():
        return
    if not config.training.disable_cuda_graphs:
        raise FieldError("training.disable_cuda_graphs", "found false; allowed on CPU: true")
    if config.training.enable_cpu_offload:
        # torchtitan asks for the backend "cpu:gloo,cpu:gloo", which torch refuses.
        raise FieldError("training.enable_cpu_offload", "found true; allowed on CPU: false")
    if config.profiler.enable_profiling:
        # torchtitan's profiler passes None as the device's activity.
        raise FieldError("profiler.enable_profiling", "found true; allowed on CPU: false (use [trace] enable = true)")


def force_sum_reduction(model: torch.nn.Module) -> None:
    """Let FSDP2 divide after a plain SUM: torchtitan sets a divide factor, which becomes PREMUL_SUM; gloo has none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def use_sdpa(model_config: Any) -> int:
    """Replace every FlexAttention in a model's config tree by causal SDPA (no document masks).

    FlexAttention has no backward on CPU; and torchtitan 0.3.0 refuses "sdpa" as a model's attention backend, so the
    tree is the only place. Also takes cuDNN out of torchtitan's list of SDPA kernels: it failed on torch 2.14.1. The
    memory-efficient kernel comes in for heads whose values are narrower than their queries (DeepSeek's): flash
    attention refuses those, and the math kernel holds a whole attention matrix, 4 GiB in fp32 for 16 heads and 8192
    tokens.

    Returns:
        How many attention configs were replaced.
    """
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    ScaledDotProductAttention.sdpa_backends = kernels
    found = list(model_config.traverse(FlexAttention.Config))
    for _, _, parent, attribute in found:
        replacement = ScaledDotProductAttention.Config()
        if isinstance(attribute, int):
            parent[attribute] = replacement
        else:
            setattr(parent, attribute, replacement)
    return len(found)
