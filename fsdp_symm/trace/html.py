"""A self-contained HTML page: cards, a timeline on canvas, tables. No network, no library.

Plotly's bundle is several MB of script for each page; the timeline here is 120 lines (`page.js`), so a report of a
step is well below 1 MB and opens from a mail attachment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from fsdp_symm.trace import names
from fsdp_symm.trace.classify import Classified
from fsdp_symm.trace.diff import Diff
from fsdp_symm.trace.page_parts import cards, collectives, diff_tables, findings, overview
from fsdp_symm.trace.report import Report
from fsdp_symm.trace.timeline import timeline

_MAX_RANKS = 8


def _asset(name: str) -> str:
    return resources.files("fsdp_symm.trace").joinpath(name).read_text(encoding="utf-8")


def _embed(data: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _shown(judged: Sequence[Classified], report: Report) -> list[int]:
    """Indices of the ranks to draw: the most exposed first when there are many."""
    order = sorted(range(len(judged)), key=lambda i: -report.ranks[i].exposed_ms)[:_MAX_RANKS]
    return sorted(order) if len(judged) <= _MAX_RANKS else order


def _view(title: str, judged: Sequence[Classified], report: Report) -> dict[str, Any]:
    return {"title": title, "ranks": [timeline(judged[i], report.ranks[i]) for i in _shown(judged, report)]}


def _plot(view: dict[str, Any], total: int) -> str:
    ranks = view["ranks"]
    options = "".join(f'<option value="{i}">{escape(r["label"])}</option>' for i, r in enumerate(ranks))
    pick = f"<label>rank <select>{options}</select></label>" if len(ranks) > 1 else escape(ranks[0]["label"])
    cut = f" · the {len(ranks)} most exposed of {total} ranks" if total > len(ranks) else ""
    merged = " · compute rows that lie close together are merged" if any(r["merged"] for r in ranks) else ""
    title = f"<h3>{escape(view['title'])}</h3>" if view["title"] else ""
    label = escape(view["title"] or "the trace")
    return (
        f'<section>{title}<div class="bar">{pick}{cut}{merged}</div>'
        f'<div class="plot"><canvas role="img" aria-label="timeline of {label}"></canvas>'
        "</div></section>"
    )


def _legend(views: Sequence[dict[str, Any]]) -> str:
    used = {r["names"][row[3]] for v in views for r in v["ranks"] for row in r["rows"]}
    labels = {"compute": "compute", **names.ENGINE_LABELS, "flag": "copy engine waiting"}
    items = "".join(
        f'<span class="engine" style="--c:var(--{key})">{escape(label)}</span>'
        for key, label in labels.items()
        if key in used
    )
    return f'<div class="legend">{items}</div>'


def _timeline(views: Sequence[dict[str, Any]], totals: Sequence[int]) -> str:
    buttons = (
        '<div class="bar"><button data-zoom="0.5">zoom in</button><button data-zoom="2">zoom out</button>'
        '<button data-zoom="all">all</button><span>drag to move, Ctrl + wheel to zoom</span></div>'
    )
    plots = "".join(_plot(view, total) for view, total in zip(views, totals, strict=True))
    return f"<h2>Timeline</h2>{_legend(views)}{buttons}{plots}"


def _page(title: str, subtitle: str, verdict: str, body: str, views: Sequence[dict[str, Any]]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>'
        f'<p class="verdict">{escape(verdict)}</p>{body}'
        "<footer>Written by fsdp-symm. Times in milliseconds; bandwidths follow nccl-tests, in 1e9 bytes a second."
        '</footer></main><div id="tip" role="tooltip"></div>'
        f'<script type="application/json" id="data">{_embed({"views": views})}</script>'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def inspect_page(judged: Sequence[Classified], report: Report) -> str:
    """The page of one set of traces."""
    views = [_view("", judged, report)]
    first = report.ranks[0]
    subtitle = "  ·  ".join(
        part
        for part in (
            f"{len(report.ranks)} traces" if len(report.ranks) > 1 else first.path.rsplit("/", 1)[-1],
            first.device,
            f"NCCL {first.nccl_version}" if first.nccl_version else "",
        )
        if part
    )
    body = (
        cards(report)
        + _timeline(views, [len(report.ranks)])
        + overview(report)
        + "".join(collectives(report.ranks[i], len(report.ranks) > 1) for i in _shown(judged, report))
        + findings(report.reasons, report.warnings)
    )
    return _page("What moved the bytes", subtitle, report.verdict, body, views)


def diff_page(judged: Sequence[Sequence[Classified]], reports: Sequence[Report], found: Diff) -> str:
    """The page of a comparison: both timelines on one time scale."""
    views = [_view(t, j, r) for t, j, r in zip(("Before", "After"), judged, reports, strict=True)]
    subtitle = "  ·  ".join(r.ranks[0].path.rsplit("/", 1)[-1] for r in reports)
    body = diff_tables(found) + _timeline(views, [len(r.ranks) for r in reports]) + findings((), found.warnings)
    return _page("Before and after", subtitle, found.verdict.replace("->", "→"), body, views)
