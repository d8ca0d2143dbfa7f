"""What a model's communication will need: every buffer, in FQN order, and a digest that ranks compare.

The plan is made from the model alone, before anything is allocated, so that every rank of a group reaches the same
answer without talking; :func:`agree` then proves that they did.

Legend: W ranks of a group, K reduce-scatter input buffers (FSDP2's cap), D prefetch depth, G param groups a module.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fsdp_symm import compat, compat_reduce, compat_sizes, compat_unshard
from fsdp_symm.compat import ParamGroup, Role
from fsdp_symm.errors import PlanMismatchError, problem
from fsdp_symm.rendezvous import exchange_many

# Slots start on page boundaries: what mmap needs, and NCCL's window alignment (NCCL_WIN_REQUIRED_ALIGNMENT).
SLOT_ALIGNMENT_BYTES = 4096

# What a ring of slots is for. "unshard": FSDP2's all-gathers by direct placement, a slot holds this rank's shards;
# "all_gather": staged, a slot holds the whole output; "dispatch" and "combine": the experts' token exchange.
Lane = Literal["unshard", "all_gather", "reduce_scatter", "dispatch", "combine"]
LANES: tuple[Lane, ...] = get_args(Lane)

# Shards of one slot start on these boundaries: copy engines are fastest on whole 256-byte lines.
SHARD_ALIGNMENT_BYTES = 256

# Reduce-scatter inputs that are larger than a slot pass through it in at most so many parts: fp32 gradients, where a
# slot was planned for bf16 ones. A part is a multiple of so many elements of a rank's chunk, if it can be.
MAX_PARTS = 2
PART_ELEMENTS = 64


@dataclass(frozen=True)
class BufferNeed:
    """One buffer of one param group.

    Attributes:
        label: the module (FQN), with ``[index]`` where it has several param groups.
        lane: ``"unshard"`` (this rank's shards), ``"all_gather"`` (the whole output) or ``"reduce_scatter"`` (the whole
            input).
        ranks: global ranks of the process group that communicates.
        group: name of that process group.
        nbytes: bytes, padded, after mixed precision and all-gather extensions.
        dtype: element type FSDP2 will ask for, for the digest.
        narrow: whether gradients may travel in a narrower type.
    """

    label: str
    lane: Lane
    ranks: tuple[int, ...]
    group: str
    nbytes: int
    dtype: str
    narrow: bool = False


@dataclass(frozen=True)
class Ring:
    """Slots of one lane in one process group's arena; every slot holds the lane's largest buffer.

    Slots are handed out in call order and must be free again when their turn comes round: ``slots`` counts how many
    later buffers one buffer may have to outlive, not only how many are alive at once.
    """

    role: Lane
    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True)
class GroupPlan:
    """All that one process group needs."""

    group: dist.ProcessGroup = field(compare=False, repr=False)
    backend: str
    device: torch.device
    root: str
    needs: tuple[BufferNeed, ...]
    rings: tuple[Ring, ...]

    @property
    def name(self) -> str:
        return compat.group_name(self.group)

    @property
    def ranks(self) -> tuple[int, ...]:
        return compat.group_ranks(self.group)

    @property
    def nbytes(self) -> int:
        """Symmetric bytes of this rank in this group, without the provider's control page."""
        return sum(ring.nbytes for ring in self.rings)

    def lines(self, options: str) -> list[str]:
        """The plan as text, one fact a line: what the digest covers and what a mismatch quotes."""
        return [
            f"options {options}",
            f"backend {self.backend} on {self.device.type}, root {self.root!r}",
            *(f"ring {r.role} {r.slots} slots of {r.slot_bytes} bytes" for r in self.rings),
            *(f"{n.lane} {n.label} {n.nbytes} bytes {n.dtype}" for n in self.needs),
        ]


@dataclass(frozen=True)
class Member:
    """A param group that takes part with one role, and the process groups its calls may use.

    Attributes:
        lane: what its slots are for: the role, or ``"unshard"`` for all-gathers by direct placement.
        sizes: bytes of its slot in each of ``process_groups``.
        whole_nbytes: bytes of the whole all-gather output or reduce-scatter input over the shard group.
        narrow: the type in which gradients may travel, where it is narrower than that of the sum.
        note: why an all-gather is staged although direct placement was wanted.
    """

    group: ParamGroup
    role: Role
    lane: Lane
    process_groups: tuple[dist.ProcessGroup, ...]
    backend: str
    sizes: tuple[int, ...]
    whole_nbytes: int
    dtype: str
    narrow: torch.dtype | None = None
    note: str | None = None

    @property
    def dtype_text(self) -> str:
        """For the digest: what travels, and in what type it is summed."""
        return self.dtype if self.narrow is None else f"{self.dtype} of {str(self.narrow).removeprefix('torch.')}"


