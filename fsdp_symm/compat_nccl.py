"""Private attributes of torch's NCCL process group; the companion of :mod:`fsdp_symm.compat`, under the same rule.

Nothing here imports ``ProcessGroupNCCL`` at load time, so the file loads on CPU builds. Bindings were read in the
builds of torch 2.13.0 (CPU: the class is absent) and 2.14.1 (CUDA).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemConfigError, problem

# ncclConfig_t's "not set" (nccl.h, NCCL_CONFIG_UNDEF_INT): what a fresh Options().config.cta_policy reads as.
UNDEFINED = -(2**31)


def nccl_class() -> Any | None:
    """``torch.distributed.ProcessGroupNCCL``, or ``None`` in a build without NCCL (2.13-2.14: absent there)."""
    return getattr(dist, "ProcessGroupNCCL", None)


def zero_policy() -> int | None:
    """``NCCL_CTA_POLICY_ZERO`` of this build, ``None`` where torch was built without NCCL or with NCCL < 2.28.

    2.14.1: class attribute ``ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO``, defined under ``NCCL_HAS_CTA_POLICY``.
    """
    return getattr(nccl_class(), "NCCL_CTA_POLICY_ZERO", None)


def nccl_version() -> tuple[int, int, int]:
    """The NCCL that torch was built with; :func:`nccl_runtime_version` is the one that is loaded.

    Raises:
        SymmMemConfigError: this torch has no NCCL.
    """
    if nccl_class() is None:
        raise SymmMemConfigError(
            problem(
                "NCCL version",
                found=f"torch {torch.__version__} without NCCL",
                expected="a CUDA build of torch",
                fix="install a CUDA build of torch, or use backend='host' for CPU tensors",
            )
        )
    major, minor, patch = nccl.version()[:3]
    return major, minor, patch


def nccl_runtime_version() -> tuple[int, int, int]:
    """The NCCL library that is loaded: its behaviour is what counts when LD_PRELOAD or a path swapped it.

    2.14.1: static ``ProcessGroupNCCL.get_runtime_nccl_version``; without it, the build's version.

    Raises:
        SymmMemConfigError: this torch has no NCCL.
    """
    reader = getattr(nccl_class(), "get_runtime_nccl_version", None)
    if reader is None:
        return nccl_version()
    major, minor, patch = reader()
    return major, minor, patch


def is_process_group(value: object) -> bool:
    """Whether it can be asked for its backends as :func:`nccl_backend` does."""
    return callable(getattr(value, "_get_backend", None))


def nccl_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The ``ProcessGroupNCCL`` that serves ``device`` in ``group``.

    2.13-2.14: ``ProcessGroup._get_backend``; under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` it answers with a wrapper whose
    ``wrapped_pg`` is the backend.

    Raises:
        SymmMemConfigError: the group serves the device with another backend, or not at all.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError as error:  # "No backend type associated with device type cuda"
        raise _not_nccl(group, device, str(error).splitlines()[0]) from error
    backend = getattr(backend, "wrapped_pg", backend)
    cls = nccl_class()
    if cls is None or not isinstance(backend, cls):
        raise _not_nccl(group, device, type(backend).__name__)
    return backend


def _not_nccl(group: dist.ProcessGroup, device: torch.device, found: str) -> SymmMemConfigError:
    return SymmMemConfigError(
        problem(
            f"process group {compat.group_name(group)} does not use NCCL for {device.type} tensors",
            found=found,
            expected="ProcessGroupNCCL",
            fix="init_process_group('cpu:gloo,cuda:nccl', device_id=...), then build the device mesh",
        )
    )


def config_policy(group: dist.ProcessGroup, device: torch.device) -> int | None:
    """``cta_policy`` of the group's NCCL options as NCCL's integer (a bit mask since 2.29); ``None`` if never set.

    2.14.1: ``backend.options.config.cta_policy``.

    Raises:
        SymmMemConfigError: see :func:`nccl_backend`.
    """
    value = getattr(nccl_backend(group, device).options.config, "cta_policy", UNDEFINED)
    return None if value == UNDEFINED else int(value)


def comm_pointer(group: dist.ProcessGroup, device: torch.device) -> int:
    """The group's ``ncclComm_t`` as an integer (2.14.1: ``ProcessGroupNCCL._comm_ptr``).

    The communicator must exist: pass ``device_id=`` to ``init_process_group``, or run one collective first.

    Raises:
        SymmMemConfigError: see :func:`nccl_backend`; or there is no communicator yet.
    """
    pointer = int(nccl_backend(group, device)._comm_ptr())
    if pointer == 0:
        raise SymmMemConfigError(
            problem(
                f"process group {compat.group_name(group)} has no NCCL communicator yet",
                found="a null pointer",
                expected="an initialised communicator",
                fix="pass device_id= to init_process_group, or run one collective on the group first",
            )
        )
    return pointer


def backend_config(group: dist.ProcessGroup | None = None) -> str:
    """Which backend serves which device, as ``"cpu:gloo,cuda:nccl"`` (``get_backend_config``, 2.13-2.14)."""
    return str(dist.get_backend_config(group))


def default_options(cls: Any, *, high_priority: bool) -> Any:
    """Fresh NCCL options (2.14.1: ``Options(is_high_priority_stream=False)``)."""
    return cls.Options(is_high_priority_stream=high_priority)


def set_options_timeout(options: Any, timeout: Any) -> None:
    """Timeout of collectives (2.13-2.14: ``Backend.Options._timeout``; device_mesh.py reads the same attribute)."""
    options._timeout = timeout
