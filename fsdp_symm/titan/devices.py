"""Which GPU a rank uses, which backend serves it, and NCCL communicators with the zero-CTA policy."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch

from fsdp_symm.errors import SymmMemConfigError
from fsdp_symm.titan.overlay import ConfigError, FieldError, one_line
from fsdp_symm.zero_cta import POLICY_VARIABLE, parse_policy, zero_cta_options

logger = logging.getLogger(__name__)

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_ZERO = "2"  # NCCL_CTA_POLICY_ZERO; NCCL 2.28 reads no names


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
        f" fix: torchrun --nproc-per-node {gpus}, or set {SHARE_VARIABLE}=1 to share GPUs (NCCL 2.30.7 or newer)"
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


def check_backend(backend: str, *, on_cpu: bool) -> None:
    """Refuse a backend that does not serve this machine's tensors, before anything is built.

    Raises:
        FieldError: with the dotted key and what is allowed here.
    """
    serving, machine = (("host",), "CPU") if on_cpu else (("nccl", "cuda"), "a GPU")
    if backend not in ("auto", *serving):
        allowed = ", ".join(map(repr, ("auto", *serving)))
        raise FieldError("fsdp_symm.backend", f"found {backend!r}; allowed on {machine}: {allowed}")


def request_zero_cta(environment: MutableMapping[str, str]) -> None:
    """Ask NCCL for the zero-CTA policy on every communicator of this process; call before the first one is made.

    By the environment, which beats each communicator's own configuration: torchtitan makes its default group and its
    mesh without a way to pass options. It gives no ``device_id`` either, so torch makes every mesh group anew instead
    of splitting the default one, and nothing would be inherited (torch 2.14.1, device_mesh.py
    ``_init_one_process_group``: ``new_group`` without ``bound_device_id``). A value set by the user stays.

    Raises:
        ConfigError: this torch cannot ask for the policy.
    """
    try:
        zero_cta_options()  # made only to learn whether torch and its NCCL know the policy
    except SymmMemConfigError as error:
        raise ConfigError(f"fsdp_symm.zero_cta: {one_line(error)}") from None
    found = environment.setdefault(POLICY_VARIABLE, _ZERO)
    if parse_policy(found) != "zero" and environment.get("RANK", "0") == "0":
        logger.warning("fsdp_symm.zero_cta = true has no effect: %s=%s is set and beats it", POLICY_VARIABLE, found)
