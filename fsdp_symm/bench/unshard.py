"""Unsharding one Llama block: direct placement against all-gathers that are copied out, as FSDP2 does it.

Every way starts from the same fp32 shards and ends with the same nine bf16 parameters. A *whole* unshard is the copy-in
with its cast, the exchange, and the copy-out where there is one. From shards that are copied in already, two parts are
measured as well: the *exchange* alone, and *placing*, which ends with complete parameters.

* Direct: one fused copy of the fp32 shards into the slot and into this rank's own places in the parameters, as
  :mod:`fsdp_symm.unshard` does it, and the pull of the peers' shards to theirs. The pull is its placing too, since the
  copy-in has placed this rank's own shards.
* All others: one fused copy into this rank's chunk of the gathered buffer, the all-gather, and FSDP2's copy-out. FSDP2
  itself copies in twice (a cast, then a pack), so this is the best that it could do. Placing is the all-gather and the
  copy-out.

Rates are of the exchange and count bytes from peers. Legend as in :mod:`fsdp_symm.bench.unshard_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_symm import compat
from fsdp_symm.bench import schema
from fsdp_symm.bench.launch import World, need_gpu, run_ranks
from fsdp_symm.bench.profiling import profile_ways
from fsdp_symm.bench.timing import Clock, Timed, Way, check, columns, ratios, spread
from fsdp_symm.bench.unshard_block import POISON, BlockShards, Parameters
from fsdp_symm.copy_in import CopyIn
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.plan import Ring
from fsdp_symm.wire import wire_of

DIRECT, PLAIN, NCCL, STAGED = "direct", "plain NCCL", "NCCL window", "staged"
_EXCHANGE, _PLACING = ", exchange", ", placing"
_SAID = (("whole", "median_us"), ("exchange", "exchange_us"), ("placing", "place_us"))
_SLOTS = 2
_ARENA_TIMEOUT_S = 60.0

Take = Callable[[], tuple[torch.Tensor, Callable[[], object]]]
"""Hands out the next gathered buffer ``bf16 [W * N]`` and what gathers into it."""


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


class Arenas:
    """Symmetric memory of the largest block, made once; the smaller ones lie in the same slots."""

    def __init__(self, world: World, largest: BlockShards) -> None:
        whole = largest.nbytes * world.size
        own = [Ring("unshard", _SLOTS, largest.slot_nbytes), Ring("all_gather", 1, whole)]
        backend = "nccl" if world.on_gpu else "host"
        self.own = SymmMemArena(world.group, own, backend=backend, device=world.device, timeout_s=_ARENA_TIMEOUT_S)
        self.staged: SymmMemArena | None = None
        try:
            self.staged = SymmMemArena(
                world.group,
                [Ring("all_gather", _SLOTS, whole)],
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


class Direct:
    """Direct placement."""

    def __init__(self, world: World, shards: BlockShards, arena: SymmMemArena, parameters: Parameters) -> None:
        self._world, self._shards, self._arena, self._parameters = world, shards, arena, parameters
        self._masters = shards.masters(world.rank, world.device)
        self._plan = shards.plan(world.rank)
        self._wire = wire_of(arena)
        self._copies: dict[int, CopyIn] = {}  # by address of the slot

    def copy_in(self, address: int) -> None:
        """Cast this rank's shards into the slot there, for the peers, and to their own places."""
        if address not in self._copies:
            shards = self._shards.views(address, self._shards.offsets, self._world.device)
            self._copies[address] = CopyIn(shards, self._parameters.own)
        self._copies[address].run(self._masters)

    def run(self, *, whole: bool) -> None:
        """The next slot, the copy-in if ``whole``, and the pull."""
        slot, lease = self._arena.reserve("unshard", self._shards.slot_nbytes, owner="bench")
        if whole:
            self.copy_in(slot)
        epoch, targets = self._arena.next_epoch(lease), self._parameters.targets
        self._wire.pull(lease, epoch, self._plan, targets, what="bench: direct placement", async_op=False)

    def poison_peers(self) -> None:
        """Wrong parameters, but for this rank's own shards, which an exchange does not touch."""
        self._parameters.poison()
        compat.copy_many(self._parameters.own, self._masters)

    def ways(self) -> list[Way]:
        """The whole, and the exchange alone from slots that are filled here, which is the placing."""
        for _ in range(_SLOTS):
            self.copy_in(self._arena.reserve("unshard", self._shards.slot_nbytes, owner="bench")[0])
        exchange = partial(self.run, whole=False)
        return [
            self._parameters.way(DIRECT, partial(self.run, whole=True)),
            Way(DIRECT + _EXCHANGE, exchange, self._parameters.wrong, self.poison_peers),
        ]


