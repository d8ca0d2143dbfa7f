"""Which param groups take part, and why the others do not: local decisions, the same on every rank.

Nothing is changed here; :mod:`fsdp_symm.fsdp` installs what was selected.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from fsdp_symm import compat, compat_nccl, compat_sizes, compat_unshard
from fsdp_symm.compat import ParamGroup, Role
from fsdp_symm.errors import SymmMemConfigError, problem
from fsdp_symm.limits import LONGEST_TIMEOUT_S, MAX_SLOTS, SHORTEST_TIMEOUT_S
from fsdp_symm.memory.arena import BACKENDS
from fsdp_symm.memory.mixin import SymmMemAllocMixin
from fsdp_symm.plan import Member, member, role_groups

Backend = Literal["auto", "host", "nccl", "cuda"]
AllGatherChoice = bool | Literal["auto", "direct", "staged"]
ReduceScatterChoice = bool | Literal["auto", "copy_engine", "nccl"]
ALL_GATHER = get_args(get_args(AllGatherChoice)[1])
REDUCE_SCATTER = get_args(get_args(ReduceScatterChoice)[1])
_SECONDS = f"seconds, from {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:.0f}"
ModuleFilter = str | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class SwitchOptions:
    """The arguments of :func:`fsdp_symm.set_symm_mem_for_comm`, checked.

    Raises:
        SymmMemConfigError: a value that no model could be served with.
    """

    backend: str = "auto"
    all_gather: AllGatherChoice = "auto"
    reduce_scatter: ReduceScatterChoice = "auto"
    modules: ModuleFilter = None
    min_bytes: int = 0
    strict: bool = False
    slots: int | None = None
    dedicated_all_gather: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        backends = ["auto", *sorted(BACKENDS)]
        self._require("backend", isinstance(self.backend, str) and self.backend in backends, f"one of {backends}")
        for name in ("strict", "dedicated_all_gather"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, ways in (("all_gather", ALL_GATHER), ("reduce_scatter", REDUCE_SCATTER)):
            value = getattr(self, name)
            self._require(
                name,
                isinstance(value, bool) or (isinstance(value, str) and value in ways),
                f"one of {list(ways)}, True or False",
            )
        some = self.all_gather is not False or self.reduce_scatter is not False
        self._require("all_gather", some, "all_gather or reduce_scatter to be on")
        self._require(
            "modules",
            self.modules is None or isinstance(self.modules, str) or callable(self.modules),
            "None, an FQN pattern such as 'layers.*', or a callable (fqn, module) -> bool",
        )
        self._require("min_bytes", _is_int(self.min_bytes) and self.min_bytes >= 0, "an integer >= 0, in bytes")
        self._require(
            "slots",
            self.slots is None or (_is_int(self.slots) and 1 <= self.slots <= MAX_SLOTS),
            f"None or an integer from 1 to {MAX_SLOTS}",
        )
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        self._require("timeout_s", number and SHORTEST_TIMEOUT_S <= self.timeout_s <= LONGEST_TIMEOUT_S, _SECONDS)

    def _require(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise SymmMemConfigError(
                problem(
                    f"set_symm_mem_for_comm: bad argument {name}",
                    found=repr(getattr(self, name)),
                    expected=expected,
                    fix=f"pass a valid {name}",
                )
            )

    @property
    def gather_way(self) -> str | None:
        """``"auto"``, ``"direct"`` or ``"staged"``; ``None`` where all-gathers are left alone."""
        return _way(self.all_gather)

    @property
    def reduce_way(self) -> str | None:
        """``"auto"``, ``"copy_engine"`` or ``"nccl"``; ``None`` where reduce-scatters are left alone."""
        return _way(self.reduce_scatter)

    def digest_text(self) -> str:
        """What every rank must have asked for alike; a callable filter shows in the plan's modules instead."""
        pattern = self.modules if isinstance(self.modules, str) else None
        return (
            f"backend={self.backend} all_gather={self.gather_way} reduce_scatter={self.reduce_way} "
            f"modules={pattern} min_bytes={self.min_bytes} strict={self.strict} slots={self.slots} "
            f"dedicated={self.dedicated_all_gather}"
        )


def _way(choice: bool | str) -> str | None:
    return ("auto" if choice else None) if isinstance(choice, bool) else choice


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Skip:
    """A role of a param group that stays as it is.

    Attributes:
        downgrade: True if the user asked for it and it cannot be had: a warning, or an error under ``strict``.
        moves: False if no bytes move at all.
        watched: True if bytes may move later: a comm is installed that serves them, or says that it cannot.
        kept: True if another handle's, or a user's, comm in symmetric memory moves the bytes, as before.
    """

    group: ParamGroup
    role: Role
    reason: str
    downgrade: bool = False
    moves: bool = True
    watched: bool = False
    kept: bool = False

    @property
    def engine(self) -> str:
        """``"plain"``, ``"kept"``, or ``"none"`` where no bytes move at all."""
        return "none" if not self.moves else "kept" if self.kept else "plain"


