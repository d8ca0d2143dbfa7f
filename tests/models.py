"""Small FSDP2 models for every option under test, built alike on all ranks from one options object."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_symm.memory.arena import SymmMemArena

WIDTH = 12
# FSDP_SYMM_TEST_DEVICE=cuda runs the same programs over NCCL; ranks share GPUs where there are fewer.
DEVICE = os.environ.get("FSDP_SYMM_TEST_DEVICE", "cpu")
GATHERS = {"cpu": "host", "cuda": "copy_engine"}[DEVICE]  # the engine of all-gathers by default

# What is asked of the switch, and the engines that must have moved the bytes then.
WAYS: dict[str, tuple[dict[str, Any], str, str]] = {
    "direct": ({"all_gather": "direct"}, "host", "host"),
    "staged": ({"all_gather": "staged"}, "host", "host"),
}
if DEVICE == "cuda":
    WAYS = {
        "direct": ({"all_gather": "direct", "reduce_scatter": "nccl"}, "copy_engine", "nccl"),
        "staged": ({"all_gather": "staged", "reduce_scatter": "nccl"}, "nccl", "nccl"),
        "pulled": ({"all_gather": "direct", "reduce_scatter": "copy_engine"}, "copy_engine", "copy_engine"),
        "peer_memory": ({"backend": "cuda"}, "copy_engine", "copy_engine"),
        "peer_memory_staged": ({"backend": "cuda", "all_gather": "staged"}, "copy_engine", "copy_engine"),
    }


@dataclass(frozen=True)
class Options:
    """How a model is built and stepped; defaults are plain FSDP2."""

    blocks: int = 3
    hidden: int = 20
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    shard_dim: int = 0
    reshard: bool | int | None = None
    hsdp: bool = False
    cpu_offload: bool = False
    extension: bool = False
    frozen: bool = False
    unused: bool = False
    reduce_unused: bool = False
    prefetch: int = 0
    input_buffers: int = 1
    separate_group: bool = False
    micro_batches: int = 1
    sync_last_only: bool = False
    all_reduce_last_only: bool = False
    unshard_async: bool = False
    checkpointing: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    parameterless_root: bool = False
    shared_block: bool = False
    meta: bool = False
    switch: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    def __init__(self, hidden: int, unused: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        if unused:
            self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(options.hidden, options.unused) for _ in range(options.blocks))
        self.head = nn.Identity() if options.parameterless_root else nn.Linear(WIDTH, 5)
        self.order = [*range(options.blocks)] + ([0] if options.shared_block else [])
        self.checkpointing = options.checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            block = self.blocks[index]
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


class BytesTensor(torch.Tensor):
    """A parameter whose all-gather extension sends bytes: FSDP2 gathers ``uint8``."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> BytesTensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = torch.utils._pytree.tree_map(lambda t: t._data if isinstance(t, BytesTensor) else t, args)
        out = func(*flat, **torch.utils._pytree.tree_map(lambda t: getattr(t, "_data", t), kwargs))
        keep = {
            torch.ops.aten.empty_like.default,
            torch.ops.aten.new_zeros.default,
            torch.ops.aten.slice.Tensor,
            torch.ops.aten.copy_.default,
            torch.ops.aten.view.default,
            torch.ops.aten.as_strided.default,
            torch.ops.aten._to_copy.default,
            torch.ops.aten._pin_memory.default,
            torch.ops.aten.split.Tensor,
            torch.ops.aten.clone.default,
            torch.ops.aten.detach.default,
        }
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if func in keep:
            return torch.utils._pytree.tree_map_only(torch.Tensor, BytesTensor, out)
        return out

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        half = self._data.bfloat16()
        low = (self._data - half.float()).bfloat16()
        return (half, low.view(torch.uint8)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        half, low = outputs
        value = half.float() + low.view(torch.bfloat16).view(half.shape).float()
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value)
            return None
        return value, (value,)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _mesh(options: Options) -> Any:
    world_size = dist.get_world_size()
    if options.hsdp:
        return init_device_mesh(DEVICE, (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(DEVICE, (world_size,))


def _dim_one(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.size(1) % dist.get_world_size() == 0 else None


def build(options: Options) -> Model:
    """A sharded model; the same weights on every rank and for every call."""
    torch.manual_seed(7)
    with torch.device("meta" if options.meta else "cpu"):
        model = Model(options)
    if not options.meta:
        model = model.to(DEVICE)  # drawn on the CPU: the same values for every device
    if options.frozen:
        for block in list(model.blocks)[::2]:
            block.up.requires_grad_(False)
            block.scale.requires_grad_(False)
        model.blocks[-1].requires_grad_(False)
    if options.extension:
        for block in model.blocks:
            block.up.weight = nn.Parameter(BytesTensor(block.up.weight.detach().clone()))
    common: dict[str, Any] = {
        "mesh": _mesh(options),
        "mp_policy": MixedPrecisionPolicy(_dtype(options.param_dtype), _dtype(options.reduce_dtype)),
    }
    if options.reshard is not None:
        common["reshard_after_forward"] = options.reshard
    if options.shard_dim == 1:
        common["shard_placement_fn"] = _dim_one
    if options.cpu_offload:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **common)
    fully_shard(model, **common)
    _configure(model, options)
    return model


def _configure(model: Any, options: Options) -> None:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        if options.prefetch:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + options.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(index - options.prefetch, 0) : index][::-1])
    if options.input_buffers > 1:
        model.set_reduce_scatter_max_input_buffers(options.input_buffers)
    if options.separate_group:
        model.set_separate_reduce_scatter_group(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if options.divide_factor is not None:
                module.set_gradient_divide_factor(options.divide_factor)
            if options.force_sum:
                module.set_force_sum_reduction_for_comms(True)
            if options.reduce_unused:
                module.set_reduce_scatter_unused_params(True)


def materialize(model: nn.Module) -> None:
    """Give a meta model memory and the same values every time."""
    model.to_empty(device=DEVICE)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)


