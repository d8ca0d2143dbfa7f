"""Unsharding one Llama block: direct placement against all-gathers that are copied out, as FSDP2 does it.

Every way starts from the same shards, which lie where its all-gather wants them, and ends with the same nine unsharded
parameters. Casting and copying shards in is left out, since it is the same for all. Rates count bytes from peers.

Legend: W ranks, D model width, H hidden width, n elements of one rank's shard of a parameter, N of all its shards.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_symm import compat
from fsdp_symm.bench import schema
from fsdp_symm.bench.launch import World, need_gpu, run_ranks
from fsdp_symm.bench.profiling import profile_ways
from fsdp_symm.bench.timing import Clock, Way, check, columns
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.plan import Ring, packed_nbytes, shard_offsets
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import Block, PullPlan

DIRECT, PLAIN, NCCL, STAGED = "direct", "plain NCCL", "NCCL window", "staged"
_POISON = -21555  # a pattern of bytes that no test shard is made of
_ARENA_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class UnshardBench:
    """What to measure.

    Attributes:
        ranks: W.
        mib: sizes of one rank's shards of a block, in MiB.
        command: recorded in every line.
        traces: folder for one trace a size, ``None`` for none.
        device_type: ``"cpu"`` runs the same code over gloo and shared memory, to try it.
    """

    ranks: int
    mib: tuple[float, ...]
    command: str = ""
    traces: Path | None = None
    device_type: str = "cuda"


@dataclass(frozen=True)
class BlockShards:
    """The nine parameters of a Llama block, as one rank holds them.

    Attributes:
        numels: n of q, k, v, o, gate, up, down and the two norms; bf16.
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
        """Bytes of one rank's shards, tight."""
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

    def shard(self, rank: int, index: int, device: torch.device) -> torch.Tensor:
        """Rank ``rank``'s shard of parameter ``index``: random finite numbers, the same wherever they are made.

        Finite, because a copy kernel may change the bits of a NaN.
        """
        generator = torch.Generator(device).manual_seed(1000 * rank + index)
        bits = torch.randint(20000, (self.numels[index],), generator=generator, device=device)
        return bits.to(torch.int16).view(torch.bfloat16)


class Parameters:
    """The unsharded parameters ``bf16 [W * n]`` that every way fills."""

    def __init__(self, world: World, shards: BlockShards) -> None:
        self._world, self._shards = world, shards
        self.targets = [torch.empty(n * world.size, dtype=torch.bfloat16, device=world.device) for n in shards.numels]
        self._rows = [t.view(world.size, -1) for t in self.targets]

    def copy_out(self, gathered: torch.Tensor) -> None:
        """FSDP2's copy from ``gathered [W * N]`` into the parameters."""
        torch.split_with_sizes_copy(
            gathered.view(self._world.size, -1), list(self._shards.numels), dim=1, out=self._rows
        )

    def poison(self) -> None:
        """Fill them with what no shard holds."""
        for target in self.targets:
            target.view(torch.int16).fill_(_POISON)

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


class Arenas:
    """Symmetric memory of the largest block, made once; the smaller ones lie in the same slots."""

    def __init__(self, world: World, largest: BlockShards) -> None:
        whole = largest.nbytes * world.size
        own = [Ring("unshard", 2, largest.slot_nbytes), Ring("all_gather", 1, whole)]
        backend = "nccl" if world.on_gpu else "host"
        self.own = SymmMemArena(world.group, own, backend=backend, device=world.device, timeout_s=_ARENA_TIMEOUT_S)
        self.staged: SymmMemArena | None = None
        try:
            self.staged = SymmMemArena(
                world.group,
                [Ring("all_gather", 2, whole)],
                backend="cuda" if world.on_gpu else "host",
                device=world.device,
                timeout_s=_ARENA_TIMEOUT_S,
            )
        except RuntimeError as error:  # ours or torch's, on every rank alike
            world.say(f"bench unshard: without {STAGED!r}: {error}")

    def close(self) -> None:
        """Give everything back, in the order of creation."""
        self.own.close()
        if self.staged is not None:
            self.staged.close()


def fill_slots(arena: SymmMemArena, world: World, shards: BlockShards) -> None:
    """Put this rank's shards into both slots of direct placement."""
    for _ in range(2):
        slot, lease = arena.acquire_lease("unshard", shards.slot_nbytes, owner="bench")
        for index, (offset, n) in enumerate(zip(shards.offsets, shards.numels, strict=True)):
            slot.narrow(0, offset, 2 * n).view(torch.bfloat16).copy_(shards.shard(world.rank, index, world.device))
        del slot, lease


def direct(
    arena: SymmMemArena, shards: BlockShards, plan: PullPlan, targets: Sequence[torch.Tensor], pulls_us: list[float]
) -> None:
    """One call as FSDP2 pays for it: the next slot, whose shards are in place, this rank's own shards to their places
    (in training a part of the copy-in), and the pull.

    Args:
        pulls_us: takes the host time of the pull alone.
    """
    slot, lease = arena.acquire_lease("unshard", shards.slot_nbytes, owner="bench")
    own = [t.narrow(0, plan.rank * n, n) for t, n in zip(targets, shards.numels, strict=True)]
    mine = [slot.narrow(0, at, 2 * n).view(torch.bfloat16) for at, n in zip(shards.offsets, shards.numels, strict=True)]
    torch._foreach_copy_(own, mine)
    epoch = arena.next_epoch(lease)
    start = time.perf_counter()
    wire_of(arena).pull(lease, epoch, plan, targets, what="bench: direct placement", async_op=False)
    pulls_us.append((time.perf_counter() - start) * 1e6)
    del slot


