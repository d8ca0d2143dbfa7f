"""Say for every device row whether it is communication, and for every collective what moved its bytes.

The one rule: device row -> its launch by correlation -> the innermost collective annotation around that launch on the
launching thread. NCCL writes collective metadata on kernels only, so copies get their meaning from this join alone.
What cannot be joined is judged by name and marked ``guess``. A copy outside every collective is communication only
between devices (PtoP); everything else stays memory traffic.

Legend: W ranks in a group; times in microseconds; bytes as nccl-tests counts them (the full buffer of an all-gather's
output or a reduce-scatter's input).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Call, Draft, finish_device_call, finish_host_call, host_draft
from fsdp_symm.trace.forest import Calls, Forest
from fsdp_symm.trace.intervals import Union
from fsdp_symm.trace.model import DeviceRow, HostRow, Spans, Trace
from fsdp_symm.trace.unjoined import unjoined_drafts

FLAG_BYTES = 4  # NCCL's barrier flags are single 32-bit words


@dataclass(frozen=True, slots=True)
class Classified:
    """One trace, judged."""

    trace: Trace
    calls: tuple[Call, ...]  # in order of their start
    compute: Union  # kernels that do not communicate; operators on a trace without a device
    compute_rows: tuple[DeviceRow, ...]
    gemm_shapes: dict[int, str]  # index into compute_rows -> input shapes of the operator that launched it
    num_local_copies: int
    local_copy_bytes: int


@dataclass(slots=True)
class _Joined:
    """Device rows sorted by what they belong to."""

    drafts: dict[int, Draft] = field(default_factory=dict)  # root row -> draft
    kernels: list[DeviceRow] = field(default_factory=list)  # communication kernels without an annotation
    copies: list[DeviceRow] = field(default_factory=list)  # device copies without an annotation
    compute: list[DeviceRow] = field(default_factory=list)
    local: list[DeviceRow] = field(default_factory=list)
    compute_launch: list[tuple[int, float] | None] = field(default_factory=list)  # thread, time


class _Joiner:
    """The join of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls = Calls(trace.comm_rows)
        self.out = _Joined()
        self._launch: dict[int, int] = {}
        self._torch_copies = _by_thread(trace.torch_copies)
        needed = {row.correlation for row in trace.device_rows}
        repeated = 0
        for i, correlation in enumerate(trace.launches.correlation):
            if correlation in needed:
                repeated += correlation in self._launch
                self._launch[correlation] = i
        if repeated:
            trace.warnings.append(f"{repeated} correlation ids name several launches: their rows may be misplaced")
        self._external = self._by_external_id()

    def _by_external_id(self) -> dict[int, int]:
        """Unique external ids of collectives: the second way to join, for rows whose launch was not recorded."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, row in enumerate(self.calls.forest.rows):
            # Kineto records no calls of the driver's API, which our own wire copies by.
            known = row.name == names.RECORD_PARAM_COMMS or row.name.startswith("fsdp_symm::")
            if row.external_id and known and self.calls.root[i] >= 0:
                found[row.external_id].append(self.calls.root[i])
        return {key: roots[0] for key, roots in found.items() if len(roots) == 1}

    def run(self) -> _Joined:
        """Sort all device rows."""
        for row in self.trace.device_rows:
            launch = self._launch.get(row.correlation) if row.correlation is not None else None
            place = None if launch is None else self._place(row, launch)
            if row.what == "kernel":
                self._kernel(row, place)
            elif row.what == "copy":
                self._copy(row, place)
        return self.out

    def _place(self, row: DeviceRow, launch: int) -> tuple[int, float] | None:
        """Thread and time of a row's launch, where they say what the row belongs to.

        The launch of a CUDA graph says nothing about its rows, unless it lies in a range of fsdp_symm's: such a range
        launches graphs of its own call and no others.
        """
        place = self.trace.launches.thread[launch], self.trace.launches.start_us[launch]
        if "GraphLaunch" not in self.trace.launches.name[launch] and row.graph_node == 0:
            return place
        found = self.calls.at(*place)
        ours = found is not None and self.calls.forest.rows[found[0]].name.startswith("fsdp_symm::")
        return place if ours else None

    def _root(self, row: DeviceRow, place: tuple[int, float] | None) -> tuple[int, int] | None:
        found = self.calls.at(*place) if place else None
        if found is None and place is None and row.external_id != row.correlation:
            root = self._external.get(row.external_id or 0)
            found = None if root is None else (root, root)
        return found if found and self.calls.kind(found[0]) is not None else None

    def _draft(self, root: int) -> Draft:
        if root not in self.out.drafts:
            self.out.drafts[root] = host_draft(self.calls, root)
        return self.out.drafts[root]

    def _kernel(self, row: DeviceRow, place: tuple[int, float] | None) -> None:
        found = self._root(row, place)
        if found and names.is_copy_kernel(row.name):
            self._draft(found[0]).kernels.append(row)
            return
        if found and names.is_sum_kernel(row.name) and self.calls.kind(found[0]) == "reduce_scatter":
            self._draft(found[0]).sums.append(row)
            return
        if names.kernel_engine(row.name) is not None:
            if found:
                self._draft(found[0]).kernels.append(row)
            else:
                self.out.kernels.append(row)
            return
        if found and self.calls.forest.rows[found[1]].name.startswith(("nccl:", names.RECORD_PARAM_COMMS)):
            self._draft(found[0]).unknown_kernels.add(names.short_kernel(row.name))
        self.out.compute.append(row)
        self.out.compute_launch.append(place)

    def _copy(self, row: DeviceRow, place: tuple[int, float] | None) -> None:
        kind = names.copy_kind(row.name)
        found = self._root(row, place)
        if kind == "host":
            # NCCL 2.28 writes its multicast flag with a four-byte copy from the host.
            if found and row.bytes == FLAG_BYTES and self._in_nccl(found[1]):
                self._draft(found[0]).flags.append(row)
            return
        by_torch = place is not None and self._asked_by_torch(*place)
        if found and (kind == "peer" or not by_torch):
            draft = self._draft(found[0])
            (draft.flags if row.bytes == FLAG_BYTES else draft.copies).append(row)
        elif kind == "peer":
            self.out.copies.append(row)
        else:
            self.out.local.append(row)

    def _in_nccl(self, i: int) -> bool:
        return any(
            self.calls.forest.rows[j].name.startswith(("nccl:", "fsdp_symm::", names.RECORD_PARAM_COMMS))
            for j in self.calls.forest.ancestors(i)
        )

    def _asked_by_torch(self, thread: int, t: float) -> bool:
        spans = self._torch_copies.get(thread)
        return spans is not None and spans.contains(t)


def _by_thread(spans: Spans) -> dict[int, Union]:
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for thread, start, end in zip(spans.thread, spans.start_us, spans.end_us, strict=True):
        found[thread].append((start, end))
    return {thread: Union.of(some) for thread, some in found.items()}


def _host_compute(trace: Trace, calls: Calls) -> Union:
    """Operators of a CPU trace, without those that a collective runs itself."""
    spans = trace.operators
    return Union.of(
        (start, end)
        for thread, start, end in zip(spans.thread, spans.start_us, spans.end_us, strict=True)
        if calls.at(thread, start) is None
    )


def _pair_gloo(calls: Calls, drafts: dict[int, Draft], roots: Sequence[int]) -> list[HostRow]:
    """Give each call the ``gloo:`` row that did its work; return the rows that no call claims.

    Gloo queues work on its own threads, first in first out, and writes no ``record_param_comms``. Its reduce-scatter
    runs as ``gloo:all_reduce``, so the operator names the kind and the gloo row gives the time.
    """
    rows = calls.forest.rows
    work = sorted((i for i in roots if rows[i].name.startswith("gloo:")), key=lambda i: rows[i].start_us)
    if not work:
        return []
    of_gloo = set(work)
    waiting = sorted(
        (i for i in roots if i not in of_gloo and not drafts.get(i, _EMPTY).on_device() and _queues_gloo(calls, i)),
        key=lambda i: rows[i].start_us,
    )
    at = 0
    for i in waiting:
        while at < len(work) and rows[work[at]].start_us < rows[i].start_us:
            at += 1
        if at == len(work):
            break
        draft = drafts.setdefault(i, host_draft(calls, i))
        draft.gloo = rows[work[at]]
        work.pop(at)
    return [rows[i] for i in work]


_EMPTY = Draft(None, (), "")


def _queues_gloo(calls: Calls, root: int) -> bool:
    inside = [row.name for row in calls.rows_of(root)]
    own_wire = calls.forest.rows[root].meta
    if own_wire and own_wire.engine == "host":
        return False
    return any(name.startswith("c10d::") for name in inside) and not any(name.startswith("nccl:") for name in inside)


def _modules(trace: Trace, forest: Forest, call: HostRow | None) -> str:
    """Module of the innermost FSDP annotation around a call, read where the call starts."""
    if call is None:
        return ""
    i = forest.innermost(call.thread, call.start_us)
    for j in forest.ancestors(i) if i is not None else ():
        module = names.fsdp_module(forest.rows[j].name)
        if module is not None:
            return module
    return ""


def _gemm_shapes(trace: Trace, joined: _Joined) -> dict[int, str]:
    """Input shapes of the matrix product behind each GEMM kernel; empty where the trace records no shapes."""
    forest = Forest(trace.gemm_rows)
    found: dict[int, str] = {}
    for i, (row, place) in enumerate(zip(joined.compute, joined.compute_launch, strict=True)):
        if place is None or not names.is_gemm_kernel(row.name):
            continue
        j = forest.innermost(*place)
        meta = forest.rows[j].meta if j is not None else None
        if meta is not None:
            found[i] = "x".join(str(list(d)).replace(" ", "") for d in meta.dims if d)
    return found


def classify(trace: Trace) -> Classified:
    """Judge one loaded trace."""
    joiner = _Joiner(trace)
    joined = joiner.run()
    calls, drafts = joiner.calls, joined.drafts
    roots = calls.roots()
    orphans = _pair_gloo(calls, drafts, roots)
    for root in roots:
        if not calls.forest.rows[root].name.startswith("gloo:"):
            drafts.setdefault(root, host_draft(calls, root))
    loose = unjoined_drafts(trace, joined.kernels, joined.copies)
    folded = _fold_coalesced([*drafts.values(), *loose], trace)
    fsdp = Forest(trace.fsdp_rows)
    done: list[Call] = []
    for draft in folded:
        draft.module = draft.module or _modules(trace, fsdp, draft.row)
        call = finish_device_call(trace, draft) if draft.on_device() else finish_host_call(trace, draft)
        done.append(call)
    for row in orphans:
        kind = names.collective_kind(row.name) or ""
        done.append(finish_host_call(trace, Draft(row, (row,), kind, gloo=row, guess=True)))
    compute = Union.of((r.start_us, r.end_us) for r in joined.compute)
    if not trace.device_rows:
        compute = _host_compute(trace, calls)
    return Classified(
        trace,
        tuple(sorted(done, key=lambda call: call.start_us)),
        compute,
        tuple(joined.compute),
        _gemm_shapes(trace, joined),
        len(joined.local),
        sum(row.bytes or 0 for row in joined.local),
    )


def _fold_coalesced(drafts: list[Draft], trace: Trace) -> list[Draft]:
    """Merge calls that were queued without a launch into the launch that ended their coalescing group.

    NCCL launches a group when it ends: the members have annotations but no device rows, and the launch has device
    rows but names no member, or names only the group.
    """
    order = sorted(drafts, key=lambda d: (d.thread, d.launch_us))
    kept: list[Draft] = []
    queued: list[Draft] = []
    for draft in order:
        if queued and queued[-1].thread != draft.thread:
            kept.extend(queued)
            queued = []
        if not draft.on_device() and draft.gloo is None and draft.own_engine() != "host":
            queued.append(draft)
            continue
        if queued and draft.ends_group():
            members = [q for q in queued if q.kind == queued[-1].kind]
            if draft.accepts(members[-1].kind):
                draft.absorb(members)
                queued = [q for q in queued if q not in members]
        kept.extend(queued)
        queued = []
        kept.append(draft)
    return kept + queued
