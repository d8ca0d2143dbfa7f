"""A training step of a stack of Llama-like blocks: plain FSDP2, torch's own switch, ours, and no communication at all.

Ours comes in three ways: staged all-gathers, direct placement, and direct placement with reduce-scatters by pulls.

Variants live in one process per rank and their steps alternate, so that clocks and neighbours hit them alike. Each
holds masters and optimizer states, and its streams' pools of the caching allocator: six of them at once on each of four
ranks that share a GPU do not fit at width 4096. They are therefore measured in groups of a few that are alive
together, each with torch's own switch and the floor in it. A tax is what a variant's step takes beyond the floor's step
of the same round, and a ratio is to native's tax of the same group: neither ever compares two groups. Smaller optimizer
states would have been the other way, but then the step would not be one of training.

Losses of the first steps are compared before anything is timed. Plain FSDP2 runs twice: where it repeats its own losses
digit by digit, and a sum over ranks has only one order (two ranks), ours must have the same digits; else all must agree
within 1e-4, and the line says why.

Times are a step's wall time on the slowest rank. Host times are of FSDP2's own functions, taken from outside
(:mod:`fsdp_symm.bench.step_host`). Communication figures are a step's, from several profiled steps of rank 0
(:mod:`fsdp_symm.bench.step_trace`).

Legend: W ranks, D model width, L blocks, T tokens a rank.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_symm.bench import schema
from fsdp_symm.bench.launch import World, need_gpu, run_ranks, synchronize
from fsdp_symm.bench.step_host import host_times
from fsdp_symm.bench.step_model import OURS, VARIANTS, Program, block_bytes, build
from fsdp_symm.bench.step_trace import StepTrace, judge_trace, read_steps

__all__ = ["OURS", "VARIANTS", "StepBench", "groups_of", "judge_trace", "measure", "taxes", "wrong_losses"]

_WARM_STEPS = 3
_HOST_STEPS = 2
_TOLERANCE = 1e-4
_ANCHORS = ("native", "floor")


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
        alive: variants that are alive at once, native and floor included; at least 3.
        device_type: ``"cpu"`` runs the same code over gloo and shared memory, to try it; there is no ``native`` then.
    """

    ranks: int = 2
    widths: tuple[tuple[int, int], ...] = ((2048, 4), (4096, 4))
    tokens: int = 4096
    steps: int = 12
    traces: Path | None = None
    profiled_steps: int = 5
    alive: int = 4
    device_type: str = "cuda"


def groups_of(variants: Sequence[str], alive: int) -> list[tuple[str, ...]]:
    """Which variants are alive together: native and floor always, the others in turns, plain in the first group."""
    anchors = [v for v in variants if v in _ANCHORS]
    others = [v for v in variants if v not in _ANCHORS]
    room = max(alive - len(anchors), 1)
    parts = [others[first : first + room] for first in range(0, len(others), room)]
    return [tuple(v for v in variants if v in anchors or v in part) for part in parts]


# --- losses ------------------------------------------------------------------------------------------------


def wrong_losses(losses: Mapping[str, Sequence[float]], plain: Sequence[float], *, every_digit: bool) -> str | None:
    """The first loss that differs from plain FSDP2's, or ``None``: ours by a digit if it may not, others by more."""
    for variant in (v for v in losses if v not in ("plain", "floor")):
        exact = every_digit and variant in OURS
        for step, (mine, theirs) in enumerate(zip(losses[variant], plain, strict=True)):
            if not (mine == theirs if exact else abs(mine - theirs) <= _TOLERANCE * abs(theirs)):
                limit = "every digit" if exact else f"within {_TOLERANCE:g}"
                return f"{variant}, step {step}: loss {mine!r} against {theirs!r}, expected the same {limit}"
    return None


@dataclass(frozen=True)
class Plain:
    """What plain FSDP2 loses in its first steps, twice: the same program built and run again, by itself."""

    losses: list[float]
    again: list[float]
    repeats: bool  # on every rank

    @staticmethod
    def measured(world: World, bench: StepBench, width: int, blocks: int) -> Plain:
        """Build it twice, one after the other."""
        runs = []
        for _ in range(2):
            programs, losses = _start(world, bench, width, blocks, ["plain"])
            runs.append(losses["plain"])
            _release(world, programs)
        (differs,) = world.slowest([float(runs[0] != runs[1])])
        return Plain(runs[0], runs[1], not differs)

    def rule(self, world_size: int) -> tuple[bool, str]:
        """Whether ours must have the same digits, and the rule in words."""
        if world_size > 2:
            return False, f"{_TOLERANCE:g}: a sum over {world_size} ranks has no fixed order"
        if not self.repeats:
            return False, f"{_TOLERANCE:g}: plain FSDP2 does not repeat its own ({_text(self.again)} again)"
        return True, "every digit"


def _text(losses: Sequence[float]) -> str:
    return "; ".join(map(repr, losses))


def _first_losses(program: Program) -> list[float]:
    with _deterministic():
        return [float(program.step()) for _ in range(_WARM_STEPS)]


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Losses can only be compared digit by digit where attention's backward does not add in random order."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _new_peak(world: World) -> tuple[int, int]:
    """Bytes allocated, and taken from the GPU, now; begins new peaks of both."""
    synchronize(world.device)
    if not world.on_gpu:
        return 0, 0
    gc.collect()
    torch.cuda.empty_cache()  # what an earlier variant has left must not be there for this one
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _peak(world: World) -> tuple[int, int]:
    synchronize(world.device)
    return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if world.on_gpu else (0, 0)


