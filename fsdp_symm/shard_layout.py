"""How the shards of one param group lie in a slot of symmetric memory, and where peers' shards go.

Legend: W ranks, n elements of one rank's shard of a parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fsdp_symm import compat
from fsdp_symm.compat_unshard import Allocation
from fsdp_symm.memory.unsharded import Room
from fsdp_symm.plan import largest_first, packed_nbytes, shard_offsets
from fsdp_symm.wire.pulls import Block, PullPlan, in_rows


@dataclass(frozen=True)
class Shards:
    """The all-gather inputs of a param group, one entry for each.

    Attributes:
        numels, dtypes, counts: see :func:`fsdp_symm.compat_unshard.gather_inputs`.
        rows: into how many rows of the unsharded tensor a shard is cut.
    """

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    counts: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each."""
        return [n * d.itemsize for n, d in zip(self.numels, self.dtypes, strict=True)]


@dataclass(frozen=True)
class ShardLayout:
    """One param group's shards in a slot, and the pulls that bring them to the unsharded tensors of a rank.

    Attributes:
        shards: the inputs.
        rank, world_size: of the process group.
        offsets: where each shard lies, bytes from the slot's start.
        nbytes: bytes of the slot.
        gathered_nbytes: bytes of all unsharded tensors.
        whole_nbytes: bytes of each.
        what: the call, for its signature.
        allocations: how the unsharded tensors are to be allocated: those of equal size side by side.
    """

    shards: Shards
    rank: int
    world_size: int
    offsets: tuple[int, ...]
    nbytes: int
    gathered_nbytes: int
    whole_nbytes: tuple[int, ...]
    what: str
    allocations: tuple[Allocation, ...]
    _plans: dict[tuple[tuple[int, int], ...], PullPlan] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(shards: Shards, rank: int, world_size: int, module: str) -> ShardLayout:
        """Lay out the inputs of a module for this rank of a process group."""
        sizes = shards.nbytes
        total = packed_nbytes(sizes)
        kinds = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in shards.dtypes))
        return ShardLayout(
            shards,
            rank,
            world_size,
            offsets=tuple(shard_offsets(sizes)),
            nbytes=total,
            gathered_nbytes=sum(sizes) * world_size,
            whole_nbytes=tuple(n * world_size for n in sizes),
            what=f"unshard of {module!r}, {total} bytes of shards {kinds}",
            allocations=_allocations(shards),
        )

    # --- the pull ---

    def pull(self, targets: Sequence[torch.Tensor], rooms: Sequence[Room]) -> tuple[PullPlan, list[torch.Tensor]]:
        """What to fetch into unsharded tensors ``[W * n]``: a plan, kept, and the targets that it is for.

        Args:
            targets: the unsharded tensors.
            rooms: blocks of memory in which some of them may lie. Such a room becomes one target, in which shards of
                equal size can be fetched together.
        """
        inside = [next((i for i, room in enumerate(rooms) if room.holds(t)), None) for t in targets]
        used = sorted({room for room in inside if room is not None})
        wholes = [compat.raw_tensor(rooms[room].address, rooms[room].nbytes, targets[0].device) for room in used]
        alone = itertools.count(len(used))
        places: list[tuple[int, int]] = []  # of each tensor: the target's number, and the offset in it
        for tensor, room in zip(targets, inside, strict=True):
            if room is None:
                places.append((next(alone), 0))
                wholes.append(tensor)
            else:
                places.append((used.index(room), tensor.data_ptr() - rooms[room].address))
        key = tuple(places)
        if key not in self._plans:
            self._plans[key] = PullPlan(in_rows(self._blocks(places)), rank=self.rank, world_size=self.world_size)
        return self._plans[key], wholes

    def _blocks(self, places: Sequence[tuple[int, int]]) -> list[Block]:
        blocks = []
        for peer in (p for p in range(self.world_size) if p != self.rank):
            layout = zip(self.shards.nbytes, self.offsets, self.shards.rows, places, strict=True)
            for size, source, rows, (target, start) in layout:
                width = size // rows
                blocks.append(Block(peer, source, target, start + peer * width, width, rows, self.world_size * width))
        return blocks

    # --- this rank's own shards ---

    def in_slot(self, slot: int, device: torch.device) -> list[torch.Tensor]:
        """The shards' places ``[n]`` in the slot at this address."""
        return [
            compat.raw_tensor(slot + at, n * dtype.itemsize, device).view(dtype)
            for at, n, dtype in zip(self.offsets, self.shards.numels, self.shards.dtypes, strict=True)
        ]

    def in_place(self, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where this rank's own shards belong in unsharded tensors: ``[n]``, and ``[rows, n / rows]`` where a shard is
        cut into several rows. Views that keep no storage alive and count no versions."""
        views = []
        for target, n, dtype, rows in zip(
            targets, self.shards.numels, self.shards.dtypes, self.shards.rows, strict=True
        ):
            nbytes = n * dtype.itemsize * self.world_size
            whole = compat.raw_tensor(target.data_ptr(), nbytes, target.device).view(dtype)
            if rows == 1:
                views.append(whole.narrow(0, self.rank * n, n))
            else:
                views.append(whole.view(rows, self.world_size, n // rows)[:, self.rank])
        return views


def _allocations(shards: Shards) -> tuple[Allocation, ...]:
    sizes, ends = shards.nbytes, list(itertools.accumulate(shards.counts, initial=0))
    spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
    order = largest_first([sum(sizes[span]) for span in spans])
    return tuple(Allocation(p, list(shards.numels[spans[p]]), list(shards.dtypes[spans[p]])) for p in order)
