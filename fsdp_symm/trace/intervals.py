"""Sets of time spans. Copies of one batch overlap, so times are lengths of unions, never sums of durations.

A span is ``(start_us, end_us)``; a ``Union`` holds disjoint spans in ascending order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Union:
    """Disjoint ascending spans with prefix sums, so that one overlap query costs a binary search."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    covered_us: tuple[float, ...]  # covered_us[i] = total length of the spans before i

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Union:
        """Merge spans in any order; spans without length vanish."""
        starts: list[float] = []
        ends: list[float] = []
        for start, end in sorted(spans):
            if end <= start:
                continue
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        covered = [0.0]
        for start, end in zip(starts, ends, strict=True):
            covered.append(covered[-1] + end - start)
        return cls(tuple(starts), tuple(ends), tuple(covered))

    @property
    def length_us(self) -> float:
        """Total length."""
        return self.covered_us[-1]

    def _before(self, t: float) -> float:
        i = bisect_right(self.starts, t)
        if i == 0:
            return 0.0
        return self.covered_us[i - 1] + min(t, self.ends[i - 1]) - self.starts[i - 1]

    def overlap_us(self, span: Span) -> float:
        """Length of the part of ``span`` that this union covers."""
        return max(0.0, self._before(span[1]) - self._before(span[0]))

    def intersect_us(self, other: Union) -> float:
        """Length that both unions cover."""
        small, big = (self, other) if len(self.starts) <= len(other.starts) else (other, self)
        return sum(big.overlap_us(span) for span in zip(small.starts, small.ends, strict=True))

    def contains(self, t: float) -> bool:
        """True when ``t`` lies in one of the spans, ends included."""
        i = bisect_right(self.starts, t)
        return i > 0 and t <= self.ends[i - 1]

    def spans(self) -> list[Span]:
        """The disjoint spans in ascending order."""
        return list(zip(self.starts, self.ends, strict=True))
