"""Numbers about a set of judged traces: per collective, engine, step and rank.

Formulas: communication time is the length of the union of call spans (first device row to last), exposed time is what
of it no compute kernel covers, SM-milliseconds are grid blocks x kernel duration (at most the device's SMs), bandwidths
follow nccl-tests. Milliseconds unless a name says otherwise; gbps are 1e9 bytes a second.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Call
from fsdp_symm.trace.classify import Classified
from fsdp_symm.trace.diagnose import Reason, reasons
from fsdp_symm.trace.intervals import Union
from fsdp_symm.trace.model import Step
from fsdp_symm.trace.stragglers import Straggler, stragglers
from fsdp_symm.trace.verdict import verdict

SCHEMA_VERSION = 1
_MIN_SAMPLES = 3
_OVERLAPPED = 0.9
_ALONE = 0.01
_Product = tuple[str, tuple[int, ...] | None, str]  # kernel, grid, input shapes


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Calls of one kind, group, module and engine on one rank."""

    kind: str
    group: str
    group_size: int | None
    group_size_assumed: bool  # taken from the world size, because the trace names no group
    module: str
    engine: names.Engine
    wire: str
    num_calls: int
    num_guesses: int  # calls judged by name alone
    bytes: int  # over all calls; 0 where unknown
    bytes_known: bool  # every call's bytes are known
    kernels: tuple[str, ...]
    sms: int
    sm_ms: float
    time_ms: float  # sum of durations
    median_us: float
    transfer_ms: float
    wait_ms: float | None  # None where a single rank cannot tell waiting from moving
    algbw_gbps: float | None
    busbw_gbps: float | None
    overlap: float | None  # share of the time that compute covers, 0 to 1
    exposed_ms: float


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One matrix-product kernel with equal grid and input shapes, beside one engine and alone."""

    engine: names.Engine
    name: str
    shapes: str
    num_overlapped: int  # at least 90 % covered by the engine's communication
    num_alone: int  # at most 1 % covered by any communication
    slowdown: float | None  # ratio of medians; None below 3 samples of either


@dataclass(frozen=True, slots=True)
class EngineRow:
    """All calls of one engine on one rank."""

    engine: names.Engine
    num_calls: int
    bytes: int
    time_ms: float
    sms: int
    sm_ms: float
    exposed_ms: float
    gemm_slowdown: float | None  # over the GEMM rows with enough samples, weighted by their overlapped count


@dataclass(frozen=True, slots=True)
class StepRow:
    """One training step, or the whole trace where it has no ProfilerStep rows (number None)."""

    number: int | None
    time_ms: float
    num_calls: int
    comm_ms: float
    exposed_ms: float
    sm_ms: float
    sm_share: float | None  # of SMs x step time; None where the device's SM count is unknown


@dataclass(frozen=True, slots=True)
class RankReport:
    """One trace file."""

    path: str
    label: str
    rank: int | None
    world_size: int | None
    device: str
    num_sms: int | None
    nccl_version: str
    driver_version: int | None
    complete: bool
    comm_ms: float
    exposed_ms: float
    overlap: float | None
    sm_ms: float
    bytes: int
    num_local_copies: int
    local_copy_bytes: int
    steps: tuple[StepRow, ...]
    engines: tuple[EngineRow, ...]
    collectives: tuple[CollectiveRow, ...]
    gemms: tuple[GemmRow, ...]
    calls: tuple[Call, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything ``fsdp-symm inspect`` knows."""

    schema_version: int
    verdict: str
    complete: bool  # False when rows of any file are known to be missing
    ranks: tuple[RankReport, ...]
    stragglers: tuple[Straggler, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]


def _union(calls: Iterable[Call]) -> Union:
    return Union.of((call.start_us, call.end_us) for call in calls)


def _exposed_ms(calls: Iterable[Call], compute: Union) -> float:
    comm = _union(calls)
    return (comm.length_us - comm.intersect_us(compute)) / 1e3


