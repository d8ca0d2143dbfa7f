"""A short profile of several ways, one after the other: who moved the bytes, on how many SMs, for how long."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_symm.bench.launch import World, synchronize
from fsdp_symm.bench.timing import Way
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.trace import names
from fsdp_symm.trace.classify import FLAG_BYTES
from fsdp_symm.trace.load import load_trace
from fsdp_symm.trace.model import DeviceRow, Trace

_CALLS = 3
_TO_HOST = re.compile(r"DtoH|DeviceToHost")
# Not cudaDeviceSynchronize: the profile ends every step with one of its own.
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuEventSynchronize")


@dataclass(frozen=True)
class Seen:
    """What one call of a way left in the profile of rank 0.

    Attributes:
        engine: who moved the bytes, ``"+"`` between several.
        sm_us: sum over *all* kernels of the call, copy-out and local sum included, of duration x min(blocks, SMs).
        kernels: kernels of a call, of any kind.
        host_reads: copies to the host.
        host_waits: times that the host waited for a stream or an event.
    """

    engine: str = ""
    sm_us: float = 0.0
    kernels: float = 0.0
    host_reads: float = 0.0
    host_waits: float = 0.0

    def columns(self) -> dict[str, Any]:
        """As columns of a line."""
        figures = {"engine": self.engine, "sm_us": round(self.sm_us, 1), "kernels": round(self.kernels, 2)}
        return figures | {"host_reads": round(self.host_reads, 2), "host_waits": round(self.host_waits, 2)}


def sm_us(row: DeviceRow, num_sms: int | None) -> float:
    """SM-microseconds of a kernel; 0 where the trace does not tell its blocks."""
    blocks = min(math.prod(row.grid), num_sms or 1 << 30) if row.grid else 0
    return blocks * (row.end_us - row.start_us)


def look(rows: Sequence[DeviceRow], launches: Sequence[str], num_sms: int | None, calls: int) -> Seen:
    """Judge the device rows and the names of the runtime calls of ``calls`` calls, with nothing else among them."""
    kernels = [r for r in rows if r.what == "kernel"]
    engines = {engine for r in kernels if (engine := names.kernel_engine(r.name)) is not None}
    moved = [r for r in rows if r.what == "copy" and r.bytes != FLAG_BYTES and names.copy_kind(r.name) != "host"]
    labels = sorted(names.ENGINE_LABELS[e] for e in (engines | {"copy_engine"} if moved else engines))
    reads = sum(r.what == "copy" and _TO_HOST.search(r.name) is not None for r in rows)
    waits = sum(name in _WAITS for name in launches)
    sm = sum(sm_us(r, num_sms) for r in kernels)
    return Seen("+".join(labels), sm / calls, len(kernels) / calls, reads / calls, waits / calls)


def profile_ways(world: World, ways: Sequence[Way], keep: Path | None) -> dict[str, Seen]:
    """Profile three calls of every way; empty figures on all ranks but the first, and on a CPU, which has no kernels.

    Args:
        world: the ranks, all of which call.
        ways: checked ones.
        keep: where rank 0's trace goes, ``None`` for nowhere.
    """
    if world.rank != 0:
        _run(world, ways)
        return {way.name: Seen() for way in ways}
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if world.on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as scratch:
        path = keep or Path(scratch) / "trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
            _run(world, ways)
        profiler.export_chrome_trace(str(path))
        return split(load_trace(path), ways)


def _run(world: World, ways: Sequence[Way]) -> None:
    for index, way in enumerate(ways):
        world.meet()
        with world.on_side(), torch.profiler.record_function(f"ProfilerStep#{index}"):
            for _ in range(_CALLS):
                way.run()
            synchronize(world.device)


def split(trace: Trace, ways: Sequence[Way]) -> dict[str, Seen]:
    """Give every way the device rows of its step.

    Raises:
        SymmMemError: the trace has other steps.
    """
    if [step.number for step in trace.steps] != list(range(len(ways))):
        raise SymmMemError(
            problem(
                "bench: the profile does not hold one step a way",
                found=f"steps {[step.number for step in trace.steps]}",
                expected=f"steps 0 to {len(ways) - 1}",
                fix="update fsdp_symm.trace: it reads ProfilerStep#N rows",
            )
        )
    found = {}
    for step, way in zip(trace.steps, ways, strict=True):
        rows = [r for r in trace.device_rows if step.start_us <= r.start_us < step.end_us]
        started = zip(trace.launches.start_us, trace.launches.name, strict=True)
        launches = [name for start, name in started if step.start_us <= start < step.end_us]
        found[way.name] = look(rows, launches, trace.num_sms, _CALLS)
    return found
