"""From the rows of one collective to its facts: engine, bytes, times, SMs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_symm.trace import names
from fsdp_symm.trace.forest import Calls
from fsdp_symm.trace.intervals import Union
from fsdp_symm.trace.model import CommMeta, DeviceRow, HostRow, Trace


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call on one rank."""

    kind: str  # all_gather, reduce_scatter, all_to_all, all_reduce, ..., peer_copy
    engine: names.Engine
    wire: str  # "nccl", "fsdp_symm", "symm_mem", "gloo", "shared memory", "peer copy" or "unknown"
    name: str  # the annotation that stands for the call
    module: str  # "" where no FSDP annotation encloses it
    group: str
    group_size: int | None
    group_ranks: str
    seq: int | None
    start_us: float
    end_us: float
    launch_us: float  # when the CPU asked for it; start_us where unknown
    transfer_us: float  # union of payload copies or kernels
    wait_us: float | None  # duration - transfer; None where one rank cannot tell them apart
    bytes: int | None
    bytes_from: str  # "metadata", "shapes", "copies" or "none"
    copied_bytes: int  # sum over payload copies
    num_copies: int
    num_flags: int
    pattern: str  # how the copies are laid out
    kernels: tuple[str, ...]
    sms: int  # largest grid among its kernels, at most the device's SMs
    sm_us: float  # sum of SMs x duration over its kernels
    dtype: str
    split: bool
    guess: bool  # judged by name, not by an annotation
    notes: tuple[str, ...]
    rows: tuple[DeviceRow, ...] = field(repr=False)  # its device rows, for timelines

    @property
    def duration_us(self) -> float:
        """First start to last end."""
        return self.end_us - self.start_us

    @property
    def algbw_gbps(self) -> float | None:
        """Algorithm bandwidth, 1e9 bytes a second: bytes over duration."""
        if self.bytes is None or self.duration_us <= 0:
            return None
        return self.bytes / self.duration_us / 1e3

    @property
    def busbw_gbps(self) -> float | None:
        """Bus bandwidth by the nccl-tests convention; None where the group size is unknown."""
        if self.algbw_gbps is None or self.group_size is None:
            return None
        return self.algbw_gbps * names.bus_factor(self.kind, self.group_size)


@dataclass(slots=True, eq=False)
class Draft:
    """Rows collected for one call."""

    row: HostRow | None
    tree: tuple[HostRow, ...]
    kind: str
    kernels: list[DeviceRow] = field(default_factory=list)
    copies: list[DeviceRow] = field(default_factory=list)
    flags: list[DeviceRow] = field(default_factory=list)
    sums: list[DeviceRow] = field(default_factory=list)  # of pulled chunks: SMs are busy, but move nothing
    unknown_kernels: set[str] = field(default_factory=set)
    gloo: HostRow | None = None
    meta: CommMeta | None = None
    module: str = ""
    guess: bool = False
    notes: list[str] = field(default_factory=list)
    launch: tuple[int, float] | None = None  # thread and time, for drafts without a row
    extra_bytes: int | None = None  # bytes of the members of a coalesced group

    def on_device(self) -> bool:
        """True when device rows were found."""
        return bool(self.kernels or self.copies or self.flags)

    def own_engine(self) -> str:
        """The engine that this package's annotation states, if any."""
        return self.row.meta.engine if self.row and self.row.meta else ""

    @property
    def thread(self) -> int:
        """Launching thread, -1 where unknown."""
        return self.row.thread if self.row else self.launch[0] if self.launch else -1

    @property
    def launch_us(self) -> float:
        """Start of the annotation or of the launch; the first device row where neither is known."""
        if self.row:
            return self.row.start_us
        if self.launch:
            return self.launch[1]
        return min((r.start_us for r in self.device_rows()), default=0.0)

    def device_rows(self) -> list[DeviceRow]:
        """All device rows of the call."""
        return [*self.kernels, *self.copies, *self.flags, *self.sums]

    def ends_group(self) -> bool:
        """True for a launch that names no member: by its annotation, or because it has none."""
        named = any("coalesced" in r.name.lower() or "coalesced" in _said(r) for r in self.tree)
        return named or (self.row is None and self.launch is not None)

    def accepts(self, kind: str) -> bool:
        """True when the launch can stand for members of this kind."""
        return self.kind in (kind, "unknown", "send_recv") or bool(self.row)

    def absorb(self, members: list[Draft]) -> None:
        """Take over the identity of a group's members; their bytes add up."""
        self.notes.append(f"coalesces {len(members)} calls")
        self.kind, self.guess = members[-1].kind, self.row is None
        sizes = [payload_bytes(m.kind, m.tree, m.meta)[0] for m in members]
        self.extra_bytes = sum(s for s in sizes if s is not None) if all(s is not None for s in sizes) else None
        self.tree = (*self.tree, *members[-1].tree)
        self.row = self.row or members[0].row


def _said(row: HostRow) -> str:
    return row.meta.collective if row.meta else ""


