"""What really moved the bytes: a reader, a judge and a reporter for Kineto chrome traces. Never imports torch."""

from __future__ import annotations

from fsdp_symm.trace.api import TraceSummary, inspect_traces, summarize
from fsdp_symm.trace.scan import TraceError

__all__ = ["TraceError", "TraceSummary", "inspect_traces", "summarize"]
