"""Cards, tables and findings of the HTML report, as escaped HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fsdp_symm.trace import names
from fsdp_symm.trace.diagnose import Reason
from fsdp_symm.trace.diff import CollectiveChange, Diff
from fsdp_symm.trace.render import ms_text, share_text, size_text
from fsdp_symm.trace.report import CollectiveRow, RankReport, Report

_METRICS = {
    "step_ms": "step, ms",
    "comm_ms": "communication, ms",
    "exposed_ms": "exposed, ms",
    "sm_ms": "SM-milliseconds",
    "gemm_slowdown": "GEMM slowdown",
}


def _card(value: str, label: str, tone: str = "") -> str:
    return f'<div class="card"><b class="{tone}">{escape(value)}</b><span>{escape(label)}</span></div>'


def _engine(engine: str) -> str:
    shade = engine if "+" not in engine else "mixed"
    label = " + ".join(names.ENGINE_LABELS[e] for e in engine.split("+"))
    return f'<span class="engine" style="--c:var(--{shade})">{escape(label)}</span>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int) -> str:
    """A table whose first ``num_left`` columns hold text; cells are HTML."""
    head = "".join(f"<th{' class=l' if i < num_left else ''}>{escape(c)}</th>" for i, c in enumerate(columns))
    classes = ["l wrap", *["l"] * (num_left - 1)]
    body = ""
    for row in rows:
        cells = (f'<td class="{classes[i] if i < num_left else "r"}">{cell}</td>' for i, cell in enumerate(row))
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cards(report: Report) -> str:
    """Means per rank over what was inspected."""
    n = len(report.ranks)
    comm, exposed = (sum(getattr(r, k) for r in report.ranks) / n for k in ("comm_ms", "exposed_ms"))
    calls = [c for r in report.ranks for c in r.calls]
    moved = sum(c.bytes or 0 for c in calls)
    on_engine = sum(c.bytes or 0 for c in calls if c.engine == "copy_engine")
    per = " per rank" if n > 1 else ""
    parts = [
        _card(f"{exposed:.2f} ms", f"exposed communication{per}"),
        _card(f"{comm:.2f} ms", f"communication{per}"),
        _card(share_text(1 - exposed / comm if comm else None), "hidden behind compute"),
        _card(ms_text(sum(r.sm_ms for r in report.ranks) / n), f"SM-milliseconds{per}"),
        _card(share_text(on_engine / moved if moved else None), f"of {size_text(moved)} by copy engines"),
        _card(str(len(calls)), "collective calls"),
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


def overview(report: Report) -> str:
    """Ranks beside each other, and steps where a trace has several."""
    html = ""
    if len(report.ranks) > 1:
        late = {s.rank: s for s in report.stragglers}
        rows = []
        for r in report.ranks:
            s = late.get(r.rank) if r.rank is not None else None
            last, waited = (f"{s.num_last} of {s.num_matched}", ms_text(s.waited_ms)) if s else ("-", "-")
            rows.append([escape(r.label), ms_text(r.comm_ms), ms_text(r.exposed_ms), ms_text(r.sm_ms), waited, last])
        columns = ("rank", "comm ms", "exposed ms", "SM-ms", "waited ms", "arrived last")
        html += f"<h2>Ranks</h2>{_table(columns, rows, 1)}"
    steps = [(r, s) for r in report.ranks for s in r.steps if s.number is not None]
    if len(steps) > 1:
        rows = [
            [
                escape(f"{s.number}, {r.label}"), ms_text(s.time_ms), str(s.num_calls), ms_text(s.comm_ms),
                ms_text(s.exposed_ms), ms_text(s.sm_ms),
            ]
            for r, s in steps
        ]  # fmt: skip
        html += f"<h2>Steps</h2>{_table(('step', 'ms', 'calls', 'comm ms', 'exposed ms', 'SM-ms'), rows, 1)}"
    return html


def _collective_cells(row: CollectiveRow) -> list[str]:
    about = "~" if row.group_size_assumed else ""
    bus = f"{about}{row.busbw_gbps:.3g}" if row.busbw_gbps is not None else "-"
    return [
        escape(row.module or "-"),
        escape(row.kind.replace("_", "-")),
        _engine(row.engine),
        escape(f"{row.group or '?'} ({about}{row.group_size or '?'})"),
        str(row.num_calls),
        size_text(row.bytes) if row.bytes_known else "?",
        str(row.sms),
        ms_text(row.sm_ms),
        ms_text(row.time_ms),
        ms_text(row.wait_ms),
        bus,
        share_text(row.overlap),
        ms_text(row.exposed_ms),
    ]


def collectives(rank: RankReport, with_label: bool) -> str:
    """The collective table of one rank."""
    title = f"Collectives, {rank.label}" if with_label else "Collectives"
    columns = (
        "module", "collective", "engine", "group (ranks)", "calls", "bytes", "SMs", "SM-ms", "ms", "wait", "bus GB/s",
        "overlap", "exposed",
    )  # fmt: skip
    rows = sorted(rank.collectives, key=lambda r: (r.kind, r.module))
    return f"<h2>{escape(title)}</h2>{_table(columns, (_collective_cells(r) for r in rows), 4)}"


def findings(reasons: Sequence[Reason], warnings: Sequence[str]) -> str:
    """Evidence with its checks, then warnings."""
    html = ""
    if reasons:
        html += "<h2>Why</h2>"
        for reason in reasons:
            checks = "".join(f"<li>{escape(c)}</li>" for c in reason.checks)
            html += f"<h3>{escape(reason.evidence)}</h3><p class=sub>{escape(reason.meaning)}</p>"
            html += f"<ul>{checks}</ul>" if checks else ""
    if warnings:
        html += "<h2>Warnings</h2><ul class=warn>" + "".join(f"<li>{escape(w)}</li>" for w in warnings) + "</ul>"
    return html


def _side(engine: str, ms: float | None, sms: int | None) -> list[str]:
    return [_engine(engine) if engine else "-", "-" if sms is None else str(sms), ms_text(ms)]


def _change_cells(change: CollectiveChange) -> list[str]:
    before = _side(change.engine_before, change.call_ms_before, change.sms_before)
    after = _side(change.engine_after, change.call_ms_after, change.sms_after)
    return [
        escape(change.module or "-"), escape(change.kind.replace("_", "-")), before[0], after[0], before[1], after[1],
        before[2], after[2],
    ]  # fmt: skip


def diff_tables(found: Diff) -> str:
    """Cards with changes, and the collectives side by side."""
    parts = []
    for m in found.metrics:
        if m.before is None and m.after is None:
            continue
        tone = "" if m.change is None or abs(m.change) < 0.01 else "good" if m.change < 0 else "bad"
        change = f" ({m.change:+.0%})" if m.change is not None else ""
        parts.append(_card(f"{ms_text(m.before)} → {ms_text(m.after)}", f"{_METRICS[m.name]}{change}", tone))
    columns = ("module", "collective", "before", "after", "SMs before", "after", "ms a call before", "after")
    table = _table(columns, (_change_cells(c) for c in found.collectives), 4)
    return f'<div class="cards">{"".join(parts)}</div><h2>Collectives</h2>{table}'