def batch(step: int, micro: int = 0) -> torch.Tensor:
    """The rank's own input of a step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(6, WIDTH, generator=generator).to(DEVICE)


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int, options: Options) -> float:
    """One optimizer step; returns the sum of the micro-batches' losses."""
    total = 0.0
    for micro in range(options.micro_batches):
        last = micro == options.micro_batches - 1
        if options.sync_last_only:
            model.set_requires_gradient_sync(last)
        if options.all_reduce_last_only:
            model.set_requires_all_reduce(last)
        if options.unshard_async:
            handle = model.unshard(async_op=True)
            first = model.blocks[0].unshard(async_op=True)
            handle.wait()
            first.wait()
        loss = model(batch(step, micro)).float().square().mean()
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    """Local gradients, copied."""
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def held_bytes(*models: Any) -> int:
    """Bytes that this process holds on the device between two steps, the models resharded and without gradients.

    On a GPU all that torch has allocated (NCCL's windows are not in it: ``arena_bytes`` of a handle's statistics counts
    those), but for tables of addresses (int64, as nothing else here is): caches of bounded size keep them. On the CPU,
    where nothing counts, what all tensors lie over.
    """
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
        for param in module.parameters(recurse=False):
            param.grad = None
    gc.collect()
    # No subclasses: DTensors lie over others, and a compiler keeps fake ones, which have no memory to ask for.
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    tensors = [t for t in found if t.device.type == DEVICE]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what another stream used last is given back now
        tables = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dtype == torch.int64}
        return torch.cuda.memory_allocated() - sum(-(-nbytes // 512) * 512 for nbytes in tables.values())
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def poison(arenas: tuple[SymmMemArena, ...]) -> None:
    """Fill this rank's slots with 0xFF: NaN in every float type, so that a byte that nobody wrote is seen."""
    for arena in arenas:
        arena.segment.lease(0, arena.slot_nbytes)[0].fill_(0xFF)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
