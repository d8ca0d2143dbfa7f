"""Reduce-scatter: copy engines and a local sum, by piece size, against NCCL's symmetric and plain kernels.

Legend: W ranks, C elements of one rank's chunk; an input is ``[W * C]``, an output ``[C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.bench import schema
from fsdp_symm.bench.launch import World, need_gpu, run_ranks
from fsdp_symm.bench.profiling import profile_ways
from fsdp_symm.bench.timing import Clock, Way, check, columns
from fsdp_symm.errors import SymmMemUnavailableError, problem
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.plan import Ring
from fsdp_symm.wire import Wire, wire_of

PLAIN, SYMMETRIC = "plain NCCL", "symmetric kernel"
DTYPES = (torch.float32, torch.bfloat16)
OPS: dict[str, Any] = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG}
_ARENA_TIMEOUT_S = 60.0
_SLOTS = 2


@dataclass(frozen=True)
class ReduceBench:
    """What to measure.

    Attributes:
        ranks: W.
        mib: sizes of one rank's chunk, in MiB.
        pieces: bytes of a piece of the copy-engine way, one way each, in MiB.
        command: recorded in every line.
        traces: folder for one trace a size, dtype and op, ``None`` for none.
        device_type: ``"cpu"`` runs the same code over gloo and shared memory, to try it; there is one way then.
    """

    ranks: int
    mib: tuple[float, ...]
    pieces: tuple[float, ...]
    command: str = ""
    traces: Path | None = None
    device_type: str = "cuda"


def pulls_name(piece_mib: float) -> str:
    """The variant of a piece size."""
    return f"copy engine, {piece_mib:g} MiB pieces"


@dataclass(frozen=True)
class Task:
    """One reduce-scatter: C, its dtype, its op."""

    numel: int
    dtype: torch.dtype
    op: str

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.op} of {self.nbytes >> 10} KiB {str(self.dtype).removeprefix('torch.')} a rank"

    def chunk(self, sender: int, receiver: int, device: torch.device) -> torch.Tensor:
        """What ``sender`` has for ``receiver``: numbers in [-1, 1), the same wherever they are made."""
        generator = torch.Generator(device).manual_seed(1000 * sender + receiver)
        return torch.rand(self.numel, generator=generator, device=device).mul_(2).sub_(1).to(self.dtype)

    def fill(self, whole: torch.Tensor, world: World) -> None:
        """This rank's input."""
        for receiver in range(world.size):
            whole.narrow(0, receiver * self.numel, self.numel).copy_(self.chunk(world.rank, receiver, world.device))

    def reference(self, world: World) -> torch.Tensor:
        """The sum in rank order in fp32, scaled and rounded once: what the copy-engine way must give, bit by bit."""
        total = self.chunk(0, world.rank, world.device).float()
        for sender in range(1, world.size):
            total.add_(self.chunk(sender, world.rank, world.device).float())
        if self.op == "AVG":
            total.div_(world.size)
        return total.to(self.dtype)

    def tolerance(self, world_size: int) -> float:
        """How far a sum in another order, rounded after every addition, may be from the reference: the inputs are at
        most 1, so partial sums are at most W and each rounding errs by half a spacing."""
        spacing = torch.finfo(self.dtype).eps * world_size
        return spacing * world_size / 2 + spacing


class Result:
    """The output of all ways of one task, and what it should be."""

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self.output = torch.empty(task.numel, dtype=task.dtype, device=world.device)
        self._expected = task.reference(world)

    def poison(self) -> None:
        """Fill the output with NaN."""
        self.output.fill_(float("nan"))

    def wrong_bits(self) -> str | None:
        """The reference, bit by bit. Piece sizes that all agree with it agree with each other."""
        kind = torch.int32 if self.output.dtype == torch.float32 else torch.int16
        differ = self.output.view(kind) != self._expected.view(kind)
        count = int(differ.sum())
        return f"{count} of {differ.numel()} elements differ in their bits" if count else None

    def wrong_values(self) -> str | None:
        """The reference, within the tolerance of another order."""
        limit = self._task.tolerance(self._world.size)
        furthest = float((self.output.float() - self._expected.float()).abs().max())
        return None if furthest <= limit else f"an element is {furthest:g} off, more than {limit:g}"  # NaN is off too

    def exact(self, name: str, run: Callable[[], object]) -> Way:
        """A way that sums in rank order."""
        return Way(name, run, self.wrong_bits, self.poison)

    def close(self, name: str, run: Callable[[], object]) -> Way:
        """A way that sums in whatever order."""
        return Way(name, run, self.wrong_values, self.poison)


class _Pieces:
    """The arena's own wire, told to pull, in pieces of any size."""

    def __init__(self, arena: SymmMemArena) -> None:
        from fsdp_symm.wire import pull_reduce  # needs a CUDA build of torch

        self._module: Any = pull_reduce
        self._arena = arena
        self._wire = wire_of(arena)

    @property
    def usual(self) -> str:
        """The variant with the package's own piece size."""
        return pulls_name(self._module.PIECE_BYTES / 2**20)

    def check(self, task: Task, output: torch.Tensor) -> None:
        """Refuse to time NCCL under the name of the copy engines.

        Raises:
            SymmMemUnavailableError: the wire would not pull, though it was told to.
        """
        way, self._wire.reduce_scatter_way = self._wire.reduce_scatter_way, "copy_engine"
        engine = self._wire.reduce_engine(output, OPS[task.op])
        self._wire.reduce_scatter_way = way
        if engine != "copy_engine":
            raise SymmMemUnavailableError(
                problem(
                    f"bench reduce-scatter: {task} does not run on copy engines",
                    found=f"it would run on {engine}",
                    expected="GPUs within reach of each other, and a floating dtype",
                    fix="run it on the GPUs of one host",
                )
            )

    def run(self, piece_mib: float, task: Task, output: torch.Tensor) -> None:
        """One call."""
        usual, self._module.PIECE_BYTES = self._module.PIECE_BYTES, int(piece_mib * 2**20)
        way, self._wire.reduce_scatter_way = self._wire.reduce_scatter_way, "copy_engine"
        try:
            call(self._arena, self._wire, task, output)
        finally:
            self._module.PIECE_BYTES, self._wire.reduce_scatter_way = usual, way