def host_draft(calls: Calls, root: int) -> Draft:
    """Start a draft from its root row."""
    row = calls.forest.rows[root]
    draft = Draft(row, tuple(calls.rows_of(root)), calls.kind(root) or "")
    draft.module = row.meta.module if row.meta else ""
    return draft


def _group(trace: Trace, draft: Draft) -> tuple[str, int | None, int | None, list[str]]:
    """Group name, size, sequence number, and what had to be assumed."""
    metas = [r.meta for r in draft.tree if r.meta] + ([draft.meta] if draft.meta else [])
    group = next((m.group for m in metas if m.group), "")
    seq = next((m.seq for m in metas if m.seq is not None), None)
    size = next((m.group_size for m in metas if m.group_size), None) or trace.groups.get(group)
    if size is None:
        size = _size_from_shapes(draft)
    if size is not None:
        return group, size, seq, []
    if trace.world_size and {n for n in trace.groups.values() if n > 1} <= {trace.world_size}:
        return group, trace.world_size, seq, ["group size taken from the world size"]
    return group, None, seq, []


def _numel(dims: tuple[int, ...]) -> int:
    return math.prod(dims)  # 1 for the empty shape of a single number


def _size_from_shapes(draft: Draft) -> int | None:
    """W from the shapes of c10d's base operators: output over input, or the inverse."""
    for row in draft.tree:
        if row.name not in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            continue
        if row.meta and len(row.meta.dims) > 1:
            sizes = sorted(_numel(d) for d in row.meta.dims[:2])
            if sizes[0] and sizes[1] % sizes[0] == 0:
                return sizes[1] // sizes[0]
    return None


def payload_bytes(
    kind: str, tree: tuple[HostRow, ...], kernel_meta: CommMeta | None, group_size: int | None = None
) -> tuple[int | None, str]:
    """Bytes of a call and where they come from, before looking at copies.

    All-gather: the full output. Reduce-scatter: the full input. All-to-all and all-reduce: the input. Others: the
    larger side.
    """
    metas = [r.meta for r in tree if r.meta] + ([kernel_meta] if kernel_meta else [])
    for meta in metas:
        if meta.bytes is not None:
            return meta.bytes, "metadata"
    for meta in metas:
        size = names.element_bytes(meta.dtype) if meta.dtype else None
        if size and meta.in_nelems is not None and meta.out_nelems is not None:
            sides = (meta.in_nelems, meta.out_nelems)
            n = sides[0] if kind in ("all_to_all", "all_reduce") else max(sides)
            return n * size, "metadata"
    for row in tree:
        found = _bytes_from_shapes(kind, row, group_size)
        if found is not None:
            return found, "shapes"
    return None, "none"


def _bytes_from_shapes(kind: str, row: HostRow, group_size: int | None) -> int | None:
    """Bytes by the shapes of the operator or of the ``nccl:`` row, whose only argument is the input."""
    if row.meta is None or not row.meta.dims or not row.meta.types:
        return None
    size = names.element_bytes(row.meta.types[0]) or 0
    numel = [_numel(d) for d in row.meta.dims]
    if not size:
        return None
    if row.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"):
        return max(numel[:2]) * size
    if row.name.startswith(("nccl:", "gloo:", "symm_mem::")):
        if kind == "all_gather":
            return numel[0] * size * group_size if group_size else None
        return numel[0] * size
    return None


def _engine(draft: Draft) -> names.Engine:
    engines: set[names.Engine] = {e for r in draft.kernels if (e := names.kernel_engine(r.name)) is not None}
    if any(names.is_copy_kernel(r.name) for r in draft.kernels):
        engines.add("plain_kernel")
    if draft.copies and all(names.only_synchronises(r.name) for r in draft.kernels):
        return "copy_engine"  # torch's low-contention collectives: peer copies between two barrier kernels
    if draft.copies or (draft.flags and not engines):
        engines.add("copy_engine")
    return engines.pop() if len(engines) == 1 else "mixed"


def _pattern(draft: Draft, group_size: int | None) -> str:
    """How the payload copies are laid out; counts only, so multicast and batches are inferences."""
    n = len(draft.copies)
    if n == 0 or group_size is None:
        return ""
    equal = len({r.bytes for r in draft.copies}) == 1
    if equal and n in (group_size - 1, group_size):
        return "unicast"
    if equal and n == 1:
        return "multicast"
    return f"batch of {n}"


def _wire(draft: Draft) -> str:
    texts = [r.name for r in draft.tree]
    if draft.gloo is not None:
        return "gloo"
    if any(t.startswith("nccl:") for t in texts) or any("nccl" in r.name.lower() for r in draft.kernels):
        return "nccl"
    if any(t.startswith("fsdp_symm::") for t in texts):
        return "shared memory" if draft.own_engine() == "host" else "fsdp_symm"
    if any(t.startswith("symm_mem::") for t in texts) or draft.kernels:
        return "symm_mem"
    return "peer copy" if draft.copies else "unknown"


