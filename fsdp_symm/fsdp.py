"""The switch: ``set_symm_mem_for_comm(model)`` moves FSDP2's communication buffers into symmetric memory.

Plan, agree, allocate, install: every check and every wait comes before the first change to the model, and undoing is
putting the previous comm objects back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from fsdp_symm import compat
from fsdp_symm.collectives import SymmMemAllGather, SymmMemReduceScatter
from fsdp_symm.compat import ParamGroup, Role
from fsdp_symm.errors import SymmMemConfigError, SymmMemError, problem
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.memory.counters import Counters
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import GroupPlan, Member, agree, make_plan
from fsdp_symm.report import ReportRow, SymmMemReport, SymmMemStats, render
from fsdp_symm.selection import PROVIDERS, Backend, ModuleFilter, Skip, SwitchOptions, select
from fsdp_symm.wire import wire_of

_COMMS: dict[Role, type[SymmMemAllGather] | type[SymmMemReduceScatter]] = {
    "all_gather": SymmMemAllGather,
    "reduce_scatter": SymmMemReduceScatter,
}
_WHY = {"host": "shared memory, one host"}


@dataclass(frozen=True)
class _Installed:
    """One comm object put in, and what it replaced."""

    group: ParamGroup
    role: Role
    comm: object
    previous: object


class SymmMemHandle:
    """What one switch did; undo it with :meth:`disable`, give the memory back with :meth:`close`.

    Prints as a table. As a context manager it closes at the end of the block.
    """

    def __init__(
        self,
        report: SymmMemReport,
        arenas: tuple[SymmMemArena, ...],
        counters: Counters,
        installed: tuple[_Installed, ...],
    ) -> None:
        self.report = report
        self._arenas = arenas
        self._counters = counters
        self._installed = installed
        self._closed = False

    def __str__(self) -> str:
        return render(self.report.rows)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "enabled" if self.enabled else "disabled"
        return f"SymmMemHandle({state}, {len(self._arenas)} arenas, {sum(a.nbytes for a in self._arenas)} bytes)"

    @property
    def enabled(self) -> bool:
        """Whether this handle's comms are installed."""
        return bool(self._installed)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def arenas(self) -> tuple[SymmMemArena, ...]:
        """The arenas, one a process group, in order of creation."""
        return self._arenas

    def stats(self) -> SymmMemStats:
        """Cumulative numbers since the switch; local, cheap, allowed after :meth:`close`."""
        return SymmMemStats.of(
            self._counters,
            arena_bytes=0 if self._closed else sum(a.nbytes for a in self._arenas),
            wait_s=sum(a.segment.wait_s for a in self._arenas),
        )

    def disable(self) -> None:
        """Put the previous comm objects back. Local; the memory stays until :meth:`close`; a second call does nothing.

        A comm that someone has replaced since is left alone. Call it between steps, on every rank alike.
        """
        for entry in self._installed:
            if compat.get_comm(entry.group, entry.role) is entry.comm:
                compat.set_comm(entry.group, entry.role, entry.previous)
        self._installed = ()

    def close(self) -> None:
        """:meth:`disable`, then give the memory back. Collective; a second call does nothing.

        Call it on every rank, before ``destroy_process_group``. Gradients are ordinary memory and stay valid.

        Raises:
            SymmMemTimeoutError: a living rank did not close in time; this rank's memory is released all the same.
        """
        self.disable()
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # the last arena closes first; one failure does not keep the others
            for arena in self._arenas:
                stack.callback(arena.close)
                stack.callback(wire_of(arena).close)

    def abandon(self, reason: str) -> None:
        """:meth:`disable` and give the memory back without waiting: for a rank that fails and will not go on.

        Peers that wait for this rank, now or later, raise an error that quotes ``reason``. Local.
        """
        self.disable()
        self._closed = True
        for arena in reversed(self._arenas):
            arena.abandon(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon(f"{type(error).__name__}: {error}")


def set_symm_mem_for_comm(
    model: nn.Module,
    backend: Backend = "auto",
    *,
    all_gather: bool = True,
    reduce_scatter: bool = True,
    modules: ModuleFilter = None,
    min_bytes: int = 0,
    strict: bool = False,
    slots: int | None = None,
    timeout_s: float = 60.0,
) -> SymmMemHandle:
    """Move the FSDP2 communication buffers of ``model`` and everything below it into symmetric memory.

    Call it on every rank, after ``fully_shard``, prefetch lists, mixed precision and process groups are set; before or
    after parameters are materialised from the meta device. Collective over the process groups that the model uses.
    Either everything is installed or, on an error, nothing has changed.

    Args:
        model: a model that went through ``fully_shard``.
        backend: ``"auto"`` by device, or ``"host"`` (POSIX shared memory, CPU tensors).
        all_gather, reduce_scatter: which collectives to move.
        modules: shell pattern on FQNs (``"layers.*"``), or ``(fqn, module) -> bool``; ``None`` takes all.
        min_bytes: leave smaller buffers on the plain path.
        strict: raise where something asked for cannot be had, now or later, instead of warning once.
        slots: at least this many all-gather slots a process group, for programs that unshard modules early by hand.
        timeout_s: seconds that any wait between ranks may last, at the switch and in every collective.

    Returns:
        A handle: table, report, statistics, undo.

    Raises:
        SymmMemConfigError: bad arguments or model, or a downgrade under ``strict``.
        PlanMismatchError: the ranks planned different communication; names the first difference.
        SymmMemTimeoutError: names the ranks that did not call the switch.
        SymmMemMemoryError: memory could not be had on some rank.
    """
    options = SwitchOptions(backend, all_gather, reduce_scatter, modules, min_bytes, strict, slots, timeout_s)
    if not dist.is_initialized():
        raise SymmMemConfigError(
            problem(
                "set_symm_mem_for_comm: there is no process group",
                found="torch.distributed is not initialised",
                expected="init_process_group(...) and fully_shard(...) before the switch",
                fix="start with torchrun and call torch.distributed.init_process_group",
            )
        )
    members, skips = select(model, options)
    _announce(skips, options.strict)
    plans = make_plan(
        members,
        prefetch_depth=compat.prefetch_depth(model),
        input_buffers=compat.reduce_scatter_input_buffers(compat.param_groups(model)),
        slots=slots,
    )
    agree(plans, options=options.digest_text(), timeout_s=timeout_s)
    arenas = _allocate(plans, members, timeout_s)
    counters = Counters()
    installed = _install(members, arenas, counters, strict)
    return SymmMemHandle(_report(members, plans, skips), tuple(arenas.values()), counters, installed)


def _announce(skips: list[Skip], strict: bool) -> None:
    """Raise or warn about everything that was asked for and cannot be had, in one text."""
    downgrades = [skip for skip in skips if skip.downgrade]
    if not downgrades:
        return
    text = problem(
        "set_symm_mem_for_comm: some collectives stay on the plain path",
        found="; ".join(f"{s.role} of {s.group.label!r}: {s.reason}" for s in downgrades),
        expected="FSDP2's default comms on a device that a backend serves",
        fix="remove the custom comm, or exclude the modules with modules=...",
    )
    if strict:
        raise SymmMemConfigError(text)
    warnings.warn(text, SymmMemFallbackWarning, stacklevel=3)


def _allocate(plans: tuple[GroupPlan, ...], members: list[Member], timeout_s: float) -> dict[str, SymmMemArena]:
    device = next((m.group.device.type for m in members), "cpu")
    arenas: dict[str, SymmMemArena] = {}
    try:
        for plan in plans:
            arenas[plan.name] = SymmMemArena(plan.group, plan.rings, backend=PROVIDERS[device], timeout_s=timeout_s)
    except SymmMemError as error:
        for arena in reversed(arenas.values()):
            arena.abandon(f"the switch failed: {error}")
        raise
    return arenas


def _install(
    members: list[Member], arenas: dict[str, SymmMemArena], counters: Counters, strict: bool
) -> tuple[_Installed, ...]:
    entries = []
    for item in members:
        comm = _COMMS[item.role](
            _chooser(item.group, item.role, arenas), module=item.group.label, strict=strict, counters=counters
        )
        entries.append(_Installed(item.group, item.role, comm, compat.get_comm(item.group, item.role)))
    for entry in entries:  # plain attribute writes: nothing here can fail half-way
        compat.set_comm(entry.group, entry.role, entry.comm)
    return tuple(entries)


def _chooser(group: ParamGroup, role: Role, arenas: dict[str, SymmMemArena]) -> Callable[[], SymmMemArena | None]:
    """The arena of the coming call: FSDP2 changes the process group with the sharded state, and tells nobody."""
    current: Callable[[ParamGroup], Any] = (
        compat.all_gather_group if role == "all_gather" else compat.reduce_scatter_group
    )
    return lambda: arenas.get(compat.group_name(current(group)))


def _report(members: list[Member], plans: tuple[GroupPlan, ...], skips: list[Skip]) -> SymmMemReport:
    rows: list[ReportRow] = []
    for plan in plans:
        for ring in plan.rings:
            labels = tuple(n.label for n in plan.needs if n.role == ring.role)
            engine = PROVIDERS[members[0].group.device.type]
            rows.append(
                ReportRow(ring.role, plan.name, plan.ranks, labels, ring.slots, ring.nbytes, engine, _WHY[engine])
            )
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for skip in skips:
        reasons.setdefault((skip.role, skip.engine, skip.reason), []).append(skip.group.label)
    for (role, engine, reason), labels in reasons.items():
        rows.append(ReportRow(role, "", (), tuple(labels), 0, 0, engine, reason))
    rows.extend(_all_reduce_rows(members))
    return SymmMemReport(tuple(rows))


def _all_reduce_rows(members: list[Member]) -> list[ReportRow]:
    """HSDP's all-reduce: FSDP2 calls ``dist.all_reduce`` itself (torch 2.13-2.15), so nothing can take its place."""
    found: dict[str, tuple[tuple[int, ...], list[str]]] = {}
    for item in members:
        group = compat.replicate_group(item.group)
        if item.role == "reduce_scatter" and group is not None:
            found.setdefault(compat.group_name(group), (compat.group_ranks(group), []))[1].append(item.group.label)
    return [
        ReportRow("all_reduce", name, ranks, tuple(labels), 0, 0, "plain", "FSDP2 issues HSDP's all-reduce itself")
        for name, (ranks, labels) in found.items()
    ]
