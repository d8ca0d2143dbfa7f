"""Which GPU a rank uses, and NCCL communicators with the zero-CTA policy. Nothing here runs on CPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_symm.titan.overlay import ConfigError

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def device_index(local_rank: int, local_ranks: int, gpus: int, *, share: bool, masked: bool) -> int:
    """The index of the GPU that a rank uses.

    Args:
        local_rank: this rank's number on its host.
        local_ranks: how many ranks the host runs.
        gpus: how many GPUs this process sees.
        share: whether several ranks may use one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1).
        masked: whether a launcher shows this process one GPU of its own (CUDA_VISIBLE_DEVICES names exactly one).

    Raises:
        ConfigError: more ranks than GPUs and no permission to share.
    """
    if local_ranks <= gpus:
        return local_rank
    if share:
        return local_rank % gpus
    if masked and gpus == 1:
        return 0
    raise ConfigError(
        f"devices: found {local_ranks} ranks for {gpus} GPU(s) on this host; expected at most one rank a GPU;"
        f" fix: torchrun --nproc-per-node {gpus}, or set {SHARE_VARIABLE}=1 to share GPUs (NCCL 2.30 or newer)"
    )


def place_rank(environment: MutableMapping[str, str], gpus: int) -> None:
    """Rewrite LOCAL_RANK where ranks share GPUs, before torchtitan reads it as the device index.

    Raises:
        ConfigError: as ``device_index``.
    """
    local_rank = int(environment["LOCAL_RANK"])
    index = device_index(
        local_rank,
        int(environment.get("LOCAL_WORLD_SIZE", "1")),
        gpus,
        share=environment.get(SHARE_VARIABLE) == "1",
        masked=len(environment.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
        and bool(environment.get("CUDA_VISIBLE_DEVICES")),
    )
    environment["LOCAL_RANK"] = str(index)


def place_this_rank() -> None:
    """``place_rank`` for this process; does nothing without CUDA."""
    if torch.cuda.is_available():
        place_rank(os.environ, torch.cuda.device_count())


def init_zero_cta_process_group(device: torch.device, timeout_s: float) -> None:
    """Create the default NCCL group so that its collectives use no SMs where NCCL can (copy engines).

    The policy belongs to a communicator. ``device_id`` makes torch create sub-groups (HSDP, expert parallel) by
    splitting this one, and a split inherits the options. torchtitan's own initialisation finds the group and skips
    its own, so what it would have set first is set here.
    """
    # torchtitan 0.3.0, distributed/utils.py: recomputation in the backward pass needs the DeviceMesh of this thread.
    torch.autograd.set_multithreading_enabled(False)
    timeout = timedelta(seconds=timeout_s)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()  # the stubs of torch 2.13 do not know the policy
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    options._timeout = timeout  # no public setter in torch 2.13 and 2.14
    dist.init_process_group("nccl", pg_options=options, device_id=device, timeout=timeout)