# --- one group ---------------------------------------------------------------------------------------------


def _start(
    world: World, bench: StepBench, width: int, blocks: int, variants: Sequence[str]
) -> tuple[dict[str, Program], dict[str, list[float]]]:
    """Build and warm some variants; also their losses."""
    programs: dict[str, Program] = {}
    losses: dict[str, list[float]] = {}
    for variant in variants:
        before = _new_peak(world)
        program = programs[variant] = build(variant, width, blocks, bench.tokens, world.device)
        losses[variant] = _first_losses(program)
        program.peak_bytes, program.reserved_bytes = (a - b for a, b in zip(_peak(world), before, strict=True))
    return programs, losses


def _release(world: World, programs: dict[str, Program]) -> None:
    """Give their memory back, also what the allocator keeps."""
    world.meet()
    for handle in [program.handle for program in programs.values() if program.handle is not None]:
        handle.close()
    programs.clear()
    gc.collect()  # modules and their hooks are cycles
    if world.on_gpu:
        torch.cuda.empty_cache()


def _time_all(world: World, programs: dict[str, Program], steps: int) -> dict[str, list[float]]:
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


def _profile(world: World, program: Program, steps: int, path: Path) -> StepTrace | None:
    """Profile some steps into ``path``; judged on rank 0."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if world.on_gpu else [kinds.CPU]
    world.meet()
    if world.rank != 0:
        program.run(steps)
        return None
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        program.run(steps)
    profiler.export_chrome_trace(str(path))
    return read_steps(path, steps)


def _host_columns(program: Program) -> dict[str, Any]:
    with host_times(program.model) as times:
        program.run(_HOST_STEPS)
    return times.columns()


def _measure(world: World, bench: StepBench, width: int, blocks: int, command: str) -> list[dict[str, Any]]:
    plain = Plain.measured(world, bench, width, blocks)
    variants = [v for v in VARIANTS if v != "native" or world.on_gpu]
    lines = []
    for number, group in enumerate(groups_of(variants, bench.alive), start=1):
        programs, losses = _start(world, bench, width, blocks, group)
        every_digit, rule = plain.rule(world.size)
        world.agree_that(wrong_losses(losses, plain.losses, every_digit=every_digit), f"fsdp-step d{width}")
        for line in _measure_group(world, bench, width, programs, number):
            about = {"name": f"fsdp_step_d{width}_l{blocks}", "ranks": world.size, "group": number}
            line |= about | world.facts(command) | {"losses": _text(losses[line["variant"]]), "losses_within": rule}
            lines.append(line)
            world.say(f"{line['name']} {line['variant']}: {line['median_us'] / 1e3:.1f} ms, losses {line['losses']}")
        _release(world, programs)
    return lines


def _measure_group(
    world: World, bench: StepBench, width: int, programs: dict[str, Program], number: int
) -> list[dict[str, Any]]:
    samples = _time_all(world, programs, bench.steps)
    tax = taxes(samples)
    hosts = {variant: _host_columns(program) for variant, program in programs.items()}
    traces = _profile_all(world, bench, width, programs, number)
    lines = []
    for variant, program in programs.items():
        line: dict[str, Any] = {"variant": variant, "bytes": block_bytes(width) // world.size}
        line |= {"dtype": "bfloat16/float32"} | schema.summarize(samples[variant]) | tax[variant] | hosts[variant]
        if traces:
            line |= traces[variant].figures | traces[variant].against(traces["floor"])
        line |= {"peak_bytes": program.peak_bytes, "reserved_bytes": program.reserved_bytes}
        lines.append(line | {"symmetric_bytes": program.symmetric_bytes})
    return lines


def _profile_all(
    world: World, bench: StepBench, width: int, programs: dict[str, Program], number: int
) -> dict[str, StepTrace]:
    """Rank 0's judged traces; one step more of each is kept where traces are wanted. Nothing on the other ranks."""
    found: dict[str, StepTrace] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant, program in programs.items():
            trace = _profile(world, program, bench.profiled_steps, Path(scratch) / "trace.json.gz")
            if trace is not None:
                found[variant] = trace
            if bench.traces is not None and (number == 1 or variant not in _ANCHORS):
                bench.traces.mkdir(parents=True, exist_ok=True)
                _profile(world, program, 1, bench.traces / f"fsdp_step_{variant}_w{world.size}_d{width}.json.gz")
    return found


def measure_ranks(world: World, argument: tuple[StepBench, str]) -> list[dict[str, Any]]:
    """What every rank does."""
    bench, command = argument
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention everywhere: the same kernel for every cuDNN
    lines: list[dict[str, Any]] = []
    for width, blocks in bench.widths:
        lines += _measure(world, bench, width, blocks, command)
    return lines


def measure(bench: StepBench, command: str) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a width and variant, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU, losses that differ, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu()
    return run_ranks(
        measure_ranks, (bench, command), ranks=bench.ranks, device_type=bench.device_type, what="bench fsdp-step"
    )
