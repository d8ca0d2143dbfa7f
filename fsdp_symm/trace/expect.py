"""``--expect``: a claim about engines that a CI job can fail on."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Call
from fsdp_symm.trace.diagnose import COPY_ENGINE_KINDS
from fsdp_symm.trace.report import Report
from fsdp_symm.trace.scan import TraceError
from fsdp_symm.trace.verdict import plural

_KINDS = (
    "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "gather", "scatter", "reduce",
    "send_recv", "peer_copy", "dispatch", "combine",
)  # fmt: skip
_ENGINES = {engine.replace("_", "-"): engine for engine in names.ENGINE_LABELS if engine not in ("mixed", "none_seen")}


@dataclass(frozen=True, slots=True)
class Expectation:
    """``engine`` must carry every call of ``kinds``."""

    engine: str
    kinds: tuple[str, ...]  # empty: every kind that carries bytes
    named: bool = False  # the user named the kinds, so each must occur

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Read ``ENGINE[:KIND,KIND]``.

        Without kinds, ``copy-engine`` covers what NCCL can give to copy engines: the kinds that need no arithmetic.

        Raises:
            TraceError: unknown engine or kind.
        """
        engine, colon, kinds = text.partition(":")
        if engine not in _ENGINES:
            raise TraceError(f"--expect {text}: unknown engine {engine!r}; expected one of {', '.join(_ENGINES)}")
        named = tuple(k.strip().replace("-", "_") for k in kinds.split(",") if k.strip())
        if colon and not named:
            raise TraceError(f"--expect {text}: no collective after ':'; expected one of {', '.join(_KINDS)}")
        for kind in named:
            if kind not in _KINDS:
                raise TraceError(f"--expect {text}: unknown collective {kind!r}; expected one of {', '.join(_KINDS)}")
        if named or engine != "copy-engine":
            return cls(_ENGINES[engine], named, bool(named))
        return cls(_ENGINES[engine], (*COPY_ENGINE_KINDS, "peer_copy"))

    def concerns(self, call: Call) -> bool:
        """True for a call that the claim is about; barriers and empty calls carry nothing."""
        return (call.kind in self.kinds or not self.kinds) and call.kind != "barrier" and call.bytes != 0

    def complaints(self, report: Report) -> list[str]:
        """Why the claim does not hold, one line each; empty when it holds."""
        calls = [(rank, call) for rank in report.ranks for call in rank.calls if self.concerns(call)]
        label = names.ENGINE_LABELS[self.engine]
        kinds = ", ".join(plural(k) for k in self.kinds) or "collectives"
        if not calls:
            return [f"no {kinds} in the trace: nothing shows the {label}"]
        seen = {call.kind for _, call in calls}
        absent = [k for k in self.kinds if self.named and k not in seen]
        lines = [f"no {plural(k)} in the trace: nothing shows the {label}" for k in absent]
        if not report.complete:
            lines.append("rows are missing from the trace, so the rest of the calls cannot be vouched for")
        lines += [
            f"{rank.label}: {call.kind} {call.module or call.group or call.name} at {call.start_us:.0f} us: "
            "barrier flags but no payload"
            for rank, call in calls
            if call.engine == self.engine == "copy_engine" and not call.num_copies
        ]
        lines += [
            f"{rank.label}: {call.kind} {call.module or call.group or call.name} at {call.start_us:.0f} us: "
            f"{names.ENGINE_LABELS[call.engine]}{' ' + ', '.join(call.kernels) if call.kernels else ''}, "
            f"not the {label}"
            for rank, call in calls
            if call.engine != self.engine
        ]
        return lines