def role_groups(group: ParamGroup, role: Role) -> tuple[dist.ProcessGroup, ...]:
    """Process groups that a role may be called with: the shard group, and for an integer ``reshard_after_forward``
    also the post-forward group; a separate reduce-scatter group replaces the shard group."""
    if role == "reduce_scatter":
        return (compat.reduce_scatter_group(group),)
    post = compat.post_forward_group(group)
    return (compat.shard_group(group),) if post is None else (compat.shard_group(group), post)


def member(group: ParamGroup, role: Role, backend: str, *, direct: bool = False, note: str | None = None) -> Member:
    """Size one role of one param group, to be served by ``backend``.

    Args:
        direct: all-gathers by direct placement: slots hold this rank's shards, not the whole output.
        note: see :class:`Member`.

    Raises:
        compat_sizes.UnsizedExtensionError: an all-gather extension could not be asked for its sizes.
    """
    groups = role_groups(group, role)
    size = compat_sizes.all_gather_bytes if role == "all_gather" else compat_sizes.reduce_scatter_bytes
    nbytes, dtype = size(group)
    if not direct:
        narrow = None
        if role == "reduce_scatter" and nbytes:
            narrow = compat_reduce.narrower(compat_reduce.gradient_dtype(group.native), getattr(torch, dtype))
        return Member(group, role, role, groups, backend, (nbytes,) * len(groups), nbytes, dtype, narrow, note)
    sizes = tuple(packed_nbytes(compat_unshard.input_nbytes(group, g.size())) for g in groups)
    return Member(group, role, "unshard", groups, backend, sizes, nbytes, dtype)


def staged(item: Member, note: str) -> Member:
    """The same member with a staging buffer, and why."""
    return member(item.group, item.role, item.backend, note=note)


