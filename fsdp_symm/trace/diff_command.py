"""``fsdp-symm diff``: compare the communication of two traces, or of two folders of traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fsdp_symm.output import OutputError, PipeConsole, pipe
from fsdp_symm.trace import names
from fsdp_symm.trace.classify import Classified, classify
from fsdp_symm.trace.diff import Diff, compare
from fsdp_symm.trace.export import to_json
from fsdp_symm.trace.html import diff_page
from fsdp_symm.trace.inspect_command import select, write
from fsdp_symm.trace.load import load
from fsdp_symm.trace.progress import loading
from fsdp_symm.trace.render import SHORT_ENGINES, make_table, ms_text
from fsdp_symm.trace.report import build_report
from fsdp_symm.trace.scan import TraceError

METRIC_LABELS = {
    "step_ms": "step ms",
    "comm_ms": "communication ms",
    "exposed_ms": "exposed ms",
    "sm_ms": "SM-ms",
    "gemm_slowdown": "GEMM slowdown",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", metavar="BEFORE", help="trace file, folder or glob")
    parser.add_argument("after", metavar="AFTER", help="trace file, folder or glob")
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/inspect.md")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML report")


def run(args: argparse.Namespace) -> int:
    """Compare; 0 when both sides could be read, 2 otherwise."""
    try:
        judged: list[list[Classified]] = []
        for path in (args.before, args.after):
            with loading() as progress:
                judged.append([classify(t) for t in select(load([path], progress), args.rank, None)])
        reports = [build_report(side) for side in judged]
        found = compare(reports[0], reports[1])
        if args.html:
            write(args.html, diff_page(judged, reports, found), [one.trace for side in judged for one in side])
        with pipe():
            if args.json:
                print(to_json(msgspec.to_builtins(found)))
            else:
                render(found, PipeConsole(highlight=False, markup=False, emoji=False))
    except (TraceError, OutputError) as error:
        print(f"fsdp-symm diff: {error}", file=sys.stderr)
        return 2
    for warning in found.warnings if args.json else ():
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def engines_text(shares: dict[str, float]) -> str:
    """``copy engine 100%``; ``-`` where the side has no such collective."""
    return ", ".join(f"{names.ENGINE_LABELS[e]} {s:.0%}" for e, s in sorted(shares.items())) or "-"


def side_text(engine: str, ms: float | None, sms: int | None) -> str:
    """``copy engine 0 SMs 0.16 ms``; ``-`` where the side has no such call."""
    if not engine:
        return "-"
    label = " + ".join(SHORT_ENGINES[e] for e in engine.split("+"))
    return f"{label} {sms} SMs {ms_text(ms)} ms"


def render(found: Diff, console: Console) -> None:
    """Print the comparison."""
    metrics = make_table(("per step and rank", "l"), ("before", "r"), ("after", "r"), ("change", "r"))
    for m in found.metrics:
        change = "-" if m.change is None else f"{m.change:+.1%}"
        style = "" if m.change is None or abs(m.change) < 0.01 else "green" if m.change < 0 else "yellow"
        metrics.add_row(METRIC_LABELS[m.name], ms_text(m.before), ms_text(m.after), Text(change, style=style))
    engines = make_table(("collective", "l"), ("before", "l"), ("after", "l"))
    for e in found.engines:
        engines.add_row(e.kind.replace("_", "-"), engines_text(e.before), engines_text(e.after))
    calls = make_table(("module", "l"), ("collective", "l"), ("before, per call", "l"), ("after, per call", "l"))
    for c in found.collectives:
        calls.add_row(
            c.module or "-",
            c.kind.replace("_", "-"),
            side_text(c.engine_before, c.call_ms_before, c.sms_before),
            side_text(c.engine_after, c.call_ms_after, c.sms_after),
        )
    parts: list[RenderableType] = [Padding(t, (0, 0, 1, 0)) for t in (metrics, engines, calls)]
    parts += [Text(f"warning  {w}", style="yellow") for w in found.warnings]
    parts.append(Text(f"verdict  {found.verdict}", style="bold"))
    console.print(Group(*parts))
