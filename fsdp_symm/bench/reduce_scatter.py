"""Reduce-scatter: copy engines and a local sum against NCCL's symmetric and plain kernels.

Three kinds: fp32, bf16, and bf16 gradients with an fp32 sum. For the last one NCCL's ways get fp32 inputs, as FSDP2
gives them with ``reduce_dtype=float32``; that cast is not timed. Copy engines get the bf16 numbers and write fp32.

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

PLAIN, SYMMETRIC, PULLS, HOST = "plain NCCL", "symmetric kernel", "copy engine", "host"
# (dtype of the sum, dtype of the gradients)
KINDS = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))
OPS: dict[str, Any] = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG}
_ARENA_TIMEOUT_S = 60.0
_SLOTS = 2


@dataclass(frozen=True)
class ReduceBench:
    """What to measure.

    Attributes:
        ranks: W.
        mib: sizes of one rank's chunk, in MiB.
        pieces: bytes of a piece of copy-engine ways beside the one that follows the package's rule, in MiB.
        command: recorded in every line.
        traces: folder for one trace a size, dtype and op, ``None`` for none.
        device_type: ``"cpu"`` runs the same code over gloo and shared memory, to try it; there is one way of ours then.
    """

    ranks: int
    mib: tuple[float, ...]
    pieces: tuple[float, ...] = ()
    command: str = ""
    traces: Path | None = None
    device_type: str = "cuda"


def pulls_name(piece_mib: float | None) -> str:
    """The variant of a piece size; ``None`` is the package's rule."""
    return PULLS if piece_mib is None else f"{PULLS}, {piece_mib:g} MiB pieces"


@dataclass(frozen=True)
class Task:
    """One reduce-scatter.

    Attributes:
        numel: C.
        dtype: of the output and of what NCCL's ways send.
        op: name of the op.
        gradients: type of the numbers to be summed, which our own ways send; by default ``dtype``.
    """

    numel: int
    dtype: torch.dtype
    op: str
    gradients: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk of the output's type."""
        return self.numel * self.dtype.itemsize

    @property
    def sent(self) -> torch.dtype:
        """The type that our own ways send."""
        return self.gradients or self.dtype

    @property
    def widens(self) -> bool:
        """Whether it is summed in a wider type than the gradients have."""
        return self.sent != self.dtype

    @property
    def kind(self) -> str:
        """The type, or both."""
        names = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((self.sent, self.dtype))]
        return " in ".join(names)

    def __str__(self) -> str:
        return f"{self.op} of {self.nbytes >> 10} KiB {self.kind} a rank"

    def wire_nbytes(self, variant: str) -> int:
        """Bytes of one chunk as a variant sends it."""
        return self.numel * (self.dtype if variant in (PLAIN, SYMMETRIC) else self.sent).itemsize

    def chunk(self, sender: int, receiver: int, device: torch.device) -> torch.Tensor:
        """What ``sender`` has for ``receiver``: numbers in [-1, 1], the same wherever they are made."""
        generator = torch.Generator(device).manual_seed(1000 * sender + receiver)
        return torch.rand(self.numel, generator=generator, device=device).mul_(2).sub_(1).to(self.sent)

    def fill(self, whole: torch.Tensor, world: World) -> None:
        """This rank's input, in either type."""
        for receiver in range(world.size):
            whole.narrow(0, receiver * self.numel, self.numel).copy_(self.chunk(world.rank, receiver, world.device))

    def reference(self, world: World) -> torch.Tensor:
        """The sum in rank order in fp32, scaled and rounded once: what the copy-engine ways must give, bit by bit."""
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
    """An arena's own wire, told to pull, in pieces of any size or as the package's rule has it."""

    def __init__(self, arena: SymmMemArena) -> None:
        from fsdp_symm.wire import pull_reduce  # needs a CUDA build of torch

        self._module: Any = pull_reduce
        self._arena = arena
        self._wire = wire_of(arena)

    def check(self, task: Task, world: World) -> None:
        """Refuse to time NCCL under the name of the copy engines.

        Raises:
            SymmMemUnavailableError: the wire would not pull, though it was told to, or not widen.
        """
        way, self._wire.reduce_scatter_way = self._wire.reduce_scatter_way, "copy_engine"
        engine = self._wire.reduce_engine(torch.empty(0, dtype=task.sent, device=world.device), OPS[task.op])
        widens = self._wire.widens
        self._wire.reduce_scatter_way = way
        if engine != "copy_engine" or (task.widens and not widens):
            raise SymmMemUnavailableError(
                problem(
                    f"bench reduce-scatter: {task} does not run on copy engines",
                    found=f"it would run on {engine}" if engine != "copy_engine" else "a wire that does not widen",
                    expected="GPUs within reach of each other, and a floating dtype",
                    fix="run it on the GPUs of one host",
                )
            )

    def run(self, piece_mib: float | None, task: Task, output: torch.Tensor) -> None:
        """One call; ``None`` is the package's rule."""
        piece = None if piece_mib is None else int(piece_mib * 2**20)
        kept, self._module.PIECE_BYTES = self._module.PIECE_BYTES, piece
        way, self._wire.reduce_scatter_way = self._wire.reduce_scatter_way, "copy_engine"
        try:
            call(self._arena, self._wire, task, output, task.sent)
        finally:
            self._module.PIECE_BYTES, self._wire.reduce_scatter_way = kept, way


def call(arena: SymmMemArena, wire: Wire, task: Task, output: torch.Tensor, sent: torch.dtype) -> None:
    """One call as FSDP2 pays for it: the next slot, with an input of type ``sent`` in place, and the reduce-scatter."""
    nbytes = task.numel * sent.itemsize * arena.group.size()
    slot, lease = arena.acquire_lease("reduce_scatter", nbytes, owner="bench")
    epoch = arena.next_epoch(lease)
    wire.reduce_scatter(output, slot.view(sent), OPS[task.op], lease, epoch, module="bench", async_op=False)


