"""What one call fetches from its peers: blocks of bytes, from places in their slots to places in local tensors.

All copy-engine collectives are one primitive: every rank publishes its slot, waits for its peers', and *pulls* what it
needs. A plan of blocks is made once and used by every call of the same shape, so that a wire can keep its pointer
arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_symm.errors import SymmMemError, problem


@dataclass(frozen=True)
class Block:
    """``rows`` rows of ``nbytes`` bytes, packed in the peer's slot.

    Attributes:
        peer: group rank to fetch from; never this rank, whose own bytes are a local copy of the caller's.
        source: where the first row starts in the peer's slot of this call, in bytes.
        target: which of the call's target tensors they go to.
        offset: where the first row goes in that tensor, in bytes.
        nbytes: bytes of one row.
        rows: number of rows.
        pitch: bytes from the start of one row to the next in the target; the source has no gaps.
    """

    peer: int
    source: int
    target: int
    offset: int
    nbytes: int
    rows: int = 1
    pitch: int = 0

    @property
    def packed_nbytes(self) -> int:
        """Bytes that travel."""
        return self.nbytes * self.rows

    @property
    def end(self) -> int:
        """First byte of the target behind the block."""
        return self.offset + (self.rows - 1) * self.pitch + self.nbytes


_numbers = itertools.count()


def _check(block: Block) -> None:
    numbers = (block.peer, block.source, block.target, block.offset, block.nbytes)
    pitched = block.rows == 1 or block.pitch >= block.nbytes
    if min(numbers) < 0 or block.rows < 1 or not pitched:
        raise SymmMemError(
            problem(
                "PullPlan: a block that cannot be copied",
                found=block,
                expected="numbers >= 0, rows >= 1, and pitch >= nbytes where there are several rows",
                fix="build blocks from the layout of the peer's slot",
            )
        )


class PullPlan:
    """The blocks of a call, peers in rotated order so that not all ranks read the same peer at once.

    Args:
        blocks: what to fetch; empty blocks are left out.
        rank, world_size: this rank's number in the group and the group's size, for the order.

    Attributes:
        number: of no other plan in this process, so that a wire can keep what it made of a plan.
        nbytes: bytes of all blocks.

    Raises:
        SymmMemError: a block that cannot be copied, or one from this rank itself or from outside the group.
    """

    def __init__(self, blocks: Iterable[Block], *, rank: int, world_size: int) -> None:
        wanted = [block for block in blocks if block.packed_nbytes]
        for block in wanted:
            _check(block)
        outside = sorted({b.peer for b in wanted if b.peer == rank or b.peer >= world_size})
        if outside:
            raise SymmMemError(
                problem(
                    "PullPlan: blocks from ranks that are no peers",
                    found=f"group ranks {outside} on rank {rank} of {world_size}",
                    expected="peers only",
                    fix="copy this rank's own bytes locally",
                )
            )
        self.rank, self.world_size = rank, world_size
        self.number = next(_numbers)
        self.blocks = tuple(sorted(wanted, key=lambda b: (b.peer - rank) % world_size))
        self.nbytes = sum(block.packed_nbytes for block in self.blocks)
        self.by_peer: dict[int, tuple[Block, ...]] = {}
        for block in self.blocks:
            self.by_peer[block.peer] = (*self.by_peer.get(block.peer, ()), block)

    def check_targets(self, sizes: list[int], what: str) -> None:
        """Refuse targets that are missing or too small.

        Raises:
            SymmMemError: names the first block that has no room.
        """
        for block in self.blocks:
            if block.target >= len(sizes) or block.end > sizes[block.target]:
                raise SymmMemError(
                    problem(
                        f"{what}: a target has no room",
                        found=f"targets of {sizes} bytes",
                        expected=f"room for {block}",
                        fix="pass the tensors that the plan was made for",
                    )
                )
