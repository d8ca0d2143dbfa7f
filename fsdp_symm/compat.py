"""The only file that touches private attributes of torch.

Each reader names the torch versions in which the attribute was read (source of 2.13.0, 2.14.1 and 2.15.0). Anything
that a later torch renames is repaired here and nowhere else.

Legend: W ranks of a group; a *param group* is FSDP2's ``FSDPParamGroup``: the parameters that are
gathered by one collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.fsdp import FSDPModule

# torch 2.13-2.15: the comm classes live in this private module; the public package exports none of them.
from torch.distributed.fsdp._fully_shard import _fsdp_api as _api
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _native
from torch.multiprocessing.reductions import StorageWeakRef

Role = Literal["all_gather", "reduce_scatter"]
ROLES: tuple[Role, ...] = ("all_gather", "reduce_scatter")


# --- process groups ----------------------------------------------------------------------------------------


Store = dist.distributed_c10d.Store
ReduceOpKind: Any = dist.ReduceOp.RedOpType  # SUM, AVG, ... ; pybind enum, untyped in the stubs


def default_store() -> Store:
    """The CPU store of the default process group (torch 2.13-2.15: ``distributed_c10d._get_default_store``)."""
    return dist.distributed_c10d._get_default_store()


def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """What ``torch.distributed.set_timeout`` is from 2.14 on (2.13: ``distributed_c10d._set_pg_timeout``)."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the group still belongs to this process' world (torch 2.13-2.15: ``distributed_c10d._world``)."""
    return group in dist.distributed_c10d._world.pg_map


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which torch registered the group; public, but typed loosely."""
    return str(group.group_name)


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the group in group order."""
    return tuple(dist.get_process_group_ranks(group))


def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """``dist.new_group`` among ``ranks`` alone; its stub also allows the non-members' answer."""
    group: Any = dist.new_group(ranks, use_local_synchronization=True, **options)
    return group


# --- profiler ----------------------------------------------------------------------------------------------


def annotate(name: str, **args: str | int) -> AbstractContextManager[object]:
    """A profiler range whose ``args`` appear in Kineto traces recorded with ``record_shapes=True``.

    ``torch.profiler.record_function`` keeps its ``args`` string out of chrome traces (seen in 2.13.0); the fast
    recorder writes keyword values as JSON keys (``torch._C._profiler._RecordFunctionFast``, 2.13-2.15).
    """
    return _RecordFunctionFast(name, [], dict(args))


