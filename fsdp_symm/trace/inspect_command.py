"""``fsdp-symm inspect``: say what moved the bytes in Kineto traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp_symm.output import OutputError, PipeConsole, pipe
from fsdp_symm.trace.classify import classify
from fsdp_symm.trace.expect import Expectation
from fsdp_symm.trace.export import to_builtins, to_json
from fsdp_symm.trace.html import inspect_page
from fsdp_symm.trace.load import load
from fsdp_symm.trace.model import Trace
from fsdp_symm.trace.progress import loading
from fsdp_symm.trace.render import render, to_csv
from fsdp_symm.trace.report import Report, build_report
from fsdp_symm.trace.scan import TraceError

_MAX_COMPLAINTS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="trace files (.json, .json.gz), folders or globs")
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be repeated")
    parser.add_argument("--step", type=int, metavar="N", help="only the calls of this ProfilerStep")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, see docs/inspect.md")
    output.add_argument("--csv", action="store_true", help="print the collectives as CSV")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML report")
    parser.add_argument(
        "--expect",
        action="append",
        metavar="ENGINE[:KIND,...]",
        help="exit 1 unless this engine carried every such call, for instance copy-engine:all_gather; may be repeated",
    )


def select(traces: list[Trace], ranks: list[int] | None, step: int | None) -> list[Trace]:
    """Keep the ranks asked for.

    Raises:
        TraceError: a rank or step that no trace holds.
    """
    if ranks is not None:
        have = sorted({t.rank for t in traces if t.rank is not None})
        missing = [r for r in ranks if r not in have]
        if missing:
            raise TraceError(f"--rank {missing[0]}: no such rank; found {', '.join(map(str, have)) or 'none'}")
        traces = [t for t in traces if t.rank in ranks]
    if step is not None:
        steps = sorted({s.number for t in traces for s in t.steps})
        if step not in steps:
            found = ", ".join(map(str, steps)) or "no ProfilerStep rows; call prof.step() in the loop"
            raise TraceError(f"--step {step}: no such step; found {found}")
    return traces


def run(args: argparse.Namespace) -> int:
    """Inspect; 0 when fine, 1 when ``--expect`` is unmet, 2 when the input is unusable."""
    try:
        expectations = [Expectation.parse(one) for one in args.expect or ()]
        with loading() as progress:
            traces = select(load(args.paths, progress), args.rank, args.step)
        judged = [classify(trace) for trace in traces]
        report = build_report(judged, args.step)
        if args.html:
            write(args.html, inspect_page(judged, report), traces)
        with pipe():
            _print(args, report)
    except (TraceError, OutputError) as error:
        print(f"fsdp-symm inspect: {error}", file=sys.stderr)
        return 2
    if args.json or args.csv:
        for warning in report.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return _judge(expectations, report)


def _print(args: argparse.Namespace, report: Report) -> None:
    if args.json:
        print(to_json(to_builtins(report)))
    elif args.csv:
        sys.stdout.write(to_csv(report))
    else:
        render(report, PipeConsole(highlight=False, markup=False, emoji=False))


def _judge(expectations: list[Expectation], report: Report) -> int:
    complaints = [line for one in expectations for line in one.complaints(report)]
    for line in complaints[:_MAX_COMPLAINTS]:
        print(f"unmet: {line}", file=sys.stderr)
    if len(complaints) > _MAX_COMPLAINTS:
        print(f"unmet: and {len(complaints) - _MAX_COMPLAINTS} more", file=sys.stderr)
    return 1 if complaints else 0


def write(path: Path, text: str, traces: list[Trace]) -> None:
    """Write a report file.

    Raises:
        TraceError: the file cannot be written, or is one of the traces.
    """
    try:
        if any(path.exists() and Path(t.path).exists() and path.samefile(t.path) for t in traces):
            raise TraceError(f"--html {path}: this is one of the traces; expected another file")
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"--html {path}: {reason}; expected a writable file") from error
