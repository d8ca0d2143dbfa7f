"""A training step of a stack of Llama-like blocks: plain FSDP2, torch's own switch, ours, and no communication at all.

Ours comes in three ways: staged all-gathers, direct placement, and direct placement with reduce-scatters by pulls.

All variants live in one process per rank and their steps alternate, so that clocks and neighbours hit them alike.
Losses of our variants are compared with plain FSDP2's before anything is timed: digit by digit on two
ranks, where the order of a sum makes no difference. Times are a step's wall time on the slowest rank, and a variant's
tax is what its step takes beyond the floor's step of the same round. Communication figures are a step's, from several
profiled steps of rank 0 (:mod:`fsdp_symm.bench.step_trace`).

Legend: W ranks, D model width, L blocks, T tokens a rank.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp_symm import SymmMemHandle, compat, compat_unshard, set_symm_mem_for_comm
from fsdp_symm.bench import schema
from fsdp_symm.bench.launch import World, need_gpu, run_ranks, synchronize
from fsdp_symm.bench.step_trace import StepTrace, judge_trace, read_steps

__all__ = ["OURS", "VARIANTS", "StepBench", "judge_trace", "measure", "taxes", "wrong_losses"]

# our variants and the arguments of the switch
OURS: dict[str, dict[str, Any]] = {
    "staged": {"all_gather": "staged", "reduce_scatter": "nccl"},
    "direct": {"all_gather": "direct", "reduce_scatter": "nccl"},
    "direct+pulls": {"all_gather": "direct", "reduce_scatter": "copy_engine"},
}
VARIANTS = ("plain", "native", *OURS, "floor")
_WARM_STEPS = 3
_HOST_STEPS = 2


@dataclass(frozen=True)
class StepBench:
    """What to measure.

    Attributes:
        ranks: processes to start; they share GPUs where there are fewer.
        widths: (D, L) pairs.
        tokens: T.
        steps: timed steps of each variant.
        traces: folder for one gzipped trace of one step a variant and width, ``None`` for none.
        profiled_steps: steps of each variant that are profiled.
        device_type: ``"cpu"`` runs the same code over gloo and shared memory, to try it; there is no ``native`` then.
    """

    ranks: int = 2
    widths: tuple[tuple[int, int], ...] = ((2048, 4), (4096, 4))
    tokens: int = 4096
    steps: int = 12
    traces: Path | None = None
    profiled_steps: int = 5
    device_type: str = "cuda"


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
    x = torch.randn(tokens // 1024, 1024, width, device=device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return _Program(model, step, handle)


def wrong_losses(losses: Mapping[str, Sequence[float]], world_size: int) -> str | None:
    """The first loss that differs from plain FSDP2's, or ``None``: ours on two ranks by a digit, others by more."""
    for variant in (v for v in losses if v not in ("plain", "floor")):
        for step, (mine, plain) in enumerate(zip(losses[variant], losses["plain"], strict=True)):
            every_digit = world_size == 2 and variant in OURS
            if not (mine == plain if every_digit else abs(mine - plain) <= 1e-4 * abs(plain)):
                limit = "every digit" if every_digit else "within 1e-4"
                return f"{variant}, step {step}: loss {mine!r} against {plain!r}, expected the same {limit}"
    return None


def _start_all(world: World, bench: StepBench, width: int, blocks: int) -> tuple[dict[str, _Program], dict[str, Any]]:
    """Build and warm every variant; also their losses, compared."""
    programs: dict[str, _Program] = {}
    losses: dict[str, list[float]] = {}
    for variant in VARIANTS:
        if variant == "native" and not world.on_gpu:
            continue
        before = _allocated(world)
        program = programs[variant] = _build(variant, width, blocks, bench.tokens, world.device)
        with _deterministic():
            losses[variant] = [float(program.step()) for _ in range(_WARM_STEPS)]
        program.peak_bytes = _peak(world) - before
    world.agree_that(wrong_losses(losses, world.size), f"fsdp-step d{width}")
    return programs, {variant: "; ".join(map(repr, some)) for variant, some in losses.items()}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Losses can only be compared digit by digit where attention's backward does not add in random order."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _allocated(world: World) -> int:
    """Bytes allocated now; begins a new peak."""
    synchronize(world.device)
    if not world.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(world: World) -> int:
    synchronize(world.device)
    return torch.cuda.max_memory_allocated() if world.on_gpu else 0


