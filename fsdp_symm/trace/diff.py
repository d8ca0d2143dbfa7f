"""What changed between two sets of traces, normalised to one step and one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_symm.trace import names
from fsdp_symm.trace.api import engine_shares
from fsdp_symm.trace.report import CollectiveRow, Report

DIFF_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One number before and after; lower is better for all of them."""

    name: str  # stable key: step_ms, comm_ms, exposed_ms, sm_ms, gemm_slowdown
    before: float | None
    after: float | None
    change: float | None  # (after - before) / before


@dataclass(frozen=True, slots=True)
class EngineChange:
    """Engines of one kind by share of bytes."""

    kind: str
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """One kind and module: what moves it and how long a call takes."""

    kind: str
    module: str
    engine_before: str  # "" where the side has no such call
    engine_after: str
    call_ms_before: float | None
    call_ms_after: float | None
    sms_before: int | None
    sms_after: int | None


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything ``fsdp-symm diff`` knows."""

    schema_version: int
    verdict: str
    metrics: tuple[MetricChange, ...]
    engines: tuple[EngineChange, ...]
    collectives: tuple[CollectiveChange, ...]
    warnings: tuple[str, ...]


def _per_step(report: Report) -> dict[str, float | None]:
    """Means per step and rank."""
    steps = [step for rank in report.ranks for step in rank.steps]
    slow = [
        (row.slowdown, row.num_overlapped) for rank in report.ranks for row in rank.gemms if row.slowdown is not None
    ]
    weight = sum(n for _, n in slow)
    return {
        "step_ms": sum(s.time_ms for s in steps) / len(steps),
        "comm_ms": sum(s.comm_ms for s in steps) / len(steps),
        "exposed_ms": sum(s.exposed_ms for s in steps) / len(steps),
        "sm_ms": sum(s.sm_ms for s in steps) / len(steps),
        "gemm_slowdown": sum(s * n for s, n in slow) / weight if weight else None,
    }


def _bytes_per_step(report: Report) -> float:
    return sum(r.bytes for r in report.ranks) / sum(len(r.steps) for r in report.ranks)


def _metric(name: str, before: float | None, after: float | None) -> MetricChange:
    change = (after - before) / before if before and after is not None else None
    return MetricChange(name, before, after, change)


def _collectives(report: Report) -> dict[tuple[str, str], list[CollectiveRow]]:
    found: dict[tuple[str, str], list[CollectiveRow]] = defaultdict(list)
    for rank in report.ranks:
        for row in rank.collectives:
            found[row.kind, row.module].append(row)
    return found


def _side(rows: Sequence[CollectiveRow]) -> tuple[str, float | None, int | None]:
    if not rows:
        return "", None, None
    engines = sorted({row.engine for row in rows})
    calls = sum(row.num_calls for row in rows)
    return "+".join(engines), sum(row.time_ms for row in rows) / calls, max(row.sms for row in rows)


def _changes(before: Report, after: Report) -> tuple[CollectiveChange, ...]:
    left, right = _collectives(before), _collectives(after)
    changes = []
    for kind, module in sorted({*left, *right}):
        engine_b, ms_b, sms_b = _side(left.get((kind, module), []))
        engine_a, ms_a, sms_a = _side(right.get((kind, module), []))
        changes.append(CollectiveChange(kind, module, engine_b, engine_a, ms_b, ms_a, sms_b, sms_a))
    return tuple(changes)


def _warnings(before: Report, after: Report) -> list[str]:
    found = [f"before: {w}" for w in before.warnings] + [f"after: {w}" for w in after.warnings]
    a, b = _bytes_per_step(before), _bytes_per_step(after)
    if max(a, b) > 0 and abs(a - b) > 0.01 * max(a, b):
        found.append(f"bytes per step differ, {a:.4g} and {b:.4g}: the two runs may not do the same work")
    devices = {r.device for r in before.ranks} ^ {r.device for r in after.ranks}
    if devices:
        found.append(f"the devices differ: {', '.join(sorted(d or 'unknown' for d in devices))}")
    stepped = [any(step.number is not None for r in report.ranks for step in r.steps) for report in (before, after)]
    if stepped[0] != stepped[1]:
        found.append("only one side has ProfilerStep rows: its times are per step, the other's per trace")
    return found


def _sentence(engines: Sequence[EngineChange], metrics: Sequence[MetricChange]) -> str:
    def main(shares: dict[str, float]) -> str:
        return names.ENGINE_LABELS[max(shares, key=lambda e: shares[e])] if shares else "absent"

    moved = [
        f"{e.kind.replace('_', '-')}: {main(e.before)} -> {main(e.after)}"
        for e in engines
        if main(e.before) != main(e.after)
    ]
    numbers = {m.name: m for m in metrics}
    parts = []
    for key, label in (("exposed_ms", "exposed"), ("sm_ms", "SM-ms"), ("step_ms", "step")):
        m = numbers[key]
        change = f" ({m.change:+.0%})" if m.change is not None else ""
        parts.append(f"{label} {m.before:.2f} -> {m.after:.2f}{change}")
    return f"{'; '.join(moved) or 'same engines'}; {', '.join(parts)}."


def compare(before: Report, after: Report) -> Diff:
    """Compare two reports."""
    left, right = _per_step(before), _per_step(after)
    metrics = tuple(_metric(name, left[name], right[name]) for name in left)
    shares_b, shares_a = engine_shares(before), engine_shares(after)
    engines = tuple(
        EngineChange(kind, dict(shares_b.get(kind, {})), dict(shares_a.get(kind, {})))
        for kind in sorted({*shares_b, *shares_a})
    )
    changes, warnings = _changes(before, after), tuple(_warnings(before, after))
    return Diff(DIFF_SCHEMA_VERSION, _sentence(engines, metrics), metrics, engines, changes, warnings)
