"""A training step of a stack of Llama-like blocks: plain FSDP2, torch's own switch, ours, and no communication at all.

All variants live in one process per rank and their steps alternate, so that clocks and neighbours hit them alike.
Losses of all variants but the floor are compared with plain FSDP2's before anything is timed. Times are a step's wall
time on the slowest rank; communication figures come from one profiled step of rank 0, judged by ``fsdp_symm.trace``.

Legend: W ranks, D model width, L blocks, T tokens a rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp_symm import SymmMemHandle, compat, set_symm_mem_for_comm
from fsdp_symm.bench import schema
from fsdp_symm.errors import SymmMemError
from fsdp_symm.trace import inspect_traces
from fsdp_symm.zero_cta import zero_cta_options

VARIANTS = ("plain", "native", "symm", "floor")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class StepBench:
    """What to measure.

    Attributes:
        ranks: processes to start; they share GPUs where there are fewer.
        widths: (D, L) pairs.
        tokens: T.
        steps: timed steps of each variant.
        traces: folder for one gzipped trace a variant and width, ``None`` for none.
    """

    ranks: int = 2
    widths: tuple[tuple[int, int], ...] = ((2048, 4), (4096, 4))
    tokens: int = 4096
    steps: int = 12
    traces: Path | None = None


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
class _Program:
    """One variant, ready to step."""

    model: nn.Module
    step: Callable[[], torch.Tensor]
    handle: SymmMemHandle | None
    peak_bytes: int = 0

    @property
    def symmetric_bytes(self) -> int:
        return self.handle.stats().arena_bytes if self.handle else 0


def _build(variant: str, width: int, blocks: int, tokens: int, device: torch.device) -> _Program:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[LlamaBlock(width) for _ in range(blocks)]).to(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    handle = None
    if variant == "symm":
        handle = set_symm_mem_for_comm(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and variant == "native":
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
        if isinstance(module, FSDPModule) and variant == "floor" and compat.owns_parameters(module):
            module.set_custom_all_gather(NoGather())
            module.set_custom_reduce_scatter(NoReduce())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(tokens // 1024, 1024, width, device=device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return _Program(model, step, handle)


def _warm(program: _Program) -> list[float]:
    """Three steps; notes the peak that the variant adds to what was allocated before it."""
    losses = [float(program.step()) for _ in range(3)]
    torch.cuda.synchronize()
    return losses


def _start_all(width: int, blocks: int, tokens: int, device: torch.device) -> dict[str, _Program]:
    programs: dict[str, _Program] = {}
    losses: dict[str, list[float]] = {}
    for variant in VARIANTS:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        programs[variant] = _build(variant, width, blocks, tokens, device)
        losses[variant] = _warm(programs[variant])
        programs[variant].peak_bytes = torch.cuda.max_memory_allocated() - before
    for variant in ("native", "symm"):
        for step, (mine, plain) in enumerate(zip(losses[variant], losses["plain"], strict=True)):
            if abs(mine - plain) > 1e-4 * abs(plain):
                raise SymmMemError(f"{variant}, step {step}: loss {mine} against {plain}; nothing was timed")
    return programs


def _time_all(programs: dict[str, _Program], steps: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {variant: [] for variant in programs}
    for _ in range(steps):
        for variant, program in programs.items():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            program.step()
            torch.cuda.synchronize()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device="cuda")
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            samples[variant].append(float(took) * 1e6)
    return samples


def _profile(program: _Program, path: Path) -> dict[str, float | int]:
    """One profiled step, judged; also written to ``path`` on rank 0."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        program.step()
        torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != 0:
        return {}
    profiler.export_chrome_trace(str(path))
    return judge_trace(path)