def call(arena: SymmMemArena, wire: Wire, task: Task, output: torch.Tensor) -> None:
    """One call as FSDP2 pays for it: the next slot, whose input is in place, and the reduce-scatter."""
    slot, lease = arena.acquire_lease("reduce_scatter", task.nbytes * arena.group.size(), owner="bench")
    epoch = arena.next_epoch(lease)
    whole = slot.view(task.dtype)
    wire.reduce_scatter(output, whole, OPS[task.op], lease, epoch, module="bench", async_op=False)


def _plain(group: Any, output: torch.Tensor, whole: torch.Tensor, op: str) -> None:
    compat.plain_comm("reduce_scatter")(output, whole, group, OPS[op], False)


class Machinery:
    """Memory of the largest task and its wire, made once."""

    def __init__(self, world: World, largest_nbytes: int, pieces: Sequence[float]) -> None:
        rings = [Ring("reduce_scatter", _SLOTS, largest_nbytes * world.size)]
        backend = "nccl" if world.on_gpu else "host"
        self.arena = SymmMemArena(world.group, rings, backend=backend, device=world.device, timeout_s=_ARENA_TIMEOUT_S)
        self.pieces = tuple(pieces)
        self.pulls = _Pieces(self.arena) if world.on_gpu else None
        self.wire = wire_of(self.arena)
        self.wire.reduce_scatter_way = "nccl"

    @property
    def usual(self) -> str:
        """The variant that the package takes by default."""
        return "host" if self.pulls is None else self.pulls.usual

    def make_ways(self, world: World, task: Task) -> list[Way]:
        """Every way with the same input and the same output. NCCL's symmetric kernel first."""
        result = Result(task, world)
        for _ in range(_SLOTS):
            slot = self.arena.acquire("reduce_scatter", task.nbytes * world.size, owner="bench")
            task.fill(slot.view(task.dtype), world)
            del slot
        plain = torch.empty(task.numel * world.size, dtype=task.dtype, device=world.device)
        task.fill(plain, world)
        by_wire = partial(call, self.arena, self.wire, task, result.output)
        # Shared memory sums in rank order, NCCL does not say in which.
        ways = [result.close(SYMMETRIC, by_wire) if self.pulls else result.exact("host", by_wire)]
        # gloo knows no AVG
        if world.on_gpu or task.op == "SUM":
            ways.append(result.close(PLAIN, partial(_plain, world.plain, result.output, plain, task.op)))
        if self.pulls is not None:
            self.pulls.check(task, result.output)
            for mib in self.pieces:
                run = partial(self.pulls.run, mib, task, result.output)
                ways.append(result.exact(pulls_name(mib), run))
        world.meet()  # nobody pulls what is not there yet
        return ways


def _measure_task(world: World, clock: Clock, bench: ReduceBench, task: Task, machinery: Machinery) -> list[Any]:
    ways = machinery.make_ways(world, task)
    check(world, ways, f"reduce-scatter, {task}")
    times = clock.time_all(ways)
    dtype = str(task.dtype).removeprefix("torch.")
    stem = f"reduce_scatter_w{world.size}_{task.nbytes >> 20}mib_{dtype}_{task.op.lower()}"
    seen = profile_ways(world, ways, bench.traces and bench.traces / f"{stem}.json.gz")
    base, lines = times[ways[0].name], []
    for way in ways:
        timed = times[way.name]
        line: dict[str, Any] = {"name": "reduce_scatter", "variant": way.name, "ranks": world.size}
        line |= {"bytes": task.nbytes, "dtype": dtype} | schema.summarize(timed.alone) | world.facts(bench.command)
        line |= {"op": task.op, "product_us": round(clock.product_us, 1)}
        line |= {"usual": int(way.name == machinery.usual)}
        line |= columns(timed, base=base, base_name="symmetric") | seen[way.name].columns()
        lines.append(line)
    world.say(f"reduce_scatter {task}: " + ", ".join(f"{x['variant']} {x['median_us'] / 1e3:.3f} ms" for x in lines))
    return lines


def measure_ranks(world: World, bench: ReduceBench) -> list[dict[str, Any]]:
    """What every rank does."""
    sizes = [int(mib * 2**20) for mib in bench.mib]
    machinery = Machinery(world, max(sizes), bench.pieces)
    clock = Clock(world)
    lines: list[dict[str, Any]] = []
    for nbytes in sizes:
        for dtype in DTYPES:
            for op in OPS:
                task = Task(nbytes // dtype.itemsize, dtype, op)
                lines += _measure_task(world, clock, bench, task, machinery)
    world.meet()
    machinery.arena.close()
    return lines


def measure(bench: ReduceBench) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a task and way, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU, a wrong result, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu("reduce-scatter")
    return run_ranks(
        measure_ranks, bench, ranks=bench.ranks, device_type=bench.device_type, what="bench reduce-scatter"
    )
