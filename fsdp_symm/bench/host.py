"""All-gather and reduce-scatter between CPU ranks: the host backend against gloo, in one run.

Both write to buffers that exist already (no page faults in the timed part). Every size and variant is verified before
it is timed. A sample is one call's wall time on its slowest rank, started
together after a barrier; variants alternate call by call, so that a busy machine hits both alike.

Legend: W ranks, C elements of one rank's chunk.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter
from fsdp_symm.bench import schema
from fsdp_symm.errors import SymmMemError
from fsdp_symm.plan import Ring

CPU = torch.device("cpu")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class HostBench:
    """What to measure: bytes a rank contributes, from ``min_bytes`` in steps of 4 to ``max_bytes``."""

    ranks: int = 2
    min_bytes: int = 64 * 1024
    max_bytes: int = 256 * 2**20
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    seconds: float = 1.0  # timed seconds a line, as a goal; at least 5 and at most 200 calls

    def sizes(self) -> list[int]:
        """The ladder of chunk sizes in bytes."""
        sizes, size = [], self.min_bytes
        while size <= self.max_bytes:
            sizes.append(size)
            size *= 4
        return sizes


# prepare() hands out buffers and fills this rank's input; run() is what is timed; the result is checked once
Step = Callable[[], Callable[[], torch.Tensor]]


def _fill(whole: torch.Tensor, rank: int) -> None:
    whole.fill_(rank + 1)


def _steps(numel: int, dtype: torch.dtype, arena: SymmMemArena) -> dict[tuple[str, str], Step]:
    world_size, rank, group = dist.get_world_size(), dist.get_rank(), arena.group
    symm_gather, symm_reduce = SymmMemAllGather(arena), SymmMemReduceScatter(arena)
    plain = torch.empty(world_size * numel, dtype=dtype)
    plain_out = torch.empty(numel, dtype=dtype)

    def gather_gloo() -> Callable[[], torch.Tensor]:
        own = plain.narrow(0, rank * numel, numel)
        _fill(own, rank)
        return lambda: (dist.all_gather_single(plain, own), plain)[1]

    def gather_host() -> Callable[[], torch.Tensor]:
        whole = symm_gather.allocate((world_size * numel,), dtype=dtype, device=CPU)
        own = whole.narrow(0, rank * numel, numel)
        _fill(own, rank)
        return lambda: (symm_gather(whole, own, group), whole)[1]

    def reduce_gloo() -> Callable[[], torch.Tensor]:
        _fill(plain, rank)
        return lambda: (dist.reduce_scatter_single(plain_out, plain), plain_out)[1]

    def reduce_host() -> Callable[[], torch.Tensor]:
        whole = symm_reduce.allocate((world_size * numel,), dtype=dtype, device=CPU)
        _fill(whole, rank)
        return lambda: (symm_reduce(plain_out, whole, group, dist.ReduceOp.SUM), plain_out)[1]

    return {
        ("all_gather", "gloo"): gather_gloo,
        ("all_gather", "host"): gather_host,
        ("reduce_scatter", "gloo"): reduce_gloo,
        ("reduce_scatter", "host"): reduce_host,
    }


def _verify(name: str, variant: str, result: torch.Tensor, numel: int) -> None:
    world_size = dist.get_world_size()
    if name == "all_gather":
        expected = torch.arange(1, world_size + 1, dtype=result.dtype).repeat_interleave(numel)
    else:
        expected = torch.full((numel,), world_size * (world_size + 1) // 2, dtype=result.dtype)
    if not torch.equal(result, expected):
        raise SymmMemError(f"{name} by {variant} gave a wrong result; nothing was timed")


def _sample_us(step: Step) -> float:
    run = step()
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took) * 1e6


def _measure_size(bench: HostBench, nbytes: int, dtype: torch.dtype) -> list[dict[str, object]]:
    numel, world_size = nbytes // dtype.itemsize, dist.get_world_size()
    group = dist.group.WORLD
    if group is None:
        raise SymmMemError("no process group")
    rings = (Ring("all_gather", 1, world_size * nbytes), Ring("reduce_scatter", 1, world_size * nbytes))
    arena = SymmMemArena(group, rings, timeout_s=TIMEOUT_S)
    lines = []
    steps = _steps(numel, dtype, arena)
    for name in ("all_gather", "reduce_scatter"):
        pair = {variant: steps[name, variant] for variant in ("gloo", "host")}
        for variant, step in pair.items():
            _verify(name, variant, step()(), numel)
        warm_us = max(_sample_us(step) for step in pair.values())
        count = int(min(200, max(5, bench.seconds * 1e6 / warm_us)))
        samples: dict[str, list[float]] = {variant: [] for variant in pair}
        for _ in range(count):
            for variant, step in pair.items():
                samples[variant].append(_sample_us(step))
        for variant, values in samples.items():
            line = {"name": name, "variant": variant, "ranks": world_size, "bytes": nbytes}
            lines.append(line | {"dtype": str(dtype).removeprefix("torch."), **schema.summarize(values)})
    arena.close()
    return lines


def _rank_main(rank: int, bench: HostBench, folder: str, command: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=bench.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    console = Console(stderr=True, quiet=rank != 0)
    facts = {"versions": schema.versions(), "hardware": schema.hardware(), "command": command}
    rows = []
    for dtype in bench.dtypes:
        for nbytes in bench.sizes():
            for line in _measure_size(bench, nbytes, getattr(torch, dtype)):
                rows.append(schema.Row(**line, **facts))  # type: ignore[arg-type]
                row = rows[-1]
                console.print(
                    f"{row.name:15}{row.variant:6}{row.bytes // 1024:8} KiB {row.dtype:9}{row.median_us:12.1f} us"
                )
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.destroy_process_group()


def measure(bench: HostBench, command: str) -> list[schema.Row]:
    """Start the ranks as processes of this machine, measure, and return the rows.

    Args:
        bench: what to measure.
        command: recorded in every row.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (bench, folder, command), nprocs=bench.ranks)  # type: ignore[attr-defined]
        return torch.load(f"{folder}/rows", weights_only=False)