class Staged:
    """A gathered buffer and FSDP2's copy-out.

    Args:
        take: see :data:`Take`; every rank takes in the same order.
        buffers: how many buffers it hands out in turns.
    """

    def __init__(self, world: World, shards: BlockShards, parameters: Parameters, take: Take, buffers: int) -> None:
        self._world, self._shards, self._parameters = world, shards, parameters
        self._take, self._buffers = take, buffers
        self._masters = shards.masters(world.rank, world.device)
        self._offsets = [2 * sum(shards.numels[:index]) for index in range(len(shards.numels))]  # tight, as FSDP2 packs
        self._places: dict[int, list[torch.Tensor]] = {}  # of the own chunk, by address of the buffer
        self._last: list[torch.Tensor] = []  # every rank's chunk of the last exchange, keeping no slot in use

    def copy_in(self, gathered: torch.Tensor) -> None:
        """Cast this rank's shards into its chunk."""
        address = gathered.data_ptr()
        if address not in self._places:
            start = address + self._world.rank * self._shards.nbytes
            self._places[address] = self._shards.views(start, self._offsets, self._world.device)
        compat.copy_many(self._places[address], self._masters)

    def whole(self) -> None:
        """Copy-in, all-gather, copy-out."""
        gathered, exchange = self._take()
        self.copy_in(gathered)
        exchange()
        self._parameters.copy_out(gathered)

    def exchange(self) -> None:
        """The all-gather."""
        gathered, exchange = self._take()
        exchange()
        self._last = self._chunks(gathered)

    def place(self) -> None:
        """All-gather, copy-out."""
        gathered, exchange = self._take()
        exchange()
        self._parameters.copy_out(gathered)

    def _chunks(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        nbytes, address = self._shards.nbytes, gathered.data_ptr()
        size = range(self._world.size)
        return [compat.wrap_memory(address + r * nbytes, nbytes, self._world.device)[0] for r in size]

    def poison_peers(self) -> None:
        """Wrong chunks in every buffer, but for this rank's own."""
        for _ in range(self._buffers):
            for rank, chunk in enumerate(self._chunks(self._take()[0])):
                if rank != self._world.rank:
                    chunk.view(torch.int16).fill_(POISON)

    def poison_all(self) -> None:
        """Wrong chunks of the peers and wrong parameters: neither the all-gather nor the copy-out may do nothing."""
        self.poison_peers()
        self._parameters.poison()

    def wrong(self) -> str | None:
        """The first rank whose chunk of the last exchange is not its shards, bit by bit."""
        for rank, chunk in enumerate(self._last):
            shards = [self._shards.shard(rank, index, self._world.device) for index in range(len(self._shards.numels))]
            differ = int((chunk.view(torch.int16) != torch.cat(shards).view(torch.int16)).sum())
            if differ:
                return f"the gathered chunk of rank {rank}: {differ} elements differ"
        return None if self._last else "nothing was gathered"

    def ways(self, name: str) -> list[Way]:
        """The whole, and from buffers that are filled here the exchange and the placing."""
        for _ in range(self._buffers):
            self.copy_in(self._take()[0])
        return [
            self._parameters.way(name, self.whole),
            Way(name + _EXCHANGE, self.exchange, self.wrong, self.poison_peers),
            Way(name + _PLACING, self.place, self._parameters.wrong, self.poison_all),
        ]


def take_from_group(world: World, group: Any, whole: torch.Tensor) -> Take:
    """One buffer, gathered by the process group in place."""
    chunk = whole.numel() // world.size
    own, comm = whole.narrow(0, world.rank * chunk, chunk), compat.plain_comm("all_gather")
    return lambda: (whole, partial(comm, whole, own, group, False))


def take_from_wire(arena: SymmMemArena, nbytes: int) -> Take:
    """The arena's next slot, gathered by our wire."""
    wire = wire_of(arena)

    def take() -> tuple[torch.Tensor, Callable[[], object]]:
        slot, lease = arena.acquire_lease("all_gather", nbytes, owner="bench")
        gathered = slot.view(torch.bfloat16)
        return gathered, lambda: wire.all_gather(
            gathered, lease, arena.next_epoch(lease), module="bench", async_op=False
        )

    return take


def make_ways(world: World, shards: BlockShards, arenas: Arenas) -> list[Way]:
    """Every way on the same parameters, each whole, its exchange, and its placing. :data:`DIRECT` first, whose placing
    is its exchange."""
    parameters = Parameters(world, shards)
    nbytes = shards.nbytes * world.size
    plain = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=world.device)
    window = arenas.own.acquire("all_gather", nbytes, owner="bench").view(torch.bfloat16)
    ways = Direct(world, shards, arenas.own, parameters).ways()
    for name, group, whole in ((PLAIN, world.plain, plain), (NCCL, world.group, window)):
        ways += Staged(world, shards, parameters, take_from_group(world, group, whole), 1).ways(name)
    if arenas.staged is not None:
        ways += Staged(world, shards, parameters, take_from_wire(arenas.staged, nbytes), _SLOTS).ways(STAGED)
    world.meet()  # nobody pulls what is not there yet
    return ways


