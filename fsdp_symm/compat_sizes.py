"""Private torch behind the sizes of FSDP2's buffers; the companion of :mod:`fsdp_symm.compat`, under the same rule.

Asked before the first step, when FSDP2 itself has not worked them out yet. Read in 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fsdp_symm import compat
from fsdp_symm.compat import ParamGroup


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype, device="meta").element_size()


def _extension_input_nbytes(param: Any) -> list[int]:
    """Bytes of one rank's all-gather inputs after the tensor's ``fsdp_pre_all_gather``; calls the extension once."""
    with torch.no_grad():
        inputs = param.all_gather_inputs
    param._extensions_data.clear()
    return [t.numel() * t.element_size() for t in inputs]


def param_dtype(param: Any) -> torch.dtype:
    """The type of a native parameter while it is unsharded."""
    # Same rule as FSDPParam.init_dtype_attrs (2.13-2.15), which runs only at lazy init.
    original = param.sharded_param.dtype
    wanted = param.mp_policy.param_dtype
    return wanted if wanted is not None and original.is_floating_point else original


class UnsizedExtensionError(Exception):
    """An all-gather extension could not be asked for its sizes; carries the parameter and the cause."""


def param_input_nbytes(param: Any) -> list[int]:
    """Bytes of one rank's all-gather inputs of one native parameter: padded, after mixed precision and extensions.

    Raises:
        UnsizedExtensionError: an extension failed when it was asked, for example on the meta device.
    """
    if not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return [param.padded_sharded_param_size.numel() * _itemsize(param_dtype(param))]
    try:
        return _extension_input_nbytes(param)
    except Exception as error:  # a user's code: reported, never hidden
        raise UnsizedExtensionError(f"{type(param._sharded_local_tensor).__name__}: {error}") from error


def all_gather_bytes(group: ParamGroup) -> tuple[int, str]:
    """Bytes of the all-gather output over the shard group, and the dtype that FSDP2 will ask for.

    FSDP2 gathers mixed dtypes as ``uint8`` (2.13-2.15: ``_get_all_gather_input_metadatas``), so bytes are what counts.

    Raises:
        UnsizedExtensionError: see :func:`param_input_nbytes`.
    """
    total, dtypes = 0, set()
    for param in group.native.fsdp_params:
        total += sum(param_input_nbytes(param))
        extended = hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        dtypes.add("extension" if extended else str(param_dtype(param)).removeprefix("torch."))
    return total * compat.shard_group(group).size(), dtypes.pop() if len(dtypes) == 1 else "uint8"


def reduce_scatter_bytes(group: ParamGroup) -> tuple[int, str]:
    """Bytes of the reduce-scatter input in the type of the sum, and that type; 0 bytes when nothing is trainable.

    Dim-0 shards are padded to a multiple of W (2.13-2.15: ``_get_dim0_padded_size``); other dims shard evenly.
    """
    world_size = compat.reduce_scatter_group(group).size()
    total, name = 0, "none"
    for param in group.native.fsdp_params:
        if not param.sharded_param.requires_grad:
            continue
        dtype = param.mp_policy.reduce_dtype or param_dtype(param)
        size = param._orig_size
        if param.fsdp_placement.dim == 0:
            numel = math.ceil(size[0] / world_size) * world_size * math.prod(size[1:])
        else:
            numel = math.prod(size)
        total += numel * _itemsize(dtype)
        name = str(dtype).removeprefix("torch.")
    return total, name