def _plain(group: Any, output: torch.Tensor, whole: torch.Tensor, op: str) -> None:
    compat.plain_comm("reduce_scatter")(output, whole, group, OPS[op], False)


class Machinery:
    """Memory of the largest task and its wires, made once.

    Slots hold what is sent. NCCL's symmetric kernel and the copy engines send different numbers where a task widens, so
    that there is a second arena for those of the copy engines.
    """

    def __init__(self, world: World, largest_nbytes: int, pieces: Sequence[float]) -> None:
        self._world = world
        self._arenas = [self._arena(largest_nbytes)]
        self._pulls: list[_Pieces] = []
        if world.on_gpu:
            self._arenas.append(self._arena(largest_nbytes // 2))
            self._pulls = [_Pieces(arena) for arena in self._arenas]
        self._pieces = (None, *pieces)
        self._wire = wire_of(self._arenas[0])
        self._wire.reduce_scatter_way = "nccl"

    def _arena(self, nbytes: int) -> SymmMemArena:
        world = self._world
        rings = [Ring("reduce_scatter", _SLOTS, nbytes * world.size)]
        backend = "nccl" if world.on_gpu else "host"
        return SymmMemArena(world.group, rings, backend=backend, device=world.device, timeout_s=_ARENA_TIMEOUT_S)

    def close(self) -> None:
        """Give everything back, in the order of creation."""
        for arena in self._arenas:
            arena.close()

    def make_ways(self, task: Task) -> list[Way]:
        """Every way with the same numbers and the same output. NCCL's symmetric kernel first, on a CPU ours."""
        world, result = self._world, Result(task, self._world)
        ways = self._pulling(task, result) if world.on_gpu else []
        own = task.dtype if world.on_gpu else task.sent
        self._fill(self._arenas[0], task, own)
        by_wire = partial(call, self._arenas[0], self._wire, task, result.output, own)
        # Shared memory sums in rank order, NCCL does not say in which.
        first = result.close(SYMMETRIC, by_wire) if world.on_gpu else result.exact(HOST, by_wire)
        if world.on_gpu or task.op == "SUM":  # gloo knows no AVG
            plain = torch.empty(task.numel * world.size, dtype=task.dtype, device=world.device)
            task.fill(plain, world)
            ways.insert(0, result.close(PLAIN, partial(_plain, world.plain, result.output, plain, task.op)))
        world.meet()  # nobody pulls what is not there yet
        return [first, *ways]

    def _pulling(self, task: Task, result: Result) -> list[Way]:
        """Ways of the copy engines, with their input in place."""
        index = int(task.widens)
        pulls = self._pulls[index]
        pulls.check(task, self._world)
        if task.widens:
            self._fill(self._arenas[index], task, task.sent)
        return [result.exact(pulls_name(mib), partial(pulls.run, mib, task, result.output)) for mib in self._pieces]

    def _fill(self, arena: SymmMemArena, task: Task, sent: torch.dtype) -> None:
        nbytes = task.numel * sent.itemsize * self._world.size
        for _ in range(_SLOTS):
            slot = arena.acquire("reduce_scatter", nbytes, owner="bench")
            task.fill(slot.view(sent), self._world)
            del slot


def _measure_task(world: World, clock: Clock, bench: ReduceBench, task: Task, machinery: Machinery) -> list[Any]:
    ways = machinery.make_ways(task)
    check(world, ways, f"reduce-scatter, {task}")
    times = clock.time_all(ways)
    stem = f"reduce_scatter_w{world.size}_{task.nbytes >> 20}mib_{task.kind.replace(' ', '_')}_{task.op.lower()}"
    seen = profile_ways(world, ways, bench.traces and bench.traces / f"{stem}.json.gz")
    base, lines = times[ways[0].name], []
    for way in ways:
        timed, sent = times[way.name], task.wire_nbytes(way.name)
        line: dict[str, Any] = {"name": "reduce_scatter", "variant": way.name, "ranks": world.size}
        line |= {"bytes": task.nbytes, "dtype": task.kind} | schema.summarize(timed.alone) | world.facts(bench.command)
        line |= {"op": task.op, "product_us": round(clock.product_us, 1), "usual": int(way.name in (PULLS, HOST))}
        line |= {"wire_bytes": sent, "gb_per_s": round(sent * (world.size - 1) / line["median_us"] / 1e3, 1)}
        line |= columns(timed, base=base, base_name="symmetric") | seen[way.name].columns()
        lines.append(line)
    world.say(f"reduce_scatter {task}: " + ", ".join(f"{x['variant']} {x['median_us'] / 1e3:.3f} ms" for x in lines))
    return lines


def measure_ranks(world: World, bench: ReduceBench) -> list[dict[str, Any]]:
    """What every rank does. FSDP2 issues AVG; gloo, which has none, has something to do in a SUM."""
    sizes = [int(mib * 2**20) for mib in bench.mib]
    machinery = Machinery(world, max(sizes), bench.pieces)
    clock = Clock(world)
    lines: list[dict[str, Any]] = []
    for nbytes in sizes:
        for dtype, gradients in KINDS:
            for op in ("AVG",) if world.on_gpu else OPS:
                task = Task(nbytes // dtype.itemsize, dtype, op, gradients)
                lines += _measure_task(world, clock, bench, task, machinery)
    world.meet()
    machinery.close()
    return lines


def measure(bench: ReduceBench) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a task and way, as :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU, a wrong result, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu()
    return run_ranks(
        measure_ranks, bench, ranks=bench.ranks, device_type=bench.device_type, what="bench reduce-scatter"
    )