def finish_device_call(trace: Trace, draft: Draft) -> Call:
    """A call with device rows."""
    group, size, seq, notes = _group(trace, draft)
    engine = _engine(draft)
    rows = draft.device_rows()
    start, end = min(r.start_us for r in rows), max(r.end_us for r in rows)
    moved = draft.kernels + draft.copies
    transfer = Union.of((r.start_us, r.end_us) for r in moved).length_us
    found, source = payload_bytes(draft.kind, draft.tree, draft.meta, size)
    if draft.extra_bytes is not None:
        found, source = draft.extra_bytes, "metadata"
    copied = sum(r.bytes or 0 for r in draft.copies)
    if found is None and copied:
        found, source = _bytes_from_copies(draft.kind, copied, size), "copies"
    if not moved:
        notes.append("only barrier flags in the trace: the payload was not recorded")
    if size == 1:
        notes.append("group of one rank: nothing to move")
        engine = engine if draft.kernels else "none_seen"
    unsure = engine == "copy_engine" and size is None and not draft.flags and _only_local(draft)
    if unsure:
        notes.append("only local copies, no flags and no group size: this may be a group of one rank")
    limit = trace.num_sms or 1 << 30
    grids = [
        (min(math.prod(r.grid), limit) if r.grid else 0, r.end_us - r.start_us) for r in draft.kernels + draft.sums
    ]
    return Call(
        kind=draft.kind, engine=engine, wire=_wire(draft), name=draft.row.name if draft.row else "",
        module=draft.module, group=group, group_size=size, group_ranks=_ranks(draft), seq=seq,
        start_us=start, end_us=end, launch_us=draft.launch_us, transfer_us=transfer,
        wait_us=end - start - transfer if engine == "copy_engine" else None,
        bytes=found, bytes_from=source, copied_bytes=copied, num_copies=len(draft.copies),
        num_flags=len(draft.flags), pattern=_pattern(draft, size),
        kernels=tuple(sorted({names.short_kernel(r.name) for r in draft.kernels})),
        sms=max((sms for sms, _ in grids), default=0), sm_us=sum(sms * us for sms, us in grids),
        dtype=_dtype(draft), split=_split(draft), guess=draft.guess or unsure, notes=tuple(draft.notes + notes),
        rows=tuple(rows),
    )  # fmt: skip


def _only_local(draft: Draft) -> bool:
    """Whether an NCCL call moved nothing but local copies, as ranks on one GPU do, and a group of one rank."""
    return _wire(draft) == "nccl" and all(names.copy_kind(r.name) == "local" for r in draft.copies)


def _bytes_from_copies(kind: str, copied: int, size: int | None) -> int | None:
    """An in-place gather receives (W-1)/W of its output; other kinds move what they say."""
    if kind == "all_gather":
        return copied * size // (size - 1) if size and size > 1 else None
    return copied


def _ranks(draft: Draft) -> str:
    metas = [r.meta for r in draft.tree if r.meta] + ([draft.meta] if draft.meta else [])
    return next((m.group_ranks for m in metas if m.group_ranks), "")


def _dtype(draft: Draft) -> str:
    metas = [r.meta for r in draft.tree if r.meta] + ([draft.meta] if draft.meta else [])
    return next((m.dtype for m in metas if m.dtype), "")


def _split(draft: Draft) -> bool:
    return any(r.meta.split for r in draft.tree if r.meta) or bool(draft.meta and draft.meta.split)


def finish_host_call(trace: Trace, draft: Draft) -> Call:
    """A call without device rows: done by the host, or not seen at all."""
    group, size, seq, notes = _group(trace, draft)
    row = draft.gloo or draft.row
    if row is None:
        raise ValueError("a call needs a host row or device rows; found neither; this is a bug in the join")
    on_host = draft.gloo is not None or draft.own_engine() == "host"
    tree = (*draft.tree, draft.gloo) if draft.gloo else draft.tree
    found, source = payload_bytes(draft.kind, tree, draft.meta, size)
    if not on_host:
        notes.append("nothing to move: 0 bytes" if found == 0 else _why_none_seen(trace, draft))
    duration = row.end_us - row.start_us
    return Call(
        kind=draft.kind, engine="host" if on_host else "none_seen", wire=_wire(draft),
        name=draft.row.name if draft.row else row.name, module=draft.module, group=group,
        group_size=size, group_ranks=_ranks(draft), seq=seq,
        start_us=row.start_us, end_us=row.end_us if on_host else row.start_us, launch_us=draft.launch_us,
        transfer_us=duration if on_host else 0.0, wait_us=None, bytes=found, bytes_from=source, copied_bytes=0,
        num_copies=0, num_flags=0, pattern="", kernels=(), sms=0, sm_us=0.0, dtype=_dtype(draft),
        split=_split(draft), guess=draft.guess, notes=tuple(draft.notes + notes), rows=(),
    )  # fmt: skip


def _why_none_seen(trace: Trace, draft: Draft) -> str:
    if not trace.device_rows:
        return "the trace holds no device rows: record with ProfilerActivity.CUDA"
    if draft.unknown_kernels:
        return "launched kernels of unknown names: " + ", ".join(sorted(draft.unknown_kernels))
    return "no device row belongs to it: it ran outside of the recorded window, or moved nothing"