def narrowed(item: Member) -> Member:
    """The same reduce-scatter with slots for gradients as they travel; wider ones will pass in parts."""
    if item.narrow is None:
        return item
    sizes = []
    for group, nbytes in zip(item.process_groups, item.sizes, strict=True):
        chunk = nbytes // 4 // group.size()  # the sum is in fp32
        part = _align(-(-chunk // MAX_PARTS), PART_ELEMENTS)
        sizes.append(group.size() * max(chunk * item.narrow.itemsize, part * 4))
    return dataclasses.replace(item, sizes=tuple(sizes))


def part_elements(slot_bytes: int, chunk: int, ranks: int, itemsize: int) -> int | None:
    """Elements of a rank's chunk that pass through a slot at a time, ``None`` if it takes too many parts.

    Args:
        slot_bytes: of the ring.
        chunk: elements of a rank's chunk.
        ranks: of the group; a slot holds a part of each rank's chunk.
        itemsize: bytes of an element as it travels.
    """
    room = slot_bytes // (ranks * itemsize)
    for part in (room // PART_ELEMENTS * PART_ELEMENTS, room):
        if 0 < chunk <= MAX_PARTS * part:
            return part
    return None


def shard_offsets(nbytes: Sequence[int]) -> list[int]:
    """Where each shard starts in a slot of the lane ``"unshard"``."""
    return [0, *itertools.accumulate(_align(n, SHARD_ALIGNMENT_BYTES) for n in nbytes)][: len(nbytes)]


def packed_nbytes(nbytes: Sequence[int]) -> int:
    """Bytes of a slot that holds shards of these sizes."""
    return sum(_align(n, SHARD_ALIGNMENT_BYTES) for n in nbytes)


def slots_needed(lane: Lane, *, schedule_slots: int, input_buffers: int, groups_per_module: int) -> int:
    """How many slots a lane's ring needs (FSDP2's rules, read in torch 2.13-2.15).

    All-gather: what the replay of the prefetch lists says (:mod:`fsdp_symm.schedule`), and never less than the output
    just copied out plus one prefetched module (1 + G). Unshard: two for any program, since a slot is free as soon as
    peers have pulled it, and pulls follow one another: one is pulled while the next one is filled. Reduce-scatter: K
    inputs are kept, and only a module's last param group reclaims (K - 1 + G).
    """
    if lane == "all_gather":
        return max(schedule_slots, 1 + groups_per_module)
    return 2 if lane == "unshard" else input_buffers - 1 + groups_per_module


def _align(nbytes: int, boundary: int = SLOT_ALIGNMENT_BYTES) -> int:
    return -(-nbytes // boundary) * boundary


def process_groups(groups: Iterable[ParamGroup]) -> list[tuple[dist.ProcessGroup, str]]:
    """Every (process group, root) of the model's sharded communication, in FQN order, served or not."""
    found: dict[tuple[str, str], dist.ProcessGroup] = {}
    for group in groups:
        if group.kind != "replicate" and compat.shard_group(group).size() > 1:
            for role in compat.ROLES:
                for process_group in role_groups(group, role):
                    found.setdefault((compat.group_name(process_group), group.root), process_group)
    return [(process_group, root) for (_, root), process_group in found.items()]


def make_plan(
    groups: Iterable[ParamGroup],
    members: Iterable[Member],
    *,
    schedule_slots: int,
    input_buffers: int,
    slots: int | None = None,
) -> tuple[GroupPlan, ...]:
    """Arrange members into one plan for every process group and root that the model uses.

    FSDP2 keeps buffers alive per root, so several roots over one process group need rings of their own. A group
    without members has an empty plan: its ranks still compare it, since another rank may have planned more.

    Args:
        groups: the model's param groups, in FQN order.
        members: what takes part, in FQN order.
        schedule_slots: what :func:`fsdp_symm.schedule.all_gather_slots` says.
        input_buffers: K, at least 1.
        slots: lower bound on the all-gather slots of every ring, for programs that unshard early by hand.
    """
    order = process_groups(groups)
    by_group: dict[tuple[str, str], list[Member]] = {(compat.group_name(g), root): [] for g, root in order}
    for item in members:
        for process_group in item.process_groups:
            by_group[compat.group_name(process_group), item.group.root].append(item)
    plans = []
    for process_group, root in order:
        name, ranks = compat.group_name(process_group), compat.group_ranks(process_group)
        items = by_group[name, root]
        sizes = [m.sizes[[compat.group_name(g) for g in m.process_groups].index(name)] for m in items]
        needs = tuple(
            BufferNeed(m.group.label, m.lane, ranks, name, size, m.dtype_text, m.narrow is not None)
            for m, size in zip(items, sizes, strict=True)
        )
        rings = tuple(
            _ring(lane, chosen, schedule_slots, input_buffers, slots)
            for lane in LANES
            if (chosen := [(m, size) for m, size in zip(items, sizes, strict=True) if m.lane == lane])
        )
        backend, device = (items[0].backend, items[0].group.device) if items else ("none", torch.device("meta"))
        plans.append(GroupPlan(process_group, backend, device, root, needs, rings))
    return tuple(plans)


def _ring(lane: Lane, items: list[tuple[Member, int]], schedule_slots: int, buffers: int, slots: int | None) -> Ring:
    count = slots_needed(
        lane,
        schedule_slots=schedule_slots,
        input_buffers=buffers,
        groups_per_module=max(m.group.siblings for m, _ in items),
    )
    if lane != "reduce_scatter" and slots is not None:
        count = max(count, slots)
    return Ring(lane, count, _align(max(size for _, size in items)))


def digest(lines: list[str]) -> str:
    """SHA-256 over the plan's lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def agree(plans: tuple[GroupPlan, ...], *, options: str, timeout_s: float) -> None:
    """Prove that every rank of every group made the same plan. Collective over all the plans' groups.

    Raises:
        SymmMemTimeoutError: a rank did not call the switch.
        PlanMismatchError: names the ranks and the first line that differs.
    """
    what = "set_symm_mem_for_comm: comparing the communication plan"
    fix = (
        "call set_symm_mem_for_comm on every rank, with models built by the same code; look for an error on the "
        "missing ranks"
    )
    texts = [plan.lines(options) for plan in plans]
    digests = exchange_many(
        [(p.group, digest(t).encode()) for p, t in zip(plans, texts, strict=True)],
        what=what,
        timeout_s=timeout_s,
        fix=fix,
    )
    # Every member of a group sees the same digests, so all of them take this second exchange or none does.
    differing = [(p, t) for p, t, found in zip(plans, texts, digests, strict=True) if len(set(found)) > 1]
    if not differing:
        return
    full = exchange_many(
        [(p.group, "\n".join(t).encode()) for p, t in differing], what=what, timeout_s=timeout_s, fix=fix
    )
    raise PlanMismatchError(_first_difference(differing[0][0], [f.decode().split("\n") for f in full[0]]))


def _first_difference(plan: GroupPlan, texts: list[list[str]]) -> str:
    ranks = plan.ranks
    other = next(i for i, text in enumerate(texts) if text != texts[0])
    left, right = texts[0], texts[other]
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None:
        at = min(len(left), len(right))
    line = [text[at] if at < len(text) else "(nothing more)" for text in (left, right)]
    return problem(
        f"set_symm_mem_for_comm: the ranks of group {list(ranks)} planned different communication",
        found=f"rank {ranks[0]}: {line[0]!r}; rank {ranks[other]}: {line[1]!r}",
        expected="the same modules, sizes, dtypes and options on every rank",
        fix="build the model, its fully_shard calls and the switch's arguments alike on all ranks",
    )