def _parts(times: Mapping[str, Timed], name: str) -> tuple[Timed, Timed]:
    """Exchange and placing of a way; one and the same for :data:`DIRECT`."""
    exchange = times[name + _EXCHANGE]
    return exchange, times.get(name + _PLACING, exchange)


def _part_columns(times: Mapping[str, Timed], name: str) -> dict[str, Any]:
    """The figures of a way's exchange and placing; a ratio is that of the same part of :data:`DIRECT`."""
    (exchange, placing), (base, base_placing) = _parts(times, name), _parts(times, DIRECT)
    line = spread("exchange_us", exchange.alone, 1) | spread("exchange_host_us", exchange.host, 1)
    line |= _ratio("exchange_vs_direct", exchange, base)
    line |= spread("place_us", placing.alone, 1) | spread("place_host_us", placing.host, 1)
    line |= _ratio("place_vs_direct", placing, base_placing)
    line |= spread("place_under_gemm_us", placing.under, 1)
    return line | spread("place_gemm_slowdown_pct", placing.slowdown, 2)


def _ratio(name: str, timed: Timed, base: Timed) -> dict[str, Any]:
    values = zip(("", "_min", "_max"), ratios(timed.alone, base.alone), strict=True)
    return {name + end: round(value, 3) for end, value in values}


def _measure_size(world: World, clock: Clock, bench: UnshardBench, shards: BlockShards, arenas: Arenas) -> list[Any]:
    ways = make_ways(world, shards, arenas)
    check(world, ways, f"unshard of {shards.nbytes} bytes a rank")
    names = [way.name for way in ways]
    whole = [name for name in names if not name.endswith((_EXCHANGE, _PLACING))]
    places = [name for name in names if name.endswith(_PLACING)]
    times = clock.time_all(ways, beside=[*whole, *places, DIRECT + _EXCHANGE])
    keep = bench.traces and bench.traces / f"unshard_w{world.size}_{shards.nbytes / 2**20:.0f}mib.json.gz"
    seen = profile_ways(world, ways, keep)
    lines = []
    for name in whole:
        line: dict[str, Any] = {"name": "unshard", "variant": name, "ranks": world.size, "bytes": shards.nbytes}
        line |= {"dtype": "bfloat16"} | schema.summarize(times[name].alone) | world.facts(bench.command)
        line |= {"parameters": len(shards.numels), "product_us": round(clock.product_us, 1)}
        line |= columns(times[name], base=times[DIRECT], base_name="direct") | _part_columns(times, name)
        received = shards.nbytes * (world.size - 1)
        line |= {"gb_per_s": round(received / line["exchange_us"] / 1e3, 1)} | seen[name].columns()
        lines.append(line)
        took = [f"{part} {line[column] / 1e3:.3f} ms" for part, column in _SAID]
        world.say(f"unshard {shards.nbytes / 2**20:.3g} MiB {name}: {', '.join(took)}")
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
        need_gpu()
    return run_ranks(measure_ranks, bench, ranks=bench.ranks, device_type=bench.device_type, what="bench unshard")
