"""NCCL's zero-CTA policy: set it on process groups and meshes, and read it back.

Under ``NCCL_CTA_POLICY_ZERO`` NCCL moves all-gathers (and equal-split all-to-alls) between symmetric windows with copy
engines instead of SMs. The policy belongs to a communicator: groups that are made without it do not have it, and a
device mesh makes groups of its own.

Sources: NCCL 2.30.7 ``src/init.cc:81-122`` (NCCL_CTA_POLICY), ``:2160-2166`` (the variable beats the config),
``:2206-2224`` (invalid values, ZERO with EFFICIENCY), ``src/enqueue.cc:3053`` (ZERO tested as a bit);
2.28.9 ``src/init.cc:60,1745-1749`` (integers only), ``src/enqueue.cc:2580`` (ZERO tested for equality).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_symm import compat_nccl
from fsdp_symm.errors import SymmMemConfigError, problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupNCCL

Policy = Literal["default", "efficiency", "zero"]
POLICY_VARIABLE = "NCCL_CTA_POLICY"
_NAMES = {"DEFAULT": 0, "EFFICIENCY": 1, "ZERO": 2}
_NAMES_SINCE = (2, 29, 2)  # 2.28.9 reads the variable with NCCL_PARAM, which takes integers only


def zero_cta_options(timeout: timedelta | None = None, *, high_priority: bool = False) -> ProcessGroupNCCL.Options:
    """Options for ``init_process_group(..., pg_options=...)`` or ``new_group`` with the zero-CTA policy.

    Make fresh options for every group: torch writes the group's name and ranks into them.

    Args:
        timeout: of collectives; ``None`` keeps torch's default. ``init_process_group`` and ``new_group`` take their
            own ``timeout`` argument, which wins.
        high_priority: run collectives on a high-priority stream.

    Raises:
        SymmMemConfigError: a timeout that is none; this torch has no NCCL, or was built with NCCL < 2.28, which has no
            such policy.
    """
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise SymmMemConfigError(
            problem(
                "zero_cta_options: timeout",
                found=repr(timeout),
                expected="a datetime.timedelta above 0, or None",
                fix="timeout=datetime.timedelta(minutes=10)",
            )
        )
    cls, policy = compat_nccl.nccl_class(), compat_nccl.zero_policy()
    if cls is None or policy is None:
        found = "no NCCL" if cls is None else f"NCCL {'.'.join(map(str, compat_nccl.nccl_version()))}"
        raise SymmMemConfigError(
            problem(
                "zero_cta_options: this torch cannot ask for the zero-CTA policy",
                found=f"torch {torch.__version__} with {found}",
                expected="a CUDA build of torch with NCCL 2.28 or newer",
                fix="install a CUDA build of torch 2.13 or newer; CPU ranks need no policy",
            )
        )
    options = compat_nccl.default_options(cls, high_priority=high_priority)
    options.config.cta_policy = policy
    if timeout is not None:
        compat_nccl.set_options_timeout(options, timeout)
    return options


def zero_cta_mesh(
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str],
    *,
    device_type: str = "cuda",
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """``init_device_mesh`` whose every dimension has a group of its own with the zero-CTA policy.

    A dimension that spans the whole world gets a new group too: without an override torch hands out the default group
    there, with whatever policy that has (device_mesh.py ``_init_one_process_group``, read in 2.13.0 and 2.14.1). Each
    dimension costs one communicator.

    Args:
        mesh_shape: ranks along each dimension; the product is the world size.
        mesh_dim_names: one name a dimension.
        device_type: ``"cuda"``.
        timeout: of collectives on these groups; ``None`` keeps torch's default.

    Raises:
        SymmMemConfigError: see :func:`zero_cta_options`; the shape and the names do not fit together; or a group came
            out without the policy.
    """
    listed = all(isinstance(value, Sequence) and not isinstance(value, str) for value in (mesh_shape, mesh_dim_names))
    shape, names = (tuple(mesh_shape), tuple(mesh_dim_names)) if listed else ((), ())
    good = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
    good = good and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    if len(shape) != len(names) or not shape or not good:
        raise SymmMemConfigError(
            problem(
                "zero_cta_mesh: mesh_shape and mesh_dim_names do not fit together",
                found=f"{mesh_shape!r} and {mesh_dim_names!r}",
                expected="ranks along each dimension, all above 0, and a name of its own for each, at least one",
                fix="for example zero_cta_mesh((2, 4), ('dp_replicate', 'dp_shard'))",
            )
        )
    if device_type != "cuda":
        raise SymmMemConfigError(
            problem(
                "zero_cta_mesh: device_type",
                found=repr(device_type),
                expected="'cuda': NCCL serves no other device, and CPU ranks need no policy",
                fix="leave it out; for other devices torch's init_device_mesh",
            )
        )
    # One options object a dimension: split_group and new_group write ranks, name and split color into it.
    options = {name: zero_cta_options(timeout) for name in names}
    override = {name: (_override_backend(device_type), opts) for name, opts in options.items()}
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=override)  # type: ignore[arg-type]
    if mesh.get_coordinate() is not None:
        _check_mesh(mesh, names, torch.device(device_type))
    return mesh


def _override_backend(device_type: str) -> str | None:
    # None keeps all backends of the default group (gloo for CPU tensors); a default group without NCCL, or NCCL
    # options for it, would silently make gloo groups.
    if not dist.is_initialized():
        return None
    pairs = compat_nccl.backend_config().split(",")
    return None if f"{device_type}:nccl" in pairs else "nccl"


def _check_mesh(mesh: DeviceMesh, names: tuple[str, ...], device: torch.device) -> None:
    zero = compat_nccl.zero_policy() or 0
    for name in names:
        group = mesh.get_group(name)
        found = compat_nccl.config_policy(group, device)
        if not (found or 0) & zero:
            raise SymmMemConfigError(
                problem(
                    f"zero_cta_mesh: dimension {name!r} came out without the policy",
                    found=f"cta_policy {found}",
                    expected=f"cta_policy {zero} (NCCL_CTA_POLICY_ZERO)",
                    fix="set NCCL_CTA_POLICY=2 in the environment, which overrides every communicator",
                )
            )
    text = os.environ.get(POLICY_VARIABLE)
    if text is not None and parse_policy(text) not in (None, "zero"):
        warnings.warn(
            problem(
                f"zero_cta_mesh: {POLICY_VARIABLE} overrides the policy of every group",
                found=f"{POLICY_VARIABLE}={text}",
                expected=f"{POLICY_VARIABLE} unset, or 2",
                fix=f"unset {POLICY_VARIABLE}",
            ),
            stacklevel=3,
        )


def parse_policy(text: str, nccl_version: tuple[int, int, int] | None = None) -> Policy | None:
    """What NCCL reads from a value of NCCL_CTA_POLICY; ``None`` where NCCL ignores it and keeps the config's policy.

    Args:
        text: the variable's value: 0, 1 or 2; from NCCL 2.29.2 on also names joined by ``|``, in any case, without
            spaces.
        nccl_version: of the loaded NCCL; ``None`` assumes a recent one.
    """
    names = nccl_version is None or nccl_version >= _NAMES_SINCE
    if not names:
        return _parse_integer(text)
    if text[:1].isdigit():
        # 2.30.7 looks at the first digit alone; 3 to 9 leave the variable without effect
        return policy_name(int(text[0])) if text[0] in "012" else None
    values = [_NAMES[token.upper()] for token in text.split("|") if token.upper() in _NAMES]
    if not values:
        return None
    mask = 0
    for value in values:
        mask |= value
    return policy_name(mask)


def _parse_integer(text: str) -> Policy | None:
    try:
        value = int(text, 0)
    except ValueError:
        return None
    return policy_name(value if 0 <= value <= 2 else 0)  # 2.28.9 init.cc:1785-1787


def policy_name(mask: int | None) -> Policy:
    """Name of a CTA policy mask; ZERO beats EFFICIENCY, as NCCL drops the latter beside the former."""
    if mask is None or not 0 <= mask <= 3:
        return "default"
    return "zero" if mask & 2 else "efficiency" if mask & 1 else "default"


def cta_policy(group: dist.ProcessGroup, device: torch.device) -> Policy:
    """The policy that the group's communicator works under: its options, unless NCCL_CTA_POLICY overrides them.

    NCCL reads the variable once a process, at the first communicator; a later change in ``os.environ`` shows here but
    has no effect there.

    Raises:
        SymmMemConfigError: not a group and a device, or the group does not use NCCL for the device.
    """
    if not isinstance(device, torch.device) or not compat_nccl.is_process_group(group):
        raise SymmMemConfigError(
            problem(
                "cta_policy: bad arguments",
                found=f"{group!r} and {device!r}",
                expected="a process group and a torch.device",
                fix="for example cta_policy(dist.group.WORLD, torch.device('cuda', 0))",
            )
        )
    return policy_and_source(group, device)[0]


def policy_and_source(group: dist.ProcessGroup, device: torch.device) -> tuple[Policy, Literal["config", "env"]]:
    """:func:`cta_policy`, and whether it came from the group's options or from the environment."""
    config = compat_nccl.config_policy(group, device)
    text = os.environ.get(POLICY_VARIABLE)
    forced = None if text is None else parse_policy(text, compat_nccl.nccl_runtime_version())
    return (policy_name(config), "config") if forced is None else (forced, "env")
