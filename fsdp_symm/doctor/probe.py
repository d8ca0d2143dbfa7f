"""The doctor's probe of one group: three small collectives, verified, profiled and judged. Every wait is bounded."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter, compat
from fsdp_symm.doctor.report import CollectiveRow, FindingRow, GroupRow
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError, problem
from fsdp_symm.guards import Finding, GroupFacts, collect, expected_engine, findings
from fsdp_symm.plan import SLOT_ALIGNMENT_BYTES, Ring
from fsdp_symm.rendezvous import exchange

CHUNK_BYTES = 2**20  # of one rank: large enough for copies to be worth it, small enough to be done at once
_DTYPE = torch.float32
_TIMED_CALLS = 5
_POLL_S = 1e-3
# findings under which not even a communicator can be made
_NO_COMMUNICATOR = {"no_nccl", "shared_gpu_refused", "device_mismatch"}
# Errors of torch's collectives and of this package are RuntimeErrors; ValueError and TypeError come from arguments.
PROBE_ERRORS = (RuntimeError, ValueError, TypeError, OSError)

Call = Callable[[], object]
Check = Callable[[], bool]
Prepare = Callable[[], tuple[Call, Check]]  # fills buffers; the call issues the collective, the check judges the result


@dataclass
class Probe:
    """What one rank needs to probe one group."""

    group: dist.ProcessGroup
    device: torch.device
    timeout_s: float
    hung: bool = False  # a collective did not finish: nothing more may be issued, nor waited for

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def chunk(self) -> int:
        return CHUNK_BYTES // _DTYPE.itemsize

    def row(self) -> GroupRow:
        """Probe the group. Collective over it; all ranks get the same row apart from kernel details.

        Raises:
            SymmMemTimeoutError, SymmMemPeerError: a rank is gone, so that there is no common answer.
        """
        facts = collect(self.group, self.device, timeout_s=self.timeout_s)
        cuda = self.device.type == "cuda"
        found = findings(facts) if cuda else ()
        row = GroupRow(
            name=compat.group_name(self.group),
            ranks=list(compat.group_ranks(self.group)),
            device=str(self.device),
            backend="nccl" if cuda else "host",
            policy=facts.policy if cuda else "",
            policy_source=facts.policy_source if cuda else "",
            findings=[FindingRow(f.code, f.severity, f.text) for f in found],
        )
        if self.world_size > 1:
            row.collectives = self._merge(self._collectives(facts, self._blocked(found)))
        return row

    # --- the three collectives ---

    def _blocked(self, found: tuple[Finding, ...]) -> set[str]:
        """Codes of blocking findings on any rank: what one rank must not do, none may start."""
        codes = [f.code for f in found if f.severity == "blocks"]
        answers = exchange(
            self.group,
            json.dumps(codes).encode(),
            what="agreeing on what to probe",
            timeout_s=self.timeout_s,
            fix="look for the first error of the missing rank",
        )
        return {code for a in answers for code in json.loads(a)}

    def _collectives(self, facts: GroupFacts, blocked: set[str]) -> list[CollectiveRow]:
        nbytes = self.world_size * CHUNK_BYTES
        gather = CollectiveRow("all_gather", "arena", nbytes)
        scatter = CollectiveRow("reduce_scatter", "arena", nbytes)
        swap = CollectiveRow("all_to_all", "plain", nbytes)
        self._expect(facts, gather, swap, scatter)
        if not blocked & _NO_COMMUNICATOR:
            self._measure(swap, self._all_to_all)
        if not blocked and not self.hung:
            self._with_arena(gather, scatter)
        return [gather, swap, scatter]

    def _expect(self, facts: GroupFacts, gather: CollectiveRow, swap: CollectiveRow, scatter: CollectiveRow) -> None:
        if self.device.type != "cuda":
            gather.expected = scatter.expected = "host"
            gather.reason = scatter.reason = "CPU ranks of one host share memory"
            swap.reason = "plain tensors: torch's gloo"
            return
        engines = expected_engine(facts, "all_gather"), expected_engine(facts, "reduce_scatter")
        for row, (engine, row.reason) in zip((gather, scatter), engines, strict=True):
            row.expected = engine.replace(" ", "_")
        swap.expected, swap.reason = "plain_kernel", "plain tensors lie in no window"

    def _with_arena(self, gather: CollectiveRow, scatter: CollectiveRow) -> None:
        nbytes = -(-self.world_size * CHUNK_BYTES // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        rings = [Ring("all_gather", 2, nbytes), Ring("reduce_scatter", 2, nbytes)]
        extra: dict[str, Any] = {}
        if self.device.type == "cuda":
            extra["device"] = self.device
        backend = "nccl" if self.device.type == "cuda" else "host"
        try:
            arena = SymmMemArena(self.group, rings, backend=backend, timeout_s=self.timeout_s, **extra)
        except PROBE_ERRORS as error:
            gather.error = scatter.error = one_line(error)
            return
        for row, make in ((gather, self._all_gather(arena)), (scatter, self._reduce_scatter(arena))):
            if not self.hung:
                self._measure(row, make)
        if not self.hung:
            try:
                arena.close()
            except SymmMemError as error:
                scatter.error = scatter.error or f"closing the arena: {one_line(error)}"

    def _all_gather(self, arena: SymmMemArena) -> Prepare:
        comm = SymmMemAllGather(arena, module="doctor", strict=True)
        rank, size = self.group.rank(), self.world_size

        def prepare() -> tuple[Call, Check]:
            whole = comm.allocate((size * self.chunk,), dtype=_DTYPE, device=self.device)
            own = whole.narrow(0, rank * self.chunk, self.chunk).fill_(rank + 1)
            return (
                lambda: comm(whole, own, self.group),
                lambda: self._equal(whole, [r + 1 for r in range(size)]),
            )

        return prepare

    def _reduce_scatter(self, arena: SymmMemArena) -> Prepare:
        comm = SymmMemReduceScatter(arena, module="doctor", strict=True)
        rank, size = self.group.rank(), self.world_size

        def prepare() -> tuple[Call, Check]:
            whole = comm.allocate((size * self.chunk,), dtype=_DTYPE, device=self.device)
            part = comm.allocate((self.chunk,), dtype=_DTYPE, device=self.device)
            for r in range(size):
                whole.narrow(0, r * self.chunk, self.chunk).fill_((rank + 1) * (r + 1))
            return (
                lambda: comm(part, whole, self.group, dist.ReduceOp.SUM),
                lambda: self._equal(part, [(rank + 1) * size * (size + 1) // 2]),
            )

        return prepare

    def _all_to_all(self) -> tuple[Call, Check]:
        rank, size = self.group.rank(), self.world_size
        sent = torch.empty(size * self.chunk, dtype=_DTYPE, device=self.device)
        for r in range(size):
            sent.narrow(0, r * self.chunk, self.chunk).fill_(10 * rank + r)
        got = torch.empty_like(sent)
        return (
            lambda: dist.all_to_all_single(got, sent, group=self.group),
            lambda: self._equal(got, [10 * r + rank for r in range(size)]),
        )

    def _equal(self, tensor: torch.Tensor, values: list[int]) -> bool:
        wanted = torch.tensor(values, dtype=_DTYPE).repeat_interleave(self.chunk)
        return bool(torch.equal(tensor.cpu(), wanted))

    # --- running and judging ---

    def _measure(self, row: CollectiveRow, prepare: Prepare) -> None:
        """Warm up, run once under the profiler, then against the clock; errors end up in the row."""
        try:
            right = [self._once(prepare)[0]]  # makes communicators and connections
            with profile(activities=self._activities(), record_shapes=True) as profiler:
                right.append(self._once(prepare)[0])
            self._read(profiler, row)
            timed = [self._once(prepare) for _ in range(_TIMED_CALLS)]
            row.correct = all(right) and all(ok for ok, _ in timed)
            row.time_us = round(statistics.median(us for _, us in timed), 1)
        except PROBE_ERRORS as error:
            row.error = one_line(error)

    def _read(self, profiler: profile, row: CollectiveRow) -> None:
        """Judge what was profiled; a local failure here must not keep this rank from the next collective."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / f"rank{self.group.rank()}.json"
                profiler.export_chrome_trace(str(trace))
                judge(row, trace)
        except PROBE_ERRORS as error:
            row.engine, row.reason = "unknown", f"{row.reason}; no trace: {one_line(error)}"

    def _activities(self) -> list[ProfilerActivity]:
        cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        return [ProfilerActivity.CPU, *cuda]

    def _once(self, prepare: Prepare) -> tuple[bool, float]:
        """Whether the result is right, and microseconds of the call: on the device's clock where there is one."""
        call, check = prepare()
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            microseconds = (time.perf_counter() - started) * 1e6
            return check(), microseconds
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        self._finish(events[1])
        return check(), events[0].elapsed_time(events[1]) * 1e3

    def _finish(self, event: torch.cuda.Event) -> None:
        """Wait for the event at most ``timeout_s``: a collective that hangs must not hang the doctor."""
        deadline, pause = time.monotonic() + self.timeout_s, threading.Event()
        while not event.query():
            if time.monotonic() > deadline:
                self.hung = True
                raise SymmMemTimeoutError(
                    problem(
                        "a collective of the probe did not finish",
                        found=f"nothing within {self.timeout_s:g} s",
                        expected="milliseconds",
                        fix="see the findings; try NCCL_NVLS_ENABLE=0, then --policy default",
                    )
                )
            pause.wait(_POLL_S)

    def _merge(self, rows: list[CollectiveRow]) -> list[CollectiveRow]:
        """One row a collective from all ranks: the slowest time, the first error, right only if right everywhere."""
        answers = exchange(
            self.group,
            json.dumps([asdict(r) for r in rows]).encode(),
            what="comparing what the ranks' probes found",
            timeout_s=3 * self.timeout_s,
            fix="look for the first error of the missing rank",
        )
        by_rank: list[list[CollectiveRow]] = [[CollectiveRow(**r) for r in json.loads(a)] for a in answers]
        for index, row in enumerate(rows):
            mine = [r[index] for r in by_rank]
            known = [r.correct for r in mine if r.correct is not None]
            row.correct = all(known) if known else None
            row.time_us = max((r.time_us for r in mine if r.time_us is not None), default=None)
            ranks = compat.group_ranks(self.group)
            errors = [f"rank {rank}: {r.error}" for rank, r in zip(ranks, mine, strict=True) if r.error]
            row.error = errors[0] if errors else ""
            if len({r.engine for r in mine}) > 1:
                row.engine = "mixed"
        return rows


def judge(row: CollectiveRow, trace: Path) -> None:
    """Read the engine of one collective from a trace that holds it alone."""
    try:
        from fsdp_symm.trace import TraceError, inspect_traces
    except ImportError as error:  # msgspec, the trace reader's parser
        row.engine, row.reason = "unknown", f"{row.reason}; {error.name} is not installed, so no trace was read"
        return
    try:
        calls = inspect_traces([trace]).ranks[0].calls
    except TraceError as error:
        row.engine, row.reason = "unknown", f"{row.reason}; {error}"
        return
    call = max((c for c in calls if c.kind == row.kind), key=lambda c: c.bytes or 0, default=None)
    if call is None:
        row.engine, row.reason = "unknown", f"{row.reason}; the trace shows no {row.kind}"
        return
    row.engine, row.kernels, row.sms, row.copies = call.engine, list(call.kernels), call.sms, call.num_copies


def one_line(error: BaseException) -> str:
    """Class and text of an error on one line."""
    return f"{type(error).__name__}: {'; '.join(line.strip() for line in str(error).splitlines() if line.strip())}"