def _time_all(world: World, programs: dict[str, _Program], steps: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {variant: [] for variant in programs}
    for _ in range(steps):
        for variant, program in programs.items():
            world.meet()
            start = time.perf_counter()
            program.step()
            synchronize(world.device)
            (took,) = world.slowest([(time.perf_counter() - start) * 1e6])
            samples[variant].append(took)
    return samples


def taxes(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """What each variant's step takes beyond the floor's of the same round: median, extremes, and against native's."""
    found: dict[str, dict[str, Any]] = {}
    by_round = {v: [a - b for a, b in zip(some, samples["floor"], strict=True)] for v, some in samples.items()}
    native = statistics.median(by_round["native"]) if "native" in by_round else 0.0
    for variant, some in by_round.items():
        tax = statistics.median(some)
        found[variant] = {"tax_us": round(tax, 1), "tax_min_us": round(min(some), 1), "tax_max_us": round(max(some), 1)}
        found[variant]["tax_vs_native"] = round(tax / native, 3) if native > 0 else ""
    return found


def _profile(world: World, program: _Program, steps: int, path: Path) -> StepTrace | None:
    """Profile some steps into ``path``; judged on rank 0."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if world.on_gpu else [kinds.CPU]
    world.meet()
    if world.rank != 0:
        _steps(program, steps)
        return None
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        _steps(program, steps)
    profiler.export_chrome_trace(str(path))
    return read_steps(path, steps)


def _steps(program: _Program, steps: int) -> None:
    for _ in range(steps):
        program.step()
    synchronize(next(program.model.parameters()).device)


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


class _TimedUnsharder:
    """The same for direct placement, which stands for the comm *and* for copying shards in and allocating outputs."""

    def __init__(self, inner: compat_unshard.Unsharder, samples_us: list[float]) -> None:
        self.inner = inner
        self._samples_us = samples_us

    def begin(self, streams: tuple[Any, Any], async_op: bool) -> tuple[Any, dist.Work | None] | None:
        """As the inner one's."""
        start = time.perf_counter()
        begun = self.inner.begin(streams, async_op)
        self._samples_us.append((time.perf_counter() - start) * 1e6)
        return begun

    def resharded(self) -> None:
        """As the inner one's."""
        self.inner.resharded()


def _host_us(program: _Program) -> dict[str, float]:
    """Median host microseconds of one collective of each role."""
    samples: dict[compat.Role, list[float]] = {role: [] for role in compat.ROLES}
    undo: list[Callable[[], None]] = []
    for group in compat.param_groups(program.model):
        direct: Any = getattr(group.native, "fsdp_symm_unsharder", None)
        if direct is not None:
            compat_unshard.install(group, _TimedUnsharder(direct, samples["all_gather"]))
            undo.append(lambda group=group, direct=direct: compat_unshard.install(group, direct))
        for role in compat.ROLES:
            comm = compat.get_comm(group, role)
            compat.set_comm(group, role, _Timed(comm, samples[role]))
            undo.append(lambda group=group, role=role, comm=comm: compat.set_comm(group, role, comm))
    _steps(program, _HOST_STEPS)
    for restore in undo:
        restore()
    return {f"host_{role}_us": round(statistics.median(values), 1) for role, values in samples.items() if values}


def _measure(world: World, bench: StepBench, width: int, blocks: int, command: str) -> list[dict[str, Any]]:
    programs, losses = _start_all(world, bench, width, blocks)
    samples = _time_all(world, programs, bench.steps)
    tax, facts = taxes(samples), world.facts(command)
    hosts = {variant: _host_us(program) for variant, program in programs.items()}
    traces = _profile_all(world, bench, width, programs)
    lines = []
    for variant, program in programs.items():
        line: dict[str, Any] = {"name": f"fsdp_step_d{width}_l{blocks}", "variant": variant, "ranks": world.size}
        line |= {"bytes": _block_bytes(width) // world.size, "dtype": "bfloat16/float32"}
        line |= schema.summarize(samples[variant]) | facts | tax[variant] | hosts[variant]
        if traces:
            line |= traces[variant].figures | traces[variant].against(traces["floor"])
        line |= {"peak_bytes": program.peak_bytes, "symmetric_bytes": program.symmetric_bytes}
        lines.append(line | {"losses": losses[variant]})
        world.say(f"{line['name']} {variant}: {line['median_us'] / 1e3:.1f} ms, losses {losses[variant]}")
    world.meet()
    for program in programs.values():
        if program.handle is not None:
            program.handle.close()
    return lines


def _profile_all(world: World, bench: StepBench, width: int, programs: dict[str, _Program]) -> dict[str, StepTrace]:
    """Rank 0's judged traces; one step more of each is kept where traces are wanted. Nothing on the other ranks."""
    found: dict[str, StepTrace] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant, program in programs.items():
            trace = _profile(world, program, bench.profiled_steps, Path(scratch) / "trace.json.gz")
            if trace is not None:
                found[variant] = trace
            if bench.traces is not None:
                bench.traces.mkdir(parents=True, exist_ok=True)
                _profile(world, program, 1, bench.traces / f"fsdp_step_{variant}_w{world.size}_d{width}.json.gz")
    return found


def _block_bytes(width: int) -> int:
    hidden = -(-int(3.5 * width) // 256) * 256
    return 2 * (4 * width * width + 3 * width * hidden + 2 * width)


def measure_ranks(world: World, argument: tuple[StepBench, str]) -> list[dict[str, Any]]:
    """What every rank does."""
    bench, command = argument
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention everywhere: the same kernel for every cuDNN
    lines: list[dict[str, Any]] = []
    for width, blocks in bench.widths:
        lines += _measure(world, bench, width, blocks, command)
        if world.on_gpu:
            torch.cuda.empty_cache()
    return lines


def measure(bench: StepBench, command: str) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a width and variant, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU, losses that differ, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu("fsdp-step")
    return run_ranks(
        measure_ranks, (bench, command), ranks=bench.ranks, device_type=bench.device_type, what="bench fsdp-step"
    )
