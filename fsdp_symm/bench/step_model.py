"""The step that the step benchmark takes: a stack of Llama-like blocks under FSDP2, in six variants.

Legend: W ranks, D model width, T tokens a rank, B batch of sequences, S their length, 1024 tokens at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp_symm import SymmMemHandle, compat, set_symm_mem_for_comm

# our variants and the arguments of the switch
OURS: dict[str, dict[str, Any]] = {
    "staged": {"all_gather": "staged", "reduce_scatter": "nccl"},
    "direct": {"all_gather": "direct", "reduce_scatter": "nccl"},
    "direct+pulls": {"all_gather": "direct", "reduce_scatter": "copy_engine"},
}
VARIANTS = ("plain", "native", *OURS, "floor")


class LlamaBlock(nn.Module):
    """Attention and SwiGLU with Llama's shapes: head size 128, hidden size 3.5 D rounded to 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-int(3.5 * width) // 256) * 256
        self.heads = width // 128
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [B, S, D]`` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class NoGather(compat.AllGather):
    """The floor: allocates like FSDP2's default and moves nothing."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, so that the arithmetic that follows stays finite."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        """Nothing."""


class NoReduce(compat.ReduceScatter):
    """The floor of a reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        """The own chunk, unreduced."""
        numel = output_tensor.numel()
        output_tensor.copy_(input_tensor.narrow(0, group.rank() * numel, numel))


@dataclass
class Program:
    """One variant, ready to step.

    Attributes:
        peak_bytes: the most that was allocated from torch in its first steps.
        reserved_bytes: the most that torch took from the GPU for it: with what pools keep for their own use.
    """

    model: nn.Module
    step: Callable[[], torch.Tensor]
    handle: SymmMemHandle | None
    peak_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def symmetric_bytes(self) -> int:
        return self.handle.stats().arena_bytes if self.handle else 0

    def run(self, steps: int) -> None:
        """Take some steps, and wait for the device."""
        for _ in range(steps):
            self.step()
        if (device := next(self.model.parameters()).device).type == "cuda":
            torch.cuda.synchronize(device)


def build(variant: str, width: int, blocks: int, tokens: int, device: torch.device) -> Program:
    """Make one variant. Collective."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[LlamaBlock(width) for _ in range(blocks)]).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    handle = None
    if variant in OURS:
        handle = set_symm_mem_for_comm(model, strict=True, **OURS[variant])
    for module in model.modules():
        if isinstance(module, FSDPModule) and variant == "native":
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
        if isinstance(module, FSDPModule) and variant == "floor" and compat.owns_parameters(module):
            module.set_custom_all_gather(NoGather())
            module.set_custom_reduce_scatter(NoReduce())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(100 + dist.get_rank())
    length = min(tokens, 1024)
    x = torch.randn(tokens // length, length, width, device=device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(model, step, handle)


def block_bytes(width: int) -> int:
    """Bytes of a block's parameters in bf16."""
    hidden = -(-int(3.5 * width) // 256) * 256
    return 2 * (4 * width * width + 3 * width * hidden + 2 * width)
