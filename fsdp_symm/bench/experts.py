"""Expert parallelism: dispatch, combine, and forward with backward, by every implementation of the package and by
torchtitan's.

All implementations get the same batches, and their results are compared with a dense reference before anything is
timed. A dispatch begins with expert ids and ends with rows by expert: the exchange of ids or counts and the layout are
part of it. The experts themselves do next to nothing. Ratios are to ``copy_engine`` in the same round.

On a GPU calls also run beside matrix products, and a profile says on how many SMs they ran and how often the host read
from the device or waited for it. Legend as in :mod:`fsdp_symm.bench.expert_cases`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_symm.bench import schema
from fsdp_symm.bench.expert_cases import DTYPE, ROUTINGS, TASKS, Batch, Layer, Reference, ScaleExperts, Task
from fsdp_symm.bench.expert_ways import COPY_ENGINE, GRAPH, STATIC, Implementation, make_foreign, make_ours, run_step
from fsdp_symm.bench.launch import World, need_gpu, run_ranks, synchronize
from fsdp_symm.bench.profiling import Seen, profile_ways
from fsdp_symm.bench.timing import ROUNDS, Clock, Timed, Way, check, columns
from fsdp_symm.experts import AllToAllEP, EpConfig, ep_finalize
from fsdp_symm.experts.auto import choose_exchange

_WARM_CALLS = 3  # before a capture: buffers are made and kernels compiled


@dataclass(frozen=True)
class ExpertsBench:
    """What to measure: every combination of sizes, with every routing.

    Attributes:
        ranks: R.
        experts: (E, K) pairs.
        tokens, hidden: T and H.
        command: recorded in every line.
        traces: folder for one trace a layer, routing and task, ``None`` for none.
        rounds: rounds in which all implementations take turns.
        device_type: ``"cuda"``, or ``"cpu"`` for ranks over shared memory and gloo.
    """

    ranks: int
    experts: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    command: str = ""
    traces: Path | None = None
    rounds: int = ROUNDS
    device_type: str = "cuda"

    def layers(self) -> Iterator[Layer]:
        """In the order of the lines."""
        for (e, k), tokens, hidden, routing in itertools.product(self.experts, self.tokens, self.hidden, ROUTINGS):
            yield Layer(e, k, tokens, hidden, routing)


class Calls:
    """One task of one implementation on one batch: what is called, and whether its last result is right. Construction
    is collective: a combine gets the answers of a dispatch that is made here."""

    def __init__(
        self, implementation: Implementation, task: Task, batch: Batch, experts: ScaleExperts, reference: Reference
    ) -> None:
        self._implementation, self._batch, self._experts = implementation, batch, experts
        self._task: Task = task
        self._reference = reference
        self._result: Any = None
        self._dispatched: Any = None
        if task == "combine":
            rows, counts, state = self._dispatch()
            self._dispatched = experts(rows, counts), state

    @torch.no_grad()
    def _dispatch(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        tokens, ids, weights, _ = self._batch
        return self._implementation.dispatch(tokens, ids, weights)

    def run(self) -> None:
        """One call."""
        if self._task == "dispatch":
            self._result = self._dispatch()
        elif self._task == "combine":
            with torch.no_grad():
                self._result = self._implementation.combine(*self._dispatched)
        else:
            self._result = run_step(self._implementation, self._experts, self._batch)

    def wrong(self) -> str | None:
        """What is wrong with the last result."""
        if self._result is None:
            return "no result"
        if self._task == "dispatch":
            return self._reference.wrong_rows(*self._result[:2])
        if self._task == "combine":
            return self._reference.wrong_output(self._result)
        return self._reference.wrong_step(*self._result)

    def forget(self) -> None:
        """Drop the last result."""
        self._result = None

    def way(self) -> Way:
        """For the clock."""
        waits = self._implementation.waits and self._task != "combine"
        return Way(self._implementation.name, self.run, self.wrong, self.forget, waits)


class GraphedCalls(Calls):
    """The same calls, captured in a CUDA graph by the first one and replayed: with static shapes no host is needed."""

    _graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """One replay."""
        if self._graph is None:
            for _ in range(_WARM_CALLS):
                super().run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                super().run()
            self._graph = graph
        self._graph.replay()

    def forget(self) -> None:
        """Overwrite the last result, which lies where the next one will."""
        for tensor in _tensors(self._result):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def way(self) -> Way:
        """For the clock."""
        return dataclasses.replace(super().way(), name=GRAPH)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in _tensors(part)] if isinstance(result, (tuple, list)) else []


def chosen_by_auto(world: World, layer: Layer) -> str:
    """The implementation that ``"auto"`` takes for this layer. Collective."""
    config = EpConfig(
        num_experts=layer.num_experts,
        num_topk=layer.topk,
        hidden_dim=layer.hidden,
        payload_dtype=DTYPE,
        max_tokens_per_rank=layer.tokens,
    )
    cls, _ = choose_exchange(world.group, config)
    ep_finalize()  # it made symmetric memory to find out
    return "all_to_all" if cls is AllToAllEP else COPY_ENGINE


def right_ones(world: World, layer: Layer, made: Sequence[Implementation], cases: Cases) -> list[Implementation]:
    """Those of somebody else's implementations that run and give the right results on every rank; the rest is closed,
    and why is said."""
    right = []
    for one in made:
        reason = None
        try:
            for task in TASKS:
                check(world, [cases.calls(one, task).way()], f"experts, {layer}, {task}")
        except Exception as error:  # noqa: BLE001 - somebody else's code, and the run goes on without it
            reason = str(error) or type(error).__name__
        if any(flag for (flag,) in world.all_values([float(reason is not None)])):
            world.say(f"bench experts: without {one.name}: {reason or 'it failed on another rank'}")
            one.close()
        else:
            right.append(one)
    return right


class Cases:
    """One layer's batch, experts and reference on this rank."""

    def __init__(self, world: World, layer: Layer) -> None:
        self._batch = layer.batch(world.rank, world.device)
        self._experts = ScaleExperts(layer, world.rank, world.size, world.device)
        self._reference = Reference(layer, world.rank, world.size, world.device)

    def calls(self, implementation: Implementation, task: Task, *, graphed: bool = False) -> Calls:
        """Collective, see :class:`Calls` and :class:`GraphedCalls`."""
        kind = GraphedCalls if graphed else Calls
        return kind(implementation, task, self._batch, self._experts, self._reference)


