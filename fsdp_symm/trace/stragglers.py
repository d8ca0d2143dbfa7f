"""Which rank the others wait for.

A collective's row on a rank lasts from the rank's own arrival to the common end, so the shortest row belongs to the
rank that arrived last and ``duration - shortest`` is what a rank waited. This needs no common clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_symm.trace.calls import Call
    from fsdp_symm.trace.report import RankReport


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank, over the calls that were found on at least one other rank."""

    rank: int
    num_matched: int
    num_last: int  # calls in which this rank arrived last
    waited_ms: float  # time spent in collectives beyond the shortest rank's
    worst_skew_us: float  # largest such wait in one call


def _matched(ranks: Sequence[RankReport]) -> list[list[tuple[int, Call]]]:
    """Calls of the same group and sequence number, or of the same place in order where there is no number."""
    found: dict[tuple[object, ...], list[tuple[int, Call]]] = defaultdict(list)
    for report in ranks:
        order: dict[tuple[object, ...], int] = defaultdict(int)
        for call in report.calls:
            if report.rank is None or call.duration_us <= 0 or call.guess:
                continue
            group = (call.kind, call.group, call.group_ranks)
            place = order[group] = order[group] + 1
            found[*group, call.seq if call.seq is not None else f"#{place}"].append((report.rank, call))
    return [some for some in found.values() if len({rank for rank, _ in some}) == len(some) >= 2]


def stragglers(ranks: Sequence[RankReport]) -> tuple[Straggler, ...]:
    """One row per rank; empty below two distinct ranks or where nothing matches."""
    numbers = [r.rank for r in ranks if r.rank is not None]
    if len(set(numbers)) != len(numbers) or len(numbers) < 2:
        return ()
    waits: dict[int, list[float]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    for some in _matched(ranks):
        shortest = min(call.duration_us for _, call in some)
        for rank, call in some:
            waits[rank].append(call.duration_us - shortest)
        last[min(some, key=lambda pair: pair[1].duration_us)[0]] += 1
    return tuple(
        Straggler(rank, len(waits[rank]), last[rank], sum(waits[rank]) / 1e3, max(waits[rank]))
        for rank in sorted(waits)
    )
