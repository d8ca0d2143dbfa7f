"""Nesting of CPU rows: which collective annotation encloses a moment on a thread, and which row stands for the call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fsdp_symm.trace import names
from fsdp_symm.trace.model import HostRow


class Forest:
    """Rows of all threads as trees by time containment."""

    def __init__(self, rows: Sequence[HostRow]) -> None:
        self.rows = sorted(rows, key=lambda r: (r.thread, r.start_us, -r.end_us))
        self.parent = [-1] * len(self.rows)
        self.children: list[list[int]] = [[] for _ in self.rows]
        self._by_thread: dict[int, tuple[int, list[float]]] = {}  # thread -> (index of its first row, starts)
        stack: list[int] = []
        for i, row in enumerate(self.rows):
            if row.thread not in self._by_thread:
                self._by_thread[row.thread] = (i, [])
                stack.clear()
            self._by_thread[row.thread][1].append(row.start_us)
            while stack and not self._encloses(self.rows[stack[-1]], row):
                stack.pop()
            if stack:
                self.parent[i] = stack[-1]
                self.children[stack[-1]].append(i)
            stack.append(i)

    @staticmethod
    def _encloses(outer: HostRow, row: HostRow) -> bool:
        # Old traces round to whole microseconds, so an inner row can end up to one later than its parent.
        return outer.end_us >= row.end_us - 1.0 and outer.end_us > row.start_us

    def innermost(self, thread: int, t: float) -> int | None:
        """Index of the innermost row that encloses ``t`` (microseconds) on ``thread``."""
        if thread not in self._by_thread:
            return None
        first, starts = self._by_thread[thread]
        i = first + bisect_right(starts, t) - 1
        while i >= first:
            if self.rows[i].end_us >= t:
                return i
            i = self.parent[i]
        return None

    def ancestors(self, i: int) -> Iterator[int]:
        """``i`` and the rows around it, from the inside out."""
        while i >= 0:
            yield i
            i = self.parent[i]

    def tree(self, i: int) -> Iterator[int]:
        """``i`` and everything inside it, outside first."""
        waiting = [i]  # a loop: damaged traces nest thousands deep
        while waiting:
            at = waiting.pop()
            yield at
            waiting.extend(reversed(self.children[at]))


class Calls:
    """Which row of a forest stands for one collective call, so that nested rows count once.

    The order of preference: our own annotation, a torch symm_mem operator, ``record_param_comms``, and where there is
    none of these, the outermost ``c10d::`` / ``nccl:`` / ``gloo:`` row.
    """

    def __init__(self, rows: Sequence[HostRow]) -> None:
        self.forest = Forest(rows)
        self.root = [-1] * len(self.forest.rows)
        self._kinds: dict[int, str | None] = {}
        strong = [False] * len(self.forest.rows)
        for i, row in enumerate(self.forest.rows):
            parent = self.forest.parent[i]
            if parent >= 0 and self.root[parent] >= 0 and strong[self.root[parent]]:
                self.root[i] = self.root[parent]
            elif self._is_strong(row):
                self.root[i], strong[i] = i, True
            else:
                self.root[i] = self.root[parent] if parent >= 0 and self.root[parent] >= 0 else i
        for i in range(len(self.forest.rows)):
            if self.root[i] == i and not strong[i]:
                self._hand_down(i, strong)

    @staticmethod
    def _is_strong(row: HostRow) -> bool:
        if row.name == names.RECORD_PARAM_COMMS:
            return True
        return row.name.startswith(("fsdp_symm::", "symm_mem::")) and names.collective_kind(row.name) is not None

    def _hand_down(self, i: int, strong: list[bool]) -> None:
        """An operator around strong rows is no call of its own: it joins the only one, or none of several."""
        inside = [j for j in self.forest.tree(i) if strong[j]]
        if not inside:
            return
        for j in self.forest.tree(i):
            if self.root[j] == i:
                self.root[j] = inside[0] if len(inside) == 1 else -1

    def at(self, thread: int, t: float) -> tuple[int, int] | None:
        """(root row, innermost row) around a moment on a thread."""
        i = self.forest.innermost(thread, t)
        return None if i is None or self.root[i] < 0 else (self.root[i], i)

    def kind(self, root: int) -> str | None:
        """Kind of the collective, or None for rows such as ``wait`` that move nothing."""
        if root not in self._kinds:
            self._kinds[root] = self._find_kind(root)
        return self._kinds[root]

    def _find_kind(self, root: int) -> str | None:
        row = self.forest.rows[root]
        said = row.meta.collective if row.meta else ""
        if said:
            found = names.collective_kind(said)
            if found or said in ("wait", "init"):
                return found
        around = [*self.forest.tree(root), *self.forest.ancestors(root)]
        for i in around:
            found = names.collective_kind(self.forest.rows[i].name)
            if found:
                return found
        return None

    def rows_of(self, root: int) -> list[HostRow]:
        """The root, what it encloses, and the operators around it that joined it."""
        inside = [self.forest.rows[i] for i in self.forest.tree(root)]
        around = [self.forest.rows[i] for i in self.forest.ancestors(self.forest.parent[root])]
        return inside + around

    def roots(self) -> list[int]:
        """Roots that are collectives, in the order of the forest."""
        return [i for i in range(len(self.root)) if self.root[i] == i and self.kind(i) is not None]
