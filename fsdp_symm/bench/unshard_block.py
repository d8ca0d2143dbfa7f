"""One Llama block for the unshard benchmark: its fp32 shards, and the bf16 parameters that they become.

Legend: W ranks, D model width, H hidden width, n elements of one rank's shard of a parameter, N of all its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsdp_symm import compat
from fsdp_symm.bench.launch import World
from fsdp_symm.bench.timing import Way
from fsdp_symm.plan import packed_nbytes, shard_offsets
from fsdp_symm.wire.pulls import Block, PullPlan

POISON = -21555  # the bits of a bf16 number that is much smaller than any of a test shard


@dataclass(frozen=True)
class BlockShards:
    """The nine parameters of a Llama block, as one rank holds them: in fp32, to be gathered in bf16.

    Attributes:
        numels: n of q, k, v, o, gate, up, down and the two norms.
        world_size: W.
    """

    numels: tuple[int, ...]
    world_size: int

    @staticmethod
    def scaled(nbytes: int, world_size: int) -> BlockShards:
        """A block with Llama's proportions (k and v a quarter of q, H near 3.5 D) whose shards take ``nbytes``."""
        step = 8 * world_size
        width = max(step, int(math.sqrt(nbytes * world_size / 26.0)) // step * step)
        attention = 2.5 * width * width + 2 * width
        hidden = max(step, round((nbytes * world_size / 2 - attention) / (3 * width) / step) * step)
        full = [width * width, width * width // 4, width * width // 4, width * width, *[width * hidden] * 3]
        return BlockShards(tuple(n // world_size for n in (*full, width, width)), world_size)

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's shards in bf16, tight."""
        return 2 * sum(self.numels)

    @property
    def offsets(self) -> list[int]:
        """Where each shard starts in a slot of direct placement, in bytes."""
        return shard_offsets([2 * n for n in self.numels])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of such a slot."""
        return packed_nbytes([2 * n for n in self.numels])

    def plan(self, rank: int) -> PullPlan:
        """Every peer's shards to their places in the unsharded parameters."""
        blocks = [
            Block(peer, offset, index, 2 * peer * n, 2 * n)
            for peer in range(self.world_size)
            if peer != rank
            for index, (offset, n) in enumerate(zip(self.offsets, self.numels, strict=True))
        ]
        return PullPlan(blocks, rank=rank, world_size=self.world_size)

    def master(self, rank: int, index: int, device: torch.device) -> torch.Tensor:
        """Rank ``rank``'s fp32 shard of parameter ``index``: the same numbers wherever they are made."""
        generator = torch.Generator(device).manual_seed(1000 * rank + index)
        return torch.randn(self.numels[index], generator=generator, device=device)

    def masters(self, rank: int, device: torch.device) -> list[torch.Tensor]:
        """All of them."""
        return [self.master(rank, index, device) for index in range(len(self.numels))]

    def shard(self, rank: int, index: int, device: torch.device) -> torch.Tensor:
        """The shard as it travels, in bf16."""
        return self.master(rank, index, device).to(torch.bfloat16)

    def views(self, address: int, offsets: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """bf16 places of the shards behind an address, which keep no slot in use."""
        return [
            compat.wrap_memory(address + at, 2 * n, device)[0].view(torch.bfloat16)
            for at, n in zip(offsets, self.numels, strict=True)
        ]


class Parameters:
    """The unsharded parameters ``bf16 [W * n]`` that every way fills."""

    def __init__(self, world: World, shards: BlockShards) -> None:
        self._world, self._shards = world, shards
        self.targets = [torch.empty(n * world.size, dtype=torch.bfloat16, device=world.device) for n in shards.numels]
        self._rows = [t.view(world.size, -1) for t in self.targets]
        self.own = [rows[world.rank] for rows in self._rows]

    def copy_out(self, gathered: torch.Tensor) -> None:
        """FSDP2's copy from ``gathered [W * N]`` into the parameters."""
        torch.split_with_sizes_copy(
            gathered.view(self._world.size, -1), list(self._shards.numels), dim=1, out=self._rows
        )

    def poison(self) -> None:
        """Fill them with what no shard holds."""
        for target in self.targets:
            target.view(torch.int16).fill_(POISON)

    def wrong(self) -> str | None:
        """The first shard that is not in its place, bit by bit."""
        for index, target in enumerate(self.targets):
            for rank, row in enumerate(target.view(torch.int16).view(self._world.size, -1)):
                expected = self._shards.shard(rank, index, self._world.device).view(torch.int16)
                if not torch.equal(row, expected):
                    count = int((row != expected).sum())
                    return f"parameter {index}, shard of rank {rank}: {count} of {row.numel()} elements differ"
        return None

    def way(self, name: str, run: Callable[[], object]) -> Way:
        """A way that fills these parameters."""
        return Way(name, run, self.wrong, self.poison)