def select(model: nn.Module, options: SwitchOptions) -> tuple[list[Member], list[Skip]]:
    """Sort every param group's roles into members and skips, in FQN order.

    Raises:
        SymmMemConfigError: the model has no FSDP module, the filter matches nothing, or a process group is gone.
    """
    if not isinstance(model, nn.Module) or not compat.has_fsdp_modules(model):
        raise SymmMemConfigError(
            problem(
                "set_symm_mem_for_comm: the model has no FSDP2 module",
                found=f"{type(model).__name__} without fully_shard",
                expected="a model that went through torch.distributed.fsdp.fully_shard",
                fix="call fully_shard(...) on the model's blocks and on the model first",
            )
        )
    groups = compat.param_groups(model)
    chosen = _apply_filter(groups, options.modules)
    members: list[Member] = []
    skips: list[Skip] = []
    for group in groups:
        for role in compat.ROLES:
            decision = _decide(group, role, options, group in chosen)
            (members if isinstance(decision, Member) else skips).append(decision)  # type: ignore[arg-type]
    return members, skips


def _apply_filter(groups: list[ParamGroup], wanted: ModuleFilter) -> list[ParamGroup]:
    if wanted is None:
        return groups
    if callable(wanted):
        chosen = [g for g in groups if any(wanted(n, m) for n, m in zip(g.fqn.split(","), g.modules, strict=True))]
    else:
        chosen = [g for g in groups if any(fnmatch.fnmatchcase(n, wanted) for n in g.fqn.split(","))]
    if groups and not chosen:
        names = [g.fqn for g in groups]
        shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        raise SymmMemConfigError(
            problem(
                "set_symm_mem_for_comm: modules matches no FSDP module",
                found=repr(wanted),
                expected=f"a pattern or callable that accepts some of: {shown}",
                fix="use shell wildcards on FQNs, for example modules='layers.*'",
            )
        )
    return chosen


def _decide(group: ParamGroup, role: Role, options: SwitchOptions, chosen: bool) -> Member | Skip:
    if group.kind == "replicate":
        return Skip(group, role, "replicated, not sharded", moves=False)
    _require_alive(group, role)
    if compat.shard_group(group).size() == 1:
        return Skip(group, role, "one rank: nothing moves", moves=False)
    if getattr(options, role) is False:
        return Skip(group, role, f"{role}=False")
    if not chosen:
        return Skip(group, role, "not selected by modules")
    comm = compat.get_comm(group, role)
    if isinstance(comm, SymmMemAllocMixin) or (role == "all_gather" and compat_unshard.taken_over(group)):
        reason = "already on symmetric memory (an earlier handle or a custom comm)"
        return Skip(group, role, reason, kept=True)
    backend, reason = _backend(group, role, options)
    if (reason := compat.occupied_by(group, role) or reason) is not None:
        return Skip(group, role, reason, downgrade=True)
    try:
        sized = _member(group, role, backend, options)
    except compat_sizes.UnsizedExtensionError as error:
        return Skip(group, role, f"the all-gather extension could not be sized ({error})", downgrade=True)
    if sized.whole_nbytes == 0:
        reason = "no trainable parameters" if role == "reduce_scatter" else "no bytes"
        return Skip(group, role, reason, moves=False, watched=role == "reduce_scatter")
    if sized.whole_nbytes < options.min_bytes:
        return Skip(group, role, f"{sized.whole_nbytes} bytes < min_bytes={options.min_bytes}")
    return sized


def _member(group: ParamGroup, role: Role, backend: str, options: SwitchOptions) -> Member:
    """A member, placed directly where that is wanted and possible."""
    if role == "reduce_scatter" or options.gather_way == "staged":
        return member(group, role, backend)
    reason = compat_unshard.unsupported(group)
    return member(group, role, backend, direct=reason is None, note=reason)


def _backend(group: ParamGroup, role: Role, options: SwitchOptions) -> tuple[str, str | None]:
    """The backend of a param group, or why there is none."""
    device = group.device
    serving = [name for name, kind in BACKENDS.items() if kind == device.type]
    if not serving:
        return "", f"no symmetric memory for {device.type} tensors"
    chosen = serving[0] if options.backend == "auto" else options.backend
    if chosen not in serving:
        return "", f"backend {options.backend!r} does not serve {device.type} tensors"
    if chosen == "nccl":
        try:
            for process_group in role_groups(group, role):
                compat_nccl.nccl_backend(process_group, device)
        except SymmMemConfigError as error:
            if options.backend == "auto":  # torch's peer memory needs a group of any kind, for its setup only
                return "cuda", None
            return "", str(error).splitlines()[0]
    if chosen == "cuda" and options.dedicated_all_gather:
        return "", "backend 'cuda' uses no NCCL communicator, so dedicated_all_gather has no meaning"
    return chosen, None


def _require_alive(group: ParamGroup, role: Role) -> None:
    gone = [g for g in role_groups(group, role) if not compat.group_is_alive(g)]
    if gone:
        raise SymmMemConfigError(
            problem(
                f"set_symm_mem_for_comm: a process group of {group.label!r} was destroyed",
                found="a model sharded over groups of an earlier init_process_group",
                expected="a model sharded over living groups",
                fix="build the device mesh and call fully_shard again after init_process_group",
            )
        )
