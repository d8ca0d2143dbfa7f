"""The two calls that other rooms use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from types import MappingProxyType

from fsdp_symm.trace.classify import classify
from fsdp_symm.trace.load import Progress, load
from fsdp_symm.trace.report import Report, build_report

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Scalars of a set of traces, for a training loop's metrics."""

    exposed_ms: float  # communication that no compute covers, per step and rank
    comm_ms: float  # communication, per step and rank
    sm_ms: float  # SM-milliseconds of communication kernels, per step and rank
    engine_shares: Mapping[str, Mapping[str, float]]  # kind -> engine -> share of its bytes, 0 to 1
    num_steps: int  # steps per rank; 1 where the trace has no ProfilerStep rows
    verdict: str
    complete: bool  # False when rows are known to be missing
    warnings: tuple[str, ...]


def inspect_traces(paths: Paths, *, step: int | None = None, progress: Progress | None = None) -> Report:
    """Load, judge and report.

    Args:
        paths: one path or several: files, folders, globs.
        step: only this ProfilerStep.
        progress: called with (path, bytes just read, bytes of the file).

    Raises:
        TraceError: a file is missing or cannot be used; the message is one line.
    """
    return build_report([classify(trace) for trace in load(_list(paths), progress)], step)


def summarize(paths: Paths) -> TraceSummary:
    """The scalars of ``inspect_traces``, averaged over steps and ranks.

    Raises:
        TraceError: a file is missing or cannot be used; the message is one line.
    """
    report = inspect_traces(paths)
    num_steps = max(len(rank.steps) for rank in report.ranks)
    parts = sum(len(rank.steps) for rank in report.ranks)
    return TraceSummary(
        exposed_ms=sum(r.exposed_ms for r in report.ranks) / parts,
        comm_ms=sum(r.comm_ms for r in report.ranks) / parts,
        sm_ms=sum(r.sm_ms for r in report.ranks) / parts,
        engine_shares=engine_shares(report),
        num_steps=num_steps,
        verdict=report.verdict,
        complete=report.complete,
        warnings=report.warnings,
    )


def engine_shares(report: Report) -> Mapping[str, Mapping[str, float]]:
    """Share of each kind's bytes by engine; by calls where no bytes are known."""
    calls = [c for r in report.ranks for c in r.calls if c.kind != "barrier"]
    by_bytes: dict[str, Counter[str]] = defaultdict(Counter)
    by_calls: dict[str, Counter[str]] = defaultdict(Counter)
    for call in calls:
        by_bytes[call.kind][call.engine] += call.bytes or 0
        by_calls[call.kind][call.engine] += 1
    found = {}
    for kind in sorted(by_calls):
        weights = by_bytes[kind] if by_bytes[kind].total() else by_calls[kind]
        found[kind] = MappingProxyType({engine: n / weights.total() for engine, n in weights.items()})
    return MappingProxyType(found)


def _list(paths: Paths) -> Sequence[str]:
    one = isinstance(paths, str | PathLike)
    return [fspath(p) for p in ([paths] if one else paths)]  # type: ignore[union-attr, list-item]