def _rate(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _overlap(calls: Sequence[Call], compute: Union) -> float | None:
    comm = _union(calls)
    return _rate(comm.intersect_us(compute), comm.length_us)


def _collective(calls: Sequence[Call], compute: Union) -> CollectiveRow:
    """One table row; bandwidths divide the bytes of the timed calls by their summed durations."""
    first = calls[0]
    timed = [c for c in calls if c.bytes is not None and c.duration_us > 0]
    total_us = sum(c.duration_us for c in timed)
    waits = [c.wait_us for c in calls if c.wait_us is not None]
    algbw = _rate(sum(c.bytes or 0 for c in timed) / 1e3, total_us)
    size = first.group_size
    factor = names.bus_factor(first.kind, size) if size else None
    return CollectiveRow(
        kind=first.kind,
        group=first.group,
        group_size=size,
        group_size_assumed=any("world size" in note for c in calls for note in c.notes),
        module=first.module,
        engine=first.engine,
        wire=first.wire,
        num_calls=len(calls),
        num_guesses=sum(c.guess for c in calls),
        bytes=sum(c.bytes or 0 for c in calls),
        bytes_known=all(c.bytes is not None for c in calls),
        kernels=tuple(sorted({k for c in calls for k in c.kernels})),
        sms=max(c.sms for c in calls),
        sm_ms=sum(c.sm_us for c in calls) / 1e3,
        time_ms=sum(c.duration_us for c in calls) / 1e3,
        median_us=statistics.median(c.duration_us for c in calls),
        transfer_ms=sum(c.transfer_us for c in calls) / 1e3,
        wait_ms=sum(waits) / 1e3 if waits else None,
        algbw_gbps=algbw,
        busbw_gbps=algbw * factor if algbw is not None and factor is not None else None,
        overlap=_overlap(calls, compute),
        exposed_ms=_exposed_ms(calls, compute),
    )


def _collectives(calls: Sequence[Call], compute: Union) -> tuple[CollectiveRow, ...]:
    groups: dict[tuple[object, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.kind, call.group, call.group_size, call.module, call.engine, call.wire].append(call)
    rows = [_collective(some, compute) for some in groups.values()]
    return tuple(sorted(rows, key=lambda r: (-r.time_ms, r.kind, r.module)))


def _gemms(judged: Classified, calls: Sequence[Call]) -> tuple[GemmRow, ...]:
    """Slowdown of equal matrix products beside each engine's communication.

    ``calls`` may be those of one step; alone means beside no call of the whole trace.
    """
    engines: set[names.Engine] = {call.engine for call in calls}
    unions = {engine: _union(call for call in calls if call.engine == engine) for engine in engines}
    everything = _union(judged.calls)
    alone: dict[_Product, list[float]] = defaultdict(list)
    beside: dict[tuple[names.Engine, _Product], list[float]] = defaultdict(list)
    for i, shapes in judged.gemm_shapes.items():
        row = judged.compute_rows[i]
        span, length = (row.start_us, row.end_us), row.end_us - row.start_us
        key = (row.name, row.grid, shapes)
        if length <= 0:
            continue
        if everything.overlap_us(span) <= _ALONE * length:
            alone[key].append(length)
            continue
        if not engines:
            continue
        engine: names.Engine = max(engines, key=lambda e: unions[e].overlap_us(span))
        if unions[engine].overlap_us(span) >= _OVERLAPPED * length:
            beside[engine, key].append(length)
    rows = []
    for (engine, key), some in beside.items():
        base = alone.get(key, [])
        enough = len(some) >= _MIN_SAMPLES and len(base) >= _MIN_SAMPLES
        ratio = statistics.median(some) / statistics.median(base) if enough else None
        rows.append(GemmRow(engine, names.short_kernel(key[0]), key[2], len(some), len(base), ratio))
    return tuple(sorted(rows, key=lambda r: (r.engine, -r.num_overlapped, r.name)))


def _slowdown(rows: Sequence[GemmRow], engine: str) -> float | None:
    usable = [(r.slowdown, r.num_overlapped) for r in rows if r.engine == engine and r.slowdown is not None]
    return sum(s * n for s, n in usable) / sum(n for _, n in usable) if usable else None


def _engines(calls: Sequence[Call], compute: Union, gemms: Sequence[GemmRow]) -> tuple[EngineRow, ...]:
    groups: dict[names.Engine, list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.engine].append(call)
    rows = [
        EngineRow(
            engine,
            len(some),
            sum(c.bytes or 0 for c in some),
            sum(c.duration_us for c in some) / 1e3,
            max(c.sms for c in some),
            sum(c.sm_us for c in some) / 1e3,
            _exposed_ms(some, compute),
            _slowdown(gemms, engine),
        )
        for engine, some in groups.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.time_ms))


def _step(step: Step | None, window_us: float, calls: Sequence[Call], compute: Union, sms: int | None) -> StepRow:
    sm_us = sum(c.sm_us for c in calls)
    return StepRow(
        step.number if step else None,
        window_us / 1e3,
        len(calls),
        _union(calls).length_us / 1e3,
        _exposed_ms(calls, compute),
        sm_us / 1e3,
        _rate(sm_us, sms * window_us) if sms else None,
    )


def step_of(call: Call, steps: Sequence[Step]) -> int | None:
    """The step in which the CPU asked for a call; device rows may run later than their step's CPU span."""
    for step in steps:
        if step.start_us <= call.launch_us < step.end_us:
            return step.number
    return None


def window_us(judged: Classified) -> tuple[float, float]:
    """Span of the device rows, or of everything known where there is no device."""
    trace = judged.trace
    spans = [(r.start_us, r.end_us) for r in trace.device_rows]
    spans = spans or [(c.start_us, c.end_us) for c in judged.calls] + judged.compute.spans()
    if not spans:
        return trace.window_us or (0.0, 0.0)
    return min(s for s, _ in spans), max(e for _, e in spans)


def _steps(judged: Classified, calls: Sequence[Call], only: int | None) -> tuple[StepRow, ...]:
    steps, sms = judged.trace.steps, judged.trace.num_sms
    if not steps:
        low, high = window_us(judged)
        return (_step(None, high - low, calls, judged.compute, sms),)
    by_step: dict[int | None, list[Call]] = defaultdict(list)
    for call in calls:
        by_step[step_of(call, steps)].append(call)
    return tuple(
        _step(step, step.end_us - step.start_us, by_step[step.number], judged.compute, sms)
        for step in steps
        if only in (None, step.number)
    )


def report_rank(judged: Classified, step: int | None = None) -> RankReport:
    """Report on one trace.

    Args:
        judged: what ``classify`` returned.
        step: keep only the calls that this ProfilerStep asked for; None keeps all.
    """
    trace, compute = judged.trace, judged.compute
    placed = [step_of(c, trace.steps) for c in judged.calls]
    calls = tuple(c for c, number in zip(judged.calls, placed, strict=True) if step in (None, number))
    outside = placed.count(None) if trace.steps else 0
    warnings = [f"{outside} calls were asked for outside of every step: in the totals, in no step"] if outside else []
    gemms = _gemms(judged, calls)
    return RankReport(
        path=trace.path,
        label=trace.label,
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device_name or ("no device" if not trace.device_rows else ""),
        num_sms=trace.num_sms,
        nccl_version=trace.nccl_version,
        driver_version=trace.driver_version,
        complete=trace.complete,
        comm_ms=_union(calls).length_us / 1e3,
        exposed_ms=_exposed_ms(calls, compute),
        overlap=_overlap(calls, compute),
        sm_ms=sum(c.sm_us for c in calls) / 1e3,
        bytes=sum(c.bytes or 0 for c in calls),
        num_local_copies=judged.num_local_copies,
        local_copy_bytes=judged.local_copy_bytes,
        steps=_steps(judged, calls, step),
        engines=_engines(calls, compute, gemms),
        collectives=_collectives(calls, compute),
        gemms=gemms,
        calls=calls,
        warnings=(*trace.warnings, *warnings, *_call_warnings(calls)),
    )


def _call_warnings(calls: Sequence[Call]) -> list[str]:
    """What makes a number of this rank less than certain."""
    found = []
    guesses = sum(c.guess for c in calls)
    if guesses:
        found.append(f"{guesses} of {len(calls)} calls judged by name alone: no CPU row explains them")
    unknown = sum(c.bytes is None for c in calls if c.kind not in ("barrier", "peer_copy"))
    if unknown:
        found.append(f"{unknown} of {len(calls)} calls without known bytes: sums and bandwidths leave them out")
    assumed = sum("group size taken from the world size" in c.notes for c in calls)
    if assumed:
        found.append(f"{assumed} calls name no group: the world size stands in, so their bus bandwidth is approximate")
    flags_only = sum(not c.num_copies and not c.kernels and c.num_flags > 0 for c in calls)
    if flags_only:
        found.append(f"{flags_only} calls show barrier flags but no payload")
    return found


def build_report(judged: Sequence[Classified], step: int | None = None) -> Report:
    """Report on a set of traces, usually one per rank."""
    ranks = tuple(report_rank(one, step) for one in judged)
    warnings = [f"{r.label}: {w}" for r in ranks for w in r.warnings]
    late = stragglers(ranks)
    world = max((r.world_size or 0 for r in ranks), default=0)
    if late and len(late) < world:
        warnings.append(f"{len(late)} of {world} ranks loaded: the straggler table compares only these")
    return Report(
        SCHEMA_VERSION,
        verdict(ranks),
        all(r.complete for r in ranks),
        ranks,
        late,
        reasons(ranks),
        tuple(warnings),
    )
