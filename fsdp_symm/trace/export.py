"""The report as JSON; `docs/inspect.md` is the schema."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_symm.trace.report import Report


def to_builtins(report: Report) -> dict[str, Any]:
    """Dictionaries and lists; each call gains its derived values and loses its device rows."""
    found = msgspec.to_builtins(report)
    for rank, plain in zip(report.ranks, found["ranks"], strict=True):
        for call, row in zip(rank.calls, plain["calls"], strict=True):
            del row["rows"]
            row["duration_us"] = call.duration_us
            row["algbw_gbps"] = call.algbw_gbps
            row["busbw_gbps"] = call.busbw_gbps
    return found


def to_json(value: Any) -> str:
    """Indented JSON text."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
