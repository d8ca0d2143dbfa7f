"""Rows of one rank for the drawn timeline: few enough to draw, named well enough to hover."""

from __future__ import annotations

from typing import Any

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Call
from fsdp_symm.trace.classify import FLAG_BYTES, Classified
from fsdp_symm.trace.render import ms_text, size_text
from fsdp_symm.trace.report import RankReport, window_us

_LANES = ("compute", "copy engine", "comm kernels", "host")
_MAX_COMPUTE = 4000
_Row = tuple[int, float, float, str, str]  # lane, start_us, duration_us, colour, text


def _call_text(call: Call) -> str:
    parts = [
        call.kind.replace("_", "-") + (f" of {call.module}" if call.module else ""),
        names.ENGINE_LABELS[call.engine] + (f", {call.sms} SMs" if call.sms else ""),
    ]
    if call.bytes is not None:
        parts.append(size_text(call.bytes) + (f", bus {call.busbw_gbps:.3g} GB/s" if call.busbw_gbps else ""))
    if call.wait_us is not None:
        parts.append(f"wait {ms_text(call.wait_us / 1e3)} of {ms_text(call.duration_us / 1e3)} ms")
    if call.kernels:
        parts.append(", ".join(call.kernels))
    if call.guess:
        parts.append("judged by name")
    return "\n".join(parts)


def _comm_rows(calls: tuple[Call, ...]) -> list[_Row]:
    rows: list[_Row] = []
    for call in calls:
        text = _call_text(call)
        if call.engine == "host":
            rows.append((3, call.start_us, call.duration_us, "host", text))
        if call.engine == "copy_engine":  # the band behind the copies: the call is in flight, its stream may wait
            rows.append((1, call.start_us, call.duration_us, "flag", text))
        for row in call.rows:
            lane = 2 if row.what == "kernel" else 1
            flag = row.what == "copy" and row.bytes == FLAG_BYTES
            shade = "flag" if flag else (names.kernel_engine(row.name) or "mixed") if lane == 2 else "copy_engine"
            what = "barrier flag" if flag else f"this copy: {size_text(row.bytes or 0)}" if lane == 1 else ""
            rows.append((lane, row.start_us, row.end_us - row.start_us, shade, f"{text}\n{what}".strip()))
    return rows


def _compute_rows(judged: Classified) -> tuple[list[_Row], bool]:
    """Compute kernels one by one, or merged spans where there are too many to draw."""
    kernels = judged.compute_rows
    if kernels and len(kernels) <= _MAX_COMPUTE:
        return [(0, r.start_us, r.end_us - r.start_us, "compute", names.short_kernel(r.name)) for r in kernels], False
    spans = judged.compute.spans()
    if not spans:
        return [], False
    gap = (spans[-1][1] - spans[0][0]) / _MAX_COMPUTE
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] < gap:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return [(0, start, end - start, "compute", "compute") for start, end in merged], True


def timeline(judged: Classified, rank: RankReport) -> dict[str, Any]:
    """What `page.js` draws for one rank; times start at 0."""
    compute, merged = _compute_rows(judged)
    rows = compute + _comm_rows(rank.calls)
    low, high = window_us(judged)
    if rank.steps and len(rank.steps) == 1 and rank.steps[0].number is not None and rows:
        mine = [r for r in rows if r[0] != 0]
        low = min((r[1] for r in mine), default=low)
        high = max((r[1] + r[2] for r in mine), default=high)
        rows = [r for r in rows if r[1] + r[2] >= low and r[1] <= high]
    used = sorted({row[0] for row in rows} | {0})
    texts: dict[str, int] = {}
    packed = [
        [
            used.index(lane),
            round(start - low, 3),
            round(length, 3),
            texts.setdefault(shade, len(texts)),
            texts.setdefault(text, len(texts)),
        ]
        for lane, start, length, shade, text in rows
    ]
    lanes = [_LANES[i] for i in used]
    return {
        "label": rank.label,
        "span_us": round(high - low, 3),
        "lanes": lanes,
        "names": list(texts),
        "rows": packed,
        "merged": merged,
    }
