"""The switch: ``set_symm_mem_for_comm(model)`` moves FSDP2's communication buffers into symmetric memory.

Plan, agree, allocate, install: every check and every wait comes before the first change to the model, and undoing is
putting the previous comm objects back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import nn

from fsdp_symm import compat, compat_unshard
from fsdp_symm.allocation import Arenas, allocate
from fsdp_symm.collectives import SymmMemAllGather, SymmMemReduceScatter
from fsdp_symm.compat import ParamGroup, Role
from fsdp_symm.compat_reduce import GradientTypes
from fsdp_symm.decisions import make_report
from fsdp_symm.errors import SymmMemConfigError, SymmMemError, problem
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.memory.counters import Counters
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.memory.unsharded import UnshardedMemory
from fsdp_symm.plan import GroupPlan, Lane, Member, agree, make_plan, narrowed, staged
from fsdp_symm.report import SymmMemReport, SymmMemStats, render
from fsdp_symm.schedule import all_gather_slots
from fsdp_symm.selection import (
    AllGatherChoice,
    Backend,
    ModuleFilter,
    ReduceScatterChoice,
    Skip,
    SwitchOptions,
    select,
)
from fsdp_symm.unshard import DirectUnshard
from fsdp_symm.verdict import Verdict, judge_all

ArenaSource = Callable[[], SymmMemArena | None]

_COMMS: dict[Role, type[SymmMemAllGather] | type[SymmMemReduceScatter]] = {
    "all_gather": SymmMemAllGather,
    "reduce_scatter": SymmMemReduceScatter,
}


@dataclass(frozen=True)
class _Installed:
    """One comm object put in, and what it replaced.

    Attributes:
        gradients: what tells a reduce-scatter the type of its gradients.
    """

    group: ParamGroup
    role: Role
    comm: SymmMemAllGather | SymmMemReduceScatter
    previous: object
    gradients: GradientTypes | None = None

    def do(self) -> None:
        """Put the comm in."""
        compat.set_comm(self.group, self.role, self.comm)
        if self.gradients is not None:
            self.gradients.install()

    def undo(self) -> None:
        """Put the previous comm back, unless someone has replaced ours since."""
        if self.gradients is not None:
            self.gradients.uninstall()
        if compat.get_comm(self.group, self.role) is self.comm:
            compat.set_comm(self.group, self.role, self.previous)


@dataclass(frozen=True)
class _TakenOver:
    """One param group that unshards by direct placement."""

    group: ParamGroup
    unsharder: DirectUnshard

    def do(self) -> None:
        """Take the group over."""
        compat_unshard.install(self.group, self.unsharder)

    def undo(self) -> None:
        """Give the group its own unshard back."""
        compat_unshard.uninstall(self.group, self.unsharder)


class SymmMemHandle:
    """What one switch did; undo it with :meth:`disable`, give the memory back with :meth:`close`.

    Prints as a table. As a context manager it closes at the end of the block.
    """

    def __init__(
        self,
        report: SymmMemReport,
        arenas: Arenas,
        counters: Counters,
        installed: tuple[_Installed | _TakenOver, ...],
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
        return f"SymmMemHandle({state}, {len(self.arenas)} arenas, {sum(a.nbytes for a in self.arenas)} bytes)"

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
        return self._arenas.all

    def stats(self) -> SymmMemStats:
        """Cumulative numbers since the switch; local, cheap, allowed after :meth:`close`."""
        return SymmMemStats.of(
            self._counters,
            arena_bytes=0 if self._closed else sum(a.nbytes for a in self.arenas),
            wait_s=sum(a.segment.wait_s for a in self.arenas),
        )

    def disable(self) -> None:
        """Put the previous comm objects back. Local; the memory stays until :meth:`close`; a second call does nothing.

        A comm that someone has replaced since is left alone. Call it between steps, on every rank alike.
        """
        for entry in self._installed:
            entry.undo()
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
        self._arenas.close()

    def abandon(self, reason: str) -> None:
        """:meth:`disable` and give the memory back without waiting: for a rank that fails and will not go on.

        Peers that wait for this rank, now or later, raise an error that quotes ``reason``. Local.
        """
        self.disable()
        self._closed = True
        self._arenas.abandon(reason)

    def __enter__(self) -> Self:
        if self._closed:
            raise SymmMemError("SymmMemHandle: found a closed handle, expected a live one, fix: call the switch again")
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
    all_gather: AllGatherChoice = "auto",
    reduce_scatter: ReduceScatterChoice = "auto",
    modules: ModuleFilter = None,
    min_bytes: int = 0,
    strict: bool = False,
    slots: int | None = None,
    dedicated_all_gather: bool = False,
    timeout_s: float = 60.0,
) -> SymmMemHandle:
    """Move the FSDP2 communication buffers of ``model`` and everything below it into symmetric memory.

    Call it on every rank, after ``fully_shard``, prefetch lists, mixed precision and process groups are set; before or
    after parameters are materialised from the meta device. Collective over the process groups that the model uses.
    Either everything is installed or, on an error, nothing has changed.

    Args:
        model: a model that went through ``fully_shard``.
        backend: ``"auto"`` by device, ``"host"`` (POSIX shared memory, CPU tensors), ``"nccl"`` (NCCL windows) or
            ``"cuda"`` (torch's peer memory: GPUs of one host, no NCCL needed; our own wire moves every byte).
        all_gather: ``"direct"``: every peer's shards are pulled into the unsharded parameters themselves, without a
            staging buffer or a copy-out; ``"staged"``: the all-gather's output moves into symmetric memory and FSDP2
            copies out of it; ``"auto"`` (or ``True``): direct where possible; ``False``: left alone.
        reduce_scatter: ``"copy_engine"``: peers' chunks are pulled by copy engines and summed locally in rank order;
            ``"nccl"``: NCCL's symmetric kernel; ``"auto"`` (or ``True``): pulled where the process group's largest
            chunk of a rank has 32 MiB or more in the type of the sum, NCCL's otherwise; where ranks share a GPU, from
            64 MiB, and with more than two on one only if all of those travel in a narrower type; ``False``: left
            alone. The host backend and torch's peer memory have one way each.
        modules: shell pattern on FQNs (``"layers.*"``), or ``(fqn, module) -> bool``; ``None`` takes all.
        min_bytes: leave layers with smaller gathered buffers than this on the plain path.
        strict: raise where something asked for cannot be had, now or later, and under settings that undo or endanger it
            (one hardware queue, expandable segments, torch's registration hook), instead of warning once.
        slots: at least this many all-gather slots a process group, for programs that unshard modules early by hand.
        dedicated_all_gather: NCCL only: run staged all-gathers on a communicator of their own that carries the zero-CTA
            policy, so that all other collectives keep the default policy.
        timeout_s: seconds that any wait between ranks may last, at the switch and in every collective of the host
            backend; on our own GPU wire a watchdog names the ranks after it and ends the process; NCCL's collectives
            have NCCL's own timeout.

    Returns:
        A handle: table, report, statistics, undo.

    Raises:
        SymmMemConfigError: bad arguments or model, or a downgrade under ``strict``.
        PlanMismatchError: the ranks planned different communication; names the first difference.
        SymmMemTimeoutError: names the ranks that did not call the switch.
        SymmMemMemoryError: memory could not be had on some rank.
    """
    options = SwitchOptions(
        backend, all_gather, reduce_scatter, modules, min_bytes, strict, slots, dedicated_all_gather, timeout_s
    )
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
    plans = _plan(model, members, options)
    agree(plans, options=options.digest_text(), timeout_s=timeout_s)
    verdicts = judge_all(
        [p for p in plans if p.rings],
        dedicated=dedicated_all_gather,
        timeout_s=timeout_s,
        reduce_scatter=options.reduce_way or "auto",
    )
    members = [_judged(item, verdicts) for item in members]
    plans = _plan(model, members, options)  # the verdicts are the same on all ranks, so this plan is too
    _announce(members, skips, options)
    _announce_verdicts(verdicts, options.strict)
    plans = tuple(plan for plan in plans if plan.rings)
    arenas = allocate(plans, verdicts, options)
    counters = Counters()
    entries = _entries(members, skips, arenas, counters, strict)
    handle = SymmMemHandle(make_report(members, plans, skips, verdicts), arenas, counters, tuple(entries))
    try:
        for entry in entries:  # plain attribute writes: only a signal can come between
            entry.do()
    except BaseException as error:
        handle.abandon(f"the switch failed: {error!r}")
        raise
    return handle


def _plan(model: nn.Module, members: list[Member], options: SwitchOptions) -> tuple[GroupPlan, ...]:
    groups = compat.param_groups(model)
    return make_plan(
        groups,
        members,
        schedule_slots=all_gather_slots(compat.prefetch_nodes(model)),
        input_buffers=compat.reduce_scatter_input_buffers(groups),
        slots=options.slots,
    )


def _judged(item: Member, verdicts: dict[str, Verdict]) -> Member:
    """A member with the buffers that the verdicts on its process groups leave it: staged ones where shards cannot be
    placed directly on some of them, small ones where gradients travel in their own type."""
    found = [verdicts[compat.group_name(g)] for g in item.process_groups]
    note = next((v.staged for v in found if v.staged is not None), None)
    if item.lane == "unshard" and note is not None:
        return staged(item, note)
    return narrowed(item) if all(v.widens for v in found) else item


def _announce(members: list[Member], skips: list[Skip], options: SwitchOptions) -> None:
    """Raise or warn about everything that was asked for and cannot be had, in one text; warn if nothing is left."""
    if not members and any(skip.moves for skip in skips):
        reasons = dict.fromkeys(skip.reason for skip in skips if skip.moves)
        text = problem(
            "set_symm_mem_for_comm: nothing was switched",
            found="; ".join(reasons),
            expected="at least one collective to move",
            fix="as the reasons say: backend='auto', looser min_bytes or modules, the earlier handle closed; or leave "
            "the call out",
        )
        warnings.warn(text, SymmMemFallbackWarning, stacklevel=3)
    texts = []
    if downgrades := [skip for skip in skips if skip.downgrade]:
        text = problem(
            "set_symm_mem_for_comm: some collectives stay on the plain path",
            found="; ".join(f"{s.role} of {s.group.label!r}: {s.reason}" for s in downgrades),
            expected="FSDP2's default comms on a device that a backend serves",
            fix="as the reasons say: backend='auto', without the custom comm, or modules=... that leaves these out",
        )
        texts.append(text)
    notes = [item for item in members if item.note is not None]
    if notes and options.all_gather == "direct":  # "auto" means direct where possible: the report says where not
        text = problem(
            "set_symm_mem_for_comm: some all-gathers are staged",
            found="; ".join(f"{m.group.label!r}: {m.note}" for m in notes),
            expected="shards that can be placed directly",
            fix="pass all_gather='auto' to accept a staging buffer there",
        )
        texts.append(text)
    if texts and options.strict:
        raise SymmMemConfigError("\n".join(texts))
    for text in texts:
        warnings.warn(text, SymmMemFallbackWarning, stacklevel=3)


def _announce_verdicts(verdicts: dict[str, Verdict], strict: bool) -> None:
    """Raise or warn about groups that cannot be had as asked for; say what else a user should know."""
    for verdict in verdicts.values():
        downgrades = [*([verdict.blocked] if verdict.blocked else []), *verdict.downgrades]
        if downgrades and strict:
            raise SymmMemConfigError("\n".join(downgrades))
        for text in (*downgrades, *verdict.advice):
            warnings.warn(text, SymmMemFallbackWarning, stacklevel=4)


def _entries(
    members: list[Member], skips: list[Skip], arenas: Arenas, counters: Counters, strict: bool
) -> list[_Installed | _TakenOver]:
    """What is to be put into the model."""
    served = [
        m for m in members if any(arenas.find(m.lane, m.group.root, compat.group_name(g)) for g in m.process_groups)
    ]
    entries: list[_Installed | _TakenOver] = []
    memories: dict[str, UnshardedMemory] = {}  # FSDP2's roots run one after the other, each with layers of its own
    for item in served:
        choose = _chooser(item.group, item.lane, arenas)
        if item.lane == "unshard":
            memory = memories.setdefault(item.group.root, UnshardedMemory(item.group.device))
            unsharder = DirectUnshard(item.group, choose, memory, counters=counters, strict=strict)
            entries.append(_TakenOver(item.group, unsharder))
        else:
            entries.append(_comm(item.group, item.role, choose, counters, strict))
    for skip in (s for s in skips if s.watched):
        entries.append(_comm(skip.group, skip.role, _chooser(skip.group, skip.role, arenas), counters, strict))
    return entries


def _comm(group: ParamGroup, role: Role, choose: ArenaSource, counters: Counters, strict: bool) -> _Installed:
    comm = _COMMS[role](choose, module=group.label, strict=strict, counters=counters)
    gradients = None
    if isinstance(comm, SymmMemReduceScatter):
        gradients = GradientTypes(group)
        comm.gradient_dtype = lambda: gradients.dtype
    return _Installed(group, role, comm, compat.get_comm(group, role), gradients)


def _chooser(group: ParamGroup, lane: Lane, arenas: Arenas) -> ArenaSource:
    """The arena of the coming call: FSDP2 changes the process group with the sharded state, and tells nobody."""
    current: Callable[[ParamGroup], dist.ProcessGroup] = (
        compat.reduce_scatter_group if lane == "reduce_scatter" else compat.all_gather_group
    )
    return lambda: arenas.find(lane, group.root, compat.group_name(current(group)))
