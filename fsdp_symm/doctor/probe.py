"""The doctor's probe of one group: small collectives, verified, profiled and judged. Every wait is bounded."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp_symm import SymmMemArena, compat
from fsdp_symm.doctor.calls import CHUNK_BYTES, Calls, Prepare
from fsdp_symm.doctor.report import CollectiveRow, FindingRow, GroupRow
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError, problem
from fsdp_symm.guards import Finding, GroupFacts, collect, expected_engine, findings
from fsdp_symm.rendezvous import exchange
from fsdp_symm.verdict import STAGED_ONLY, why_staged

WATCHDOG_FACTOR = 5  # how much later than the probe itself a watchdog may give up, and end the process
_TIMED_CALLS = 5
_POLL_S = 1e-3
# findings under which not even a communicator can be made
_NO_COMMUNICATOR = {"no_nccl", "shared_gpu_refused", "device_mismatch"}
# Errors of torch's collectives and of this package are RuntimeErrors; ValueError and TypeError come from arguments, the
# last two from triton, which compiles the sum of pulled chunks with the machine's C compiler.
PROBE_ERRORS = (RuntimeError, ValueError, TypeError, OSError, ImportError, subprocess.SubprocessError)

Make = Callable[[SymmMemArena], Prepare]


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

    # --- the collectives ---

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
        """Rows in the order of printing. NCCL's on slots, and ours, which other conditions stand in the way of."""
        calls, cuda = Calls(self.group, self.device), self.device.type == "cuda"
        swap = self._row("all_to_all", "", "plain_kernel", "plain tensors lie in no window")
        gather, scatter = self._row("all_gather", "staged"), self._row("reduce_scatter", "nccl")
        unreachable = why_staged(facts) if cuda else None
        ours = "copy_engine", unreachable or "peer copies, which need no policy"
        direct, pulled = self._row("all_gather", "direct", *ours), self._row("reduce_scatter", "copy_engine", *ours)
        for row, role in zip((gather, scatter), compat.ROLES, strict=True):
            engine, row.reason = expected_engine(facts, role)
            row.expected = engine.replace(" ", "_")
        usual: list[tuple[CollectiveRow, Make]]
        usual = [(gather, calls.staged), (scatter, partial(calls.reduce_scatter, way="nccl"))]
        own: list[tuple[CollectiveRow, Make]]
        own = [(direct, calls.placed), (pulled, partial(calls.reduce_scatter, way="copy_engine"))]
        if not cuda:
            own.pop()  # shared memory has one way to reduce
            scatter.way, swap.expected, swap.reason = "", "", "plain tensors: torch's gloo"
            for row in (gather, direct, scatter):
                row.expected, row.reason = "host", "CPU ranks of one host share memory"
        if not blocked & _NO_COMMUNICATOR:
            self._measure(swap, calls.all_to_all)
        wanted = [] if blocked else usual
        wanted += [] if unreachable or blocked - STAGED_ONLY else own
        if wanted and not self.hung:
            self._with_arena(calls, wanted)
        return [gather, direct, swap, scatter, *([pulled] if cuda else [])]

    def _row(self, kind: str, way: str, expected: str = "", reason: str = "") -> CollectiveRow:
        buffers = "arena" if way else "plain"
        return CollectiveRow(kind, buffers, self.world_size * CHUNK_BYTES, way=way, expected=expected, reason=reason)

    def _with_arena(self, calls: Calls, wanted: list[tuple[CollectiveRow, Make]]) -> None:
        cuda = self.device.type == "cuda"
        extra: dict[str, Any] = {"device": self.device} if cuda else {}
        backend = "nccl" if cuda else "host"
        try:
            arena = SymmMemArena(self.group, calls.rings, backend=backend, timeout_s=self.timeout_s, **extra)
        except PROBE_ERRORS as error:
            for row, _ in wanted:
                row.error = one_line(error)
            return
        if cuda:  # our wire's watchdog would end the process; the probe, which gives up before it, leaves a report
            arena.segment.timeout_s = WATCHDOG_FACTOR * self.timeout_s
        for row, make in wanted:
            if not self.hung:
                self._measure(row, make(arena))
        if not self.hung:
            try:
                arena.close()
            except SymmMemError as error:
                wanted[-1][0].error = wanted[-1][0].error or f"closing the arena: {one_line(error)}"

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