def peak_bytes(world: World, way: Way) -> int | str:
    """Ordinary memory that a call takes for its duration, result included; empty on a CPU."""
    way.poison()
    world.meet()
    if not world.on_gpu:
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with world.on_side():
        way.run()
    synchronize(world.device)
    (peak,) = world.slowest([float(torch.cuda.max_memory_allocated() - before)])
    way.poison()
    return int(peak)


def _line(world: World, bench: ExpertsBench, layer: Layer, task: Task, name: str, timed: Timed) -> dict[str, Any]:
    line: dict[str, Any] = {"name": f"experts_{task}", "variant": name, "ranks": world.size, "bytes": layer.nbytes}
    line |= {"dtype": str(DTYPE).removeprefix("torch.")} | schema.summarize(timed.alone) | world.facts(bench.command)
    line |= {"experts": layer.num_experts, "topk": layer.topk, "tokens": layer.tokens, "hidden": layer.hidden}
    return line | {"routing": layer.routing}


def _measure_task(
    world: World, clock: Clock, bench: ExpertsBench, layer: Layer, task: Task, made: Sequence[Implementation],
    cases: Cases,
) -> list[dict[str, Any]]:  # fmt: skip
    made = list(made)
    ways = [cases.calls(one, task).way() for one in made]
    if world.on_gpu:
        static = next(one for one in made if one.name == STATIC)
        made.append(static)
        ways.append(cases.calls(static, task, graphed=True).way())
    check(world, ways, f"experts, {layer}, {task}")
    times = clock.time_all(ways, beside=None if world.on_gpu else ())
    stem = f"experts_w{world.size}_{layer.num_experts}x{layer.topk}_t{layer.tokens}_h{layer.hidden}_{layer.routing}"
    keep = bench.traces and bench.traces / f"{stem}_{task}.json.gz"
    seen = profile_ways(world, ways, keep) if world.on_gpu or keep else {way.name: Seen() for way in ways}
    lines = []
    for one, way in zip(made, ways, strict=True):
        timed = times[way.name]
        line = _line(world, bench, layer, task, way.name, timed)
        line |= columns(timed, base=times[COPY_ENGINE], base_name="copy_engine")
        line |= seen[way.name].columns() if world.on_gpu else dict.fromkeys(Seen().columns(), "")
        # a graph keeps its memory, whether it runs or not
        peak = "" if way.name == GRAPH else peak_bytes(world, way)
        line |= {"moved_bytes": one.moved_bytes(task), "peak_bytes": peak}
        line |= {"symmetric_bytes": one.symmetric_bytes, "product_us": round(clock.product_us, 1)}
        lines.append(line)
    took = ", ".join(f"{x['variant']} {x['median_us'] / 1e3:.3f} ms" for x in lines)
    world.say(f"experts, {layer}, {task}: {took}")
    return lines


def measure_layer(world: World, clock: Clock, bench: ExpertsBench, layer: Layer) -> list[dict[str, Any]]:
    """All tasks of one layer. Collective."""
    auto = chosen_by_auto(world, layer)
    cases = Cases(world, layer)
    made = make_ours(world, layer)
    made += right_ones(world, layer, make_foreign(world, layer), cases)
    lines = [line for task in TASKS for line in _measure_task(world, clock, bench, layer, task, made, cases)]
    world.meet()
    for one in made:
        one.close()
    if world.on_gpu:
        torch.cuda.empty_cache()
    return [line | {"auto": int(line["variant"] == auto)} for line in lines]


def measure_ranks(world: World, bench: ExpertsBench) -> list[dict[str, Any]]:
    """What every rank does."""
    clock = Clock(world, bench.rounds)
    return [line for layer in bench.layers() for line in measure_layer(world, clock, bench, layer)]


def measure(bench: ExpertsBench) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return one line a layer, routing, task and implementation, as
    :func:`schema.write_lines` takes them.

    Raises:
        SymmMemError: no GPU where one is asked for, a wrong result of the package, or a rank that failed.
    """
    if bench.device_type == "cuda":
        need_gpu()
    return run_ranks(measure_ranks, bench, ranks=bench.ranks, device_type=bench.device_type, what="bench experts")
