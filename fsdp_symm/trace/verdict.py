"""One sentence about what moved the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_symm.trace import names

if TYPE_CHECKING:
    from fsdp_symm.trace.calls import Call
    from fsdp_symm.trace.report import RankReport

_ORDER = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
_PLURALS = {"peer_copy": "peer copies", "send_recv": "sends and receives", "unknown": "unnamed collectives"}
_PHRASES = {
    "copy_engine": "used the copy engine",
    "symmetric_kernel": "ran as symmetric kernels",
    "plain_kernel": "ran as plain kernels",
    "symm_mem_kernel": "ran as torch symm_mem kernels",
    "ep_kernel": "ran as EP kernels",
    "mixed": "mixed engines",
    "host": "were moved by the host",
    "none_seen": "left no device row",
}


def plural(kind: str, count: int = 2) -> str:
    """``all_gather`` -> ``all-gathers``; the singular for a count of one."""
    word = kind.replace("_", "-")
    if count == 1:
        return word
    if kind in _PLURALS:
        return _PLURALS[kind]
    return word if word.endswith("s") else word + ("es" if word.endswith("ch") else "s")


def _phrase(kind: str, engine: str, calls: Sequence[Call], total: int) -> str:
    mine = [c for c in calls if c.kind == kind and c.engine == engine]
    text = f"{len(mine)} of {total} {plural(kind, total)} {_PHRASES[engine]}"
    sms = max(c.sms for c in mine)
    if engine == "host":
        text += f" ({', '.join(sorted({c.wire for c in mine}))})"
    return f"{text} ({sms} SM{'s' if sms > 1 else ''})" if sms else text


def verdict(ranks: Sequence[RankReport]) -> str:
    """What moved the bytes, and how much of the time nothing else ran; barriers and empty calls do not count.

    Milliseconds are means over the ranks, so that a rank more does not read as time more.
    """
    calls = [c for r in ranks for c in r.calls if c.kind != "barrier" and c.bytes != 0]
    suffix = "" if all(r.complete for r in ranks) else " (partial: rows are missing)"
    if not calls:
        return f"No communication found in {len(ranks)} trace{'s' if len(ranks) != 1 else ''}{suffix}."
    totals = Counter(c.kind for c in calls)
    engines = Counter((c.kind, c.engine) for c in calls)
    kinds = sorted(totals, key=lambda k: (_ORDER.index(k) if k in _ORDER else len(_ORDER), k))
    engine_order = list(names.ENGINE_LABELS)
    parts = [
        _phrase(kind, engine, calls, totals[kind])
        for kind in kinds
        for engine in engine_order
        if engines[kind, engine]  # type: ignore[index]  # Counter answers 0 for what it does not hold
    ]
    comm = sum(r.comm_ms for r in ranks) / len(ranks)
    exposed = sum(r.exposed_ms for r in ranks) / len(ranks)
    share = f", {exposed / comm:.0%}" if comm > 0 else ""
    mean = " per rank" if len(ranks) > 1 else ""
    return f"{', '.join(parts)}; {exposed:.2f} of {comm:.2f} ms{mean} communication exposed{share}{suffix}."