def gathered_by_wire(arena: SymmMemArena, nbytes: int, parameters: Parameters) -> None:
    """The next slot, whose own chunk is in place, our wire's all-gather, and the copy-out."""
    slot, lease = arena.acquire_lease("all_gather", nbytes, owner="bench")
    epoch = arena.next_epoch(lease)
    gathered = slot.view(torch.bfloat16)
    wire_of(arena).all_gather(gathered, lease, epoch, module="bench", async_op=False)
    parameters.copy_out(gathered)


def gathered_by_group(group: Any, whole: torch.Tensor, own: torch.Tensor, parameters: Parameters) -> None:
    """The process group's in-place all-gather, and the copy-out."""
    compat.plain_comm("all_gather")(whole, own, group, False)
    parameters.copy_out(whole)


def _own_chunk(world: World, shards: BlockShards, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole [W * N]``, filled with its shards, tight as FSDP2 packs them."""
    numel = sum(shards.numels)
    own = whole.narrow(0, world.rank * numel, numel)
    pieces = [shards.shard(world.rank, index, world.device) for index in range(len(shards.numels))]
    torch.cat(pieces, out=own)
    return own


def make_ways(world: World, shards: BlockShards, arenas: Arenas, pulls_us: list[float]) -> list[Way]:
    """Every way on the same parameters. :data:`DIRECT` first; ``pulls_us`` is for :func:`direct`."""
    parameters = Parameters(world, shards)
    nbytes = shards.nbytes * world.size
    fill_slots(arenas.own, world, shards)
    pull = partial(direct, arenas.own, shards, shards.plan(world.rank), parameters.targets, pulls_us)
    plain = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=world.device)
    window = arenas.own.acquire("all_gather", nbytes, owner="bench").view(torch.bfloat16)
    ways = [parameters.way(DIRECT, pull)]
    for name, group, whole in ((PLAIN, world.plain, plain), (NCCL, world.group, window)):
        own = _own_chunk(world, shards, whole)
        ways.append(parameters.way(name, partial(gathered_by_group, group, whole, own, parameters)))
    if arenas.staged is not None:
        for _ in range(2):
            slot = arenas.staged.acquire("all_gather", nbytes, owner="bench")
            _own_chunk(world, shards, slot.view(torch.bfloat16))
            del slot
        ways.append(parameters.way(STAGED, partial(gathered_by_wire, arenas.staged, nbytes, parameters)))
    world.meet()  # nobody pulls what is not there yet
    return ways


def _measure_size(world: World, clock: Clock, bench: UnshardBench, shards: BlockShards, arenas: Arenas) -> list[Any]:
    pulls_us: list[float] = []
    ways = make_ways(world, shards, arenas, pulls_us)
    check(world, ways, f"unshard of {shards.nbytes} bytes a rank")
    times = clock.time_all(ways)
    (pull_us,) = world.slowest([statistics.median(pulls_us)])
    keep = bench.traces and bench.traces / f"unshard_w{world.size}_{shards.nbytes / 2**20:.0f}mib.json.gz"
    seen = profile_ways(world, ways, keep)
    lines = []
    for way in ways:
        timed = times[way.name]
        line: dict[str, Any] = {"name": "unshard", "variant": way.name, "ranks": world.size, "bytes": shards.nbytes}
        line |= {"dtype": "bfloat16"} | schema.summarize(timed.alone) | world.facts(bench.command)
        line |= {"parameters": len(shards.numels), "product_us": round(clock.product_us, 1)}
        line |= columns(timed, base=times[DIRECT], base_name="direct")
        line |= {"host_pull_us": round(pull_us, 1) if way.name == DIRECT else ""}
        received = shards.nbytes * (world.size - 1)
        line |= {"gb_per_s": round(received / line["median_us"] / 1e3, 1)} | seen[way.name].columns()
        lines.append(line)
        world.say(f"unshard {shards.nbytes / 2**20:.3g} MiB {way.name}: {line['median_us'] / 1e3:.3f} ms")
    return lines


def measure_ranks(world: World, bench: UnshardBench) -> list[dict[str, Any]]:
    """What every rank does."""
    blocks = [BlockShards.scaled(int(mib * 2**20), world.size) for mib in bench.mib]
    arenas = Arenas(world, max(blocks, key=lambda b: b.slot_nbytes))
    clock = Clock(world)
    lines = [line for shards in blocks for line in _measure_size(world, clock, bench, shards, arenas)]
    world.meet()
    arenas.close()
    return lines


def measure(bench: UnshardBench) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a size and way, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU, a wrong result, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu("unshard")
    return run_ranks(measure_ranks, bench, ranks=bench.ranks, device_type=bench.device_type, what="bench unshard")