def copy_many(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy and cast pairwise, fused where torch can (``torch._foreach_copy_``, 2.13-2.15; FSDP2 uses it)."""
    torch._foreach_copy_(list(targets), list(sources))


# --- storage ---------------------------------------------------------------------------------------------------------


def raw_tensor(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """``uint8 [nbytes]`` over somebody else's memory.

    ``torch._C._construct_storage_from_data_pointer`` (2.13-2.15, used by torch's own CUDA-graph trees) asks the driver
    nothing; ``torch.as_tensor`` would look the pointer up on every call.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]  # pyright does not know this overload


def address(tensor: torch.Tensor) -> int:
    """Where the tensor starts, also without elements (``data_ptr()`` is 0 then)."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def wrap_memory(pointer: int, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], object | None]]:
    """:func:`raw_tensor`, and a call that answers ``None`` once its storage is gone; it sees every view."""
    tensor = raw_tensor(pointer, nbytes, device)
    reference = StorageWeakRef(tensor.untyped_storage())
    return tensor, lambda: None if reference.expired() else reference


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` without its checks, which cost more than the rest of a call (2.13-2.15)."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@functools.lru_cache(maxsize=256)  # an object owns no stream, it only names one
def _stream(stream_id: int, index: int, kind: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)


def device_uuid(device: torch.device) -> str:
    """The GPU's own name, the same in every process (``uuid`` is missing from the stubs; there since torch 2.4)."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def is_capturing() -> bool:
    """Whether the current stream of the current device is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


# --- FSDP2 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamGroup:
    """One FSDP2 param group, seen through public values only.

    Attributes:
        fqn: the module's name below the switched model; several modules of one ``fully_shard`` call are joined
            with commas; the model itself is ``"<root>"``.
        index: position among the param groups of the same module.
        siblings: number of param groups of the same module.
        kind: ``"fsdp"``, ``"hsdp"`` or ``"replicate"``.
        native: torch's own object, for this file alone.
        modules: the modules that the group covers.
        root: FQN of the outermost FSDP module above; FSDP2 keeps buffers alive per root (``FSDPCommContext``).
    """

    fqn: str
    index: int
    siblings: int
    kind: Literal["fsdp", "hsdp", "replicate"]
    native: Any
    modules: tuple[nn.Module, ...]
    root: str

    @property
    def label(self) -> str:
        """Name for tables and errors; the index only where the module has several groups."""
        return self.fqn if self.siblings == 1 else f"{self.fqn}[{self.index}]"

    @property
    def device(self) -> torch.device:
        return self.native.device


def _fsdp_state(module: nn.Module) -> Any | None:
    # torch 2.13-2.15: FSDPModule._get_fsdp_state; ReplicateModule inherits it.
    if not isinstance(module, FSDPModule):
        return None
    return module._get_fsdp_state()


def _kind(native: Any) -> Literal["fsdp", "hsdp", "replicate"]:
    # torch 2.13-2.15: FSDPParamGroup.mesh_info is FSDPMeshInfo, HSDPMeshInfo (both) or DDPMeshInfo (replicate).
    sharded = getattr(native.mesh_info, "shard_mesh_dim", None) is not None
    replicated = getattr(native.mesh_info, "replicate_mesh_dim", None) is not None
    if not sharded:
        return "replicate"
    return "hsdp" if replicated else "fsdp"


def _states(model: nn.Module) -> list[tuple[Any, list[str]]]:
    """FSDP states below ``model`` with the names of their modules, in FQN order."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, module in model.named_modules():
        state = _fsdp_state(module)
        if state is not None:
            found.setdefault(id(state), (state, []))[1].append(name)
    return list(found.values())


def _roots(names: list[list[str]]) -> list[str]:
    """The root above each state: ``named_modules`` is pre-order, so the first FSDP module on a path is its root."""
    roots: list[str] = []
    answers = []
    for first, *_ in names:
        above = [r for r in roots if r == "" or first.startswith(f"{r}.")]
        if not above:
            roots.append(first)
        answers.append(above[0] if above else first)
    return answers


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """All param groups below ``model`` in FQN order; a root that owns no parameters contributes none."""
    groups = []
    states = _states(model)
    roots = _roots([names for _, names in states])
    for (state, names), root in zip(states, roots, strict=True):
        natives = state._fsdp_param_groups  # torch 2.13-2.15: a list, empty without parameters
        for index, native in enumerate(natives):
            groups.append(
                ParamGroup(
                    fqn=",".join(name or "<root>" for name in names),
                    index=index,
                    siblings=len(natives),
                    kind=_kind(native),
                    native=native,
                    modules=tuple(native.modules),
                    root=root,
                )
            )
    return groups


def owns_parameters(module: FSDPModule) -> bool:
    """Whether an FSDP module has a param group; torch's single-module setters do nothing or fail without one."""
    return bool(module._get_fsdp_state()._fsdp_param_groups)


def has_fsdp_modules(model: nn.Module) -> bool:
    """Whether ``fully_shard`` (or ``replicate``) was applied anywhere below ``model``."""
    return any(isinstance(m, FSDPModule) for m in model.modules())


@dataclass(frozen=True)
class PrefetchNode:
    """One FSDP module in FQN order: its param groups, and the positions of the modules that it prefetches."""

    groups: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def prefetch_nodes(model: nn.Module) -> list[PrefetchNode]:
    """The explicit prefetch lists below ``model`` (``set_modules_to_forward_prefetch`` and its backward twin).

    torch 2.13-2.15: ``FSDPState._states_to_forward_prefetch`` and ``_states_to_backward_prefetch``. Modules outside
    ``model`` are left out.
    """
    states = [state for state, _ in _states(model)]
    position = {id(state): index for index, state in enumerate(states)}

    def places(targets: list[Any]) -> tuple[int, ...]:
        return tuple(position[id(t)] for t in targets if id(t) in position)

    return [
        PrefetchNode(
            len(state._fsdp_param_groups),
            places(state._states_to_forward_prefetch),
            places(state._states_to_backward_prefetch),
        )
        for state in states
    ]


def reduce_scatter_input_buffers(groups: list[ParamGroup]) -> int:
    """FSDP2's cap K on reduce-scatter inputs kept alive (2.13-2.15: the largest of the groups' caps wins)."""
    return max((g.native.reduce_scatter_max_input_buffers for g in groups), default=1)


def shard_group(group: ParamGroup) -> dist.ProcessGroup:
    """The group over which parameters are sharded (2.13-2.15: ``FSDPMeshInfo.shard_process_group``)."""
    return group.native.mesh_info.shard_process_group


def post_forward_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """The smaller group of an integer ``reshard_after_forward``, else ``None``.

    torch 2.13-2.15: ``post_forward_mesh_info`` is ``None`` (False), equal to ``mesh_info`` (True) or another mesh.
    """
    info = group.native.post_forward_mesh_info
    if info is None or info == group.native.mesh_info:
        return None
    return info.shard_process_group


def all_gather_group(group: ParamGroup) -> dist.ProcessGroup:
    """The group of the *coming* all-gather; it changes with the sharded state (``_all_gather_process_group``)."""
    return group.native._all_gather_process_group


def reduce_scatter_group(group: ParamGroup) -> dist.ProcessGroup:
    """The group of the coming reduce-scatter (``_reduce_scatter_process_group``, 2.13-2.15)."""
    return group.native._reduce_scatter_process_group


def replicate_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """HSDP's all-reduce group, else ``None``."""
    return group.native.mesh_info.replicate_process_group if group.kind == "hsdp" else None


# --- the comm objects --------------------------------------------------------------------------------------

_COMM_ATTRIBUTE: dict[Role, str] = {
    "all_gather": "_all_gather_comm",  # torch 2.13-2.15
    "reduce_scatter": "_reduce_scatter_comm",  # torch 2.13-2.15
}
_DEFAULT_COMM: dict[Role, type] = {
    "all_gather": _native.DefaultAllGather,
    "reduce_scatter": _native.DefaultReduceScatter,
}
_NATIVE_SYMM: tuple[type, ...] = (_native.SymmMemAllGather, _native.SymmMemReduceScatter)
_NATIVE_PG_ALLOC: tuple[type, ...] = (
    _native.ProcessGroupAllocAllGather,
    _native.ProcessGroupAllocReduceScatter,
)


def get_comm(group: ParamGroup, role: Role) -> Any:
    """The comm object that FSDP2 will call. The public setters refuse modules with several groups, so: direct."""
    return getattr(group.native, _COMM_ATTRIBUTE[role])


def set_comm(group: ParamGroup, role: Role, comm: Any) -> None:
    """Replace the comm object of one param group."""
    setattr(group.native, _COMM_ATTRIBUTE[role], comm)


def occupied_by(group: ParamGroup, role: Role) -> str | None:
    """Why the role's comm must be left alone, or ``None`` for FSDP2's default.

    Exact type on purpose: a subclass of the default is a user's choice as well.
    """
    comm = get_comm(group, role)
    if type(comm) is _DEFAULT_COMM[role]:
        return None
    if isinstance(comm, _NATIVE_SYMM):
        return "torch's own set_symm_mem_for_comm is on for it (torchtitan: parallelism.enable_fsdp_symm_mem)"
    if isinstance(comm, _NATIVE_PG_ALLOC):
        return "set_allocate_memory_from_process_group_for_comm is on for this module"
    return f"the module has a custom {role} comm ({type(comm).__name__})"


def plain_comm(role: Role) -> Any:
    """A fresh instance of FSDP2's default comm: the plain path that unplanned calls take."""
    return _DEFAULT_COMM[role]()


AllGather = _api.AllGather
ReduceScatter = _api.ReduceScatter


def premul_factor(op: Any) -> float | None:
    """The factor of a ``PREMUL_SUM`` op (``ReduceOp.factor`` has been readable since torch 2.13), else ``None``."""
    kind = op.op if hasattr(op, "op") else op
    return float(op.factor) if kind == ReduceOpKind.PREMUL_SUM else None