def judge_trace(path: Path) -> dict[str, float | int]:
    """Communication figures of a one-rank trace: microseconds and SM-microseconds of one step."""
    (rank,) = inspect_traces(path).ranks
    gathers = [c for c in rank.calls if c.kind == "all_gather"]
    reduces = [c for c in rank.calls if c.kind == "reduce_scatter"]
    slowdowns = [g.slowdown for g in rank.gemms if g.slowdown is not None]
    return {
        "all_gather_us": round(sum(c.duration_us for c in gathers), 1),
        "reduce_scatter_us": round(sum(c.duration_us for c in reduces), 1),
        "sm_us": round(rank.sm_ms * 1e3, 1),
        "exposed_us": round(rank.exposed_ms * 1e3, 1),
        "gemm_slowdown": round(statistics.median(slowdowns), 3) if slowdowns else 0.0,
        "copy_engine_gathers": sum(c.engine == "copy_engine" for c in gathers),
        "gathers": len(gathers),
        "symmetric_reduces": sum(c.engine == "symmetric_kernel" for c in reduces),
        "reduces": len(reduces),
    }


class _Timed:
    """A comm whose host time is noted: ``allocate`` and the call, without the GPU and without a profiler."""

    def __init__(self, inner: Any, samples_us: list[float]) -> None:
        self._inner = inner
        self._samples_us = samples_us
        self._spent_us = 0.0

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the comm's."""
        start = time.perf_counter()
        tensor = self._inner.allocate(*args, **kwargs)
        self._spent_us += (time.perf_counter() - start) * 1e6
        return tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the comm's."""
        start = time.perf_counter()
        work = self._inner(*args, **kwargs)
        self._samples_us.append(self._spent_us + (time.perf_counter() - start) * 1e6)
        self._spent_us = 0.0
        return work


def _host_us(program: _Program) -> dict[str, float]:
    """Median host microseconds of one collective of each role, over three steps."""
    samples: dict[compat.Role, list[float]] = {role: [] for role in compat.ROLES}
    groups = compat.param_groups(program.model)
    inner = {(g.label, role): compat.get_comm(g, role) for g in groups for role in compat.ROLES}
    for group in groups:
        for role in compat.ROLES:
            compat.set_comm(group, role, _Timed(inner[group.label, role], samples[role]))
    for _ in range(3):
        program.step()
    torch.cuda.synchronize()
    for group in groups:
        for role in compat.ROLES:
            compat.set_comm(group, role, inner[group.label, role])
    return {f"host_{role}_us": round(statistics.median(values), 1) for role, values in samples.items() if values}


def _measure(bench: StepBench, width: int, blocks: int, device: torch.device, command: str) -> list[dict[str, Any]]:
    programs = _start_all(width, blocks, bench.tokens, device)
    samples = _time_all(programs, bench.steps)
    facts = {"versions": schema.gpu_versions(), "hardware": schema.gpu_hardware(), "command": command}
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = bench.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for variant, program in programs.items():
            path = folder / f"fsdp_step_{variant}_w{bench.ranks}_d{width}.json.gz"
            line: dict[str, Any] = {"name": f"fsdp_step_d{width}_l{blocks}", "variant": variant, "ranks": bench.ranks}
            line |= {"bytes": _block_bytes(width) // bench.ranks, "dtype": "bfloat16/float32"}
            line |= schema.summarize(samples[variant]) | facts | _host_us(program) | _profile(program, path)
            line |= {"peak_bytes": program.peak_bytes, "symmetric_bytes": program.symmetric_bytes}
            lines.append(line)
    for program in programs.values():
        if program.handle is not None:
            program.handle.close()
    return lines


def _block_bytes(width: int) -> int:
    hidden = -(-int(3.5 * width) // 256) * 256
    return 2 * (4 * width * width + 3 * width * hidden + 2 * width)


def _rank_main(rank: int, bench: StepBench, folder: str, command: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention everywhere: the same kernel for every cuDNN
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=bench.ranks,
        pg_options=zero_cta_options(),
        device_id=device,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    lines: list[dict[str, Any]] = []
    for width, blocks in bench.widths:
        lines += _measure(bench, width, blocks, device, command)
        torch.cuda.empty_cache()
    if rank == 0:
        torch.save(lines, f"{folder}/lines")
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def measure(bench: StepBench, command: str) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a width and variant, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU.
    """
    if not torch.cuda.is_available():
        raise SymmMemError("bench fsdp-step: found no GPU, expected one or more, fix: run it on a CUDA machine")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (bench, folder, command), nprocs=bench.ranks)  # type: ignore[attr-defined]
        return torch.load(f"{folder}/lines", weights_only=False)
