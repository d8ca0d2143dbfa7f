"""From plans to arenas: all of them, or none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemConfigError, SymmMemUnavailableError, told
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import GroupPlan, Lane, Ring
from fsdp_symm.selection import SwitchOptions
from fsdp_symm.verdict import Verdict
from fsdp_symm.wire import wire_of
from fsdp_symm.zero_cta import zero_cta_options


@dataclass
class Arenas:
    """The arenas of one handle, by lane, root module, and name of the process group whose calls they answer."""

    all: tuple[SymmMemArena, ...] = ()
    by_call: dict[tuple[Lane, str, str], SymmMemArena] = field(default_factory=dict)
    own_groups: tuple[dist.ProcessGroup, ...] = ()

    def find(self, lane: Lane, root: str, group_name: str) -> SymmMemArena | None:
        """The arena that answers a lane's calls on a process group, for the modules below ``root``."""
        return self.by_call.get((lane, root, group_name))

    def add(self, arena: SymmMemArena, root: str, rings: tuple[Ring, ...]) -> None:
        """Take an arena in for the lanes of its rings."""
        self.all += (arena,)
        self.by_call.update({(ring.role, root, arena.group_name): arena for ring in rings})

    def close(self) -> None:
        """Close wires, then arenas, the last one first; one failure does not keep the others. Collective."""
        with contextlib.ExitStack() as stack:
            for group in self.own_groups:
                stack.callback(self._destroy, group)
            for arena in self.all:
                stack.callback(arena.close)
                stack.callback(wire_of(arena).close)

    @staticmethod
    def _destroy(group: dist.ProcessGroup) -> None:
        if compat.group_is_alive(group):
            dist.destroy_process_group(group)

    def abandon(self, reason: str) -> None:
        """Let go without waiting for anybody; peers that still use an arena fail with ``reason``."""
        for arena in reversed(self.all):
            arena.abandon(reason)


def allocate(plans: tuple[GroupPlan, ...], verdicts: dict[str, Verdict], options: SwitchOptions) -> Arenas:
    """Make the arenas of all plans that are not blocked. Collective over their groups.

    A group that turns out to have no symmetric memory is blocked in ``verdicts`` from here on.

    Raises:
        SymmMemError: on every rank of the group concerned; what was made before is let go, on any other error too.
    """
    arenas = Arenas()
    try:
        for plan in plans:
            if verdicts[plan.name].blocked is None:
                _allocate_plan(plan, arenas, verdicts, options)
    except BaseException as error:  # Ctrl-C too: peers must hear of it, and nothing may be left behind
        arenas.abandon(f"the switch failed: {told(error)}")
        raise
    return arenas


def _allocate_plan(plan: GroupPlan, arenas: Arenas, verdicts: dict[str, Verdict], options: SwitchOptions) -> None:
    try:
        for group, rings in _communicators(plan, arenas, options):
            arena = SymmMemArena(
                group,
                rings,
                backend=plan.backend,
                device=plan.device,
                serves=plan.group,
                timeout_s=options.timeout_s,
            )
            arenas.add(arena, plan.root, rings)
            wire_of(arena).reduce_scatter_way = verdicts[plan.name].reduce_way
    except SymmMemUnavailableError as error:
        if options.strict:
            raise SymmMemConfigError(str(error)) from error
        warnings.warn(str(error), SymmMemFallbackWarning, stacklevel=5)
        verdicts[plan.name] = Verdict(verdicts[plan.name].engines, blocked=str(error))


def _communicators(
    plan: GroupPlan, arenas: Arenas, options: SwitchOptions
) -> Iterator[tuple[dist.ProcessGroup, tuple[Ring, ...]]]:
    """The groups that run a plan's collectives: its own, or a dedicated one for all-gathers."""
    dedicated = options.dedicated_all_gather and plan.backend == "nccl"
    gathers = tuple(r for r in plan.rings if r.role == "all_gather")  # staged ones: direct ones need no policy
    if not dedicated or not gathers:
        yield plan.group, plan.rings
        return
    group = compat.new_group(list(plan.ranks), pg_options=zero_cta_options(), group_desc="fsdp_symm_all_gather")
    arenas.own_groups += (group,)
    yield group, gathers
    others = tuple(r for r in plan.rings if r.role != "all_gather")
    if others:
        yield plan.group, others
