"""Expert parallelism on GPUs: every bit against all_to_all, slots that are never overwritten early, a host that never
waits, compiled and captured layers, and the example under FSDP2.

Run with ``FSDP_SYMM_TEST_DEVICE=cuda``; ranks share GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1).
Legend as in ``tests/experts/moe.py``; M expert-major rows of a rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_symm import set_symm_mem_for_comm
from fsdp_symm.experts import (
    EpBuffer,
    EpConfig,
    ExpertParallel,
    GroupedExperts,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    is_symm_backed,
    symm_mem_alloc,
)
from tests.experts import moe
from tests.experts.moe import Case, Result, assert_close, dense
from tests.harness import Ranks
from tests.models import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FSDP_SYMM_TEST_DEVICE=cuda")

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("FSDP_SYMM_SEED", "20261130"))
T, K, H, LOCAL = 8, 2, 16, 2
DTYPES = ["float32", "bfloat16"]
WIRES = ["copy_engine", "copy_engine_exact"]


def _run(request: pytest.FixtureRequest, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """A job on every rank. Every job returns something: of a rank that was killed the harness brings back ``None``."""
    print(f"FSDP_SYMM_SEED={SEED}")
    ranks: Ranks = request.getfixturevalue(f"ranks{world_size}")
    answers = ranks.run(job, *args)
    assert None not in answers, f"ranks {[r for r, answer in enumerate(answers) if answer is None]} died"
    return answers


def _wait_for_the_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _dawdle(own: random.Random) -> None:
    """Now and then this rank's stream or host is late."""
    if own.random() < 0.05 and DEVICE == "cuda":
        torch.cuda._sleep(own.randrange(2_000_000))
    if own.random() < 0.02:
        time.sleep(own.random() * 0.003)


# --- every way in every bit ----------------------------------------------------------------------------------

# Implementation, and whether rows are packed; the first is what the others are compared with.
WAYS = {
    "all_to_all": ("all_to_all", False),
    "padded": ("copy_engine", False),
    "packed": ("copy_engine", True),
    "exact": ("copy_engine_exact", False),
}


def _random_cases(seed: int, ranks: int, dtype: str) -> list[Case]:
    """The same on all ranks. The first have no token at all, one token, and an idle rank; every third one drops."""
    source = random.Random(f"{seed} {ranks} {dtype}")
    cases = []
    for number in range(7):
        experts = ranks * source.randint(1, 4)
        tokens = [source.choice([0, source.randint(1, 40), source.randint(1, 40)]) for _ in range(ranks)]
        fixed = {0: [0] * ranks, 1: [0] * (ranks - 1) + [1], 2: [0] + [33] * (ranks - 1)}
        tokens = fixed.get(number, tokens)
        config: dict[str, Any] = {
            "alignment": source.choice([1, 8]),
            "max_tokens_per_rank": max(1, *tokens) + source.randint(0, 3),
        }
        if number % 3 == 2:
            config |= {"overflow": "drop", "recv_capacity_per_rank": 8 * source.randint(1, 6)}
        cases.append(
            Case(
                tokens=tuple(tokens),
                topk=source.randint(1, min(experts, 4)),
                num_experts=experts,
                hidden=source.choice([1, 5, 8, 64]),
                dtype=dtype,
                routing=source.choice(["any", "any", "distinct", "first_rank", "last_expert", "even_experts"]),
                masked=source.choice([0.0, 0.3, 0.3, 1.0]),
                idx_dtype=source.choice(["int32", "int64"]),
                strided=source.random() < 0.3,
                seed=source.randrange(1000),
                weighting=source.choice(["combine", "experts"]),
                config=config,
            )
        )
    return cases


def _poison(model: ExpertParallel, case: Case) -> None:
    """NaN in every slot that an earlier call has used, by sending it; ordinary memory is NaN already."""
    rows = case.config["max_tokens_per_rank"]
    ids = torch.arange(rows * case.topk, device=DEVICE).view(rows, case.topk) % case.num_experts
    weights = torch.full(ids.shape, float("nan"), device=DEVICE)
    for _ in range(2):  # slots of a lane
        tokens = torch.full((rows, case.hidden), float("nan"), dtype=case.torch_dtype, device=DEVICE).requires_grad_()
        out = model(tokens, ids, weights.requires_grad_())
        out.backward(torch.full_like(out, float("nan")))


def _steps_of(case: Case) -> list[Result]:
    # Fills every empty tensor with NaN. Warnings only: cuBLAS wants to be told before its first call in a process.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model, results = moe.build(case), []
        for number in range(3):
            if number:
                _poison(model, case)
            results.append(moe.step(model, case, number))
        return results
    finally:
        torch.use_deterministic_algorithms(False)
        ep_finalize()


def _every_way(seed: int, dtype: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in _random_cases(seed, size, dtype):
        expected: list[Result] = []
        for way, (implementation, packed) in WAYS.items():
            config = case.config | ({"rows_per_peer": case.config["max_tokens_per_rank"]} if packed else {})
            found = _steps_of(replace(case, implementation=implementation, config=config))
            expected = expected or found
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                for name, mine, theirs in zip(Result._fields, one, other, strict=True):
                    assert torch.isfinite(mine).all(), f"{way}, step {number}, {name}: {case}"
                    assert torch.equal(mine, theirs), f"{way}, step {number}, {name}: {case}"
        if "recv_capacity_per_rank" not in case.config:
            for number, one in enumerate(expected):
                assert_close(one, dense(case, rank, size, number), case)
    return "done"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_way_agrees_in_every_bit(request: pytest.FixtureRequest, world_size: int, dtype: str) -> None:
    """Outputs, and gradients of tokens, router weights and experts; and they are those of a dense process."""
    _run(request, world_size, _every_way, SEED, dtype)


# --- exact numbers for exchanges in flight -------------------------------------------------------------------


class Work(NamedTuple):
    """One rank's batch. Small integers and quarters: sums of them are exact in fp32, in any order."""

    tokens: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K]
    weights: torch.Tensor  # fp32 [T, K]
    grad: torch.Tensor  # [T, H], gradient of the output


def _work(seed: int, number: int, *, full: bool = False, width: int = H, dtype: torch.dtype = torch.float32) -> Work:
    """This rank's batch of an iteration, with ``T`` tokens if ``full``, else with 0 to ``T``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = torch.Generator().manual_seed((seed * 100_003 + number * 101 + rank) % 2**31)
    count = T if full else int(torch.randint(0, T + 1, (), generator=source))
    tokens = torch.randint(-8, 9, (count, width), generator=source).to(dtype)
    ids = torch.randint(-1, LOCAL * size, (count, K), generator=source)  # masks and duplicates
    if number % 4 == 3:
        ids = ids.clamp(max=0)  # everything to the first expert
    weights = 0.25 * torch.randint(1, 5, (count, K), generator=source)
    grad = torch.randint(-4, 5, (count, width), generator=source).to(dtype)
    moved = Work(*(t.to(DEVICE) for t in (tokens, ids, weights, grad)))
    return moved._replace(tokens=moved.tokens.requires_grad_(), weights=moved.weights.requires_grad_())


def _times_expert(rows: torch.Tensor, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """Expert e multiplies by e + 1, so that a row before the wrong expert is found out. Reads nothing on the host."""
    position = torch.arange(rows.shape[0], device=rows.device)
    local = torch.searchsorted(counts.cumsum(0), position, right=True).clamp(max=LOCAL - 1)
    return rows * (local + 1 + LOCAL * rank).to(rows.dtype).unsqueeze(1)


def _answers(work: Work) -> list[torch.Tensor]:
    """Output, gradient of tokens, gradient of weights: what :func:`_times_expert` makes of them."""
    factors = torch.where(work.ids >= 0, work.ids + 1, 0).float()
    scale = (work.weights.detach() * factors).sum(1, keepdim=True)
    tokens = work.tokens.detach()
    return [tokens * scale, work.grad * scale, factors * (tokens * work.grad).sum(1, keepdim=True)]


def _bootstrap(**changes: Any) -> dist.ProcessGroup:
    """Static shapes, if nothing else is asked for: room for everything, nothing read on the host."""
    group = dist.group.WORLD
    assert group is not None
    settings: dict[str, Any] = {
        "ep_group": group,
        "num_experts": LOCAL * group.size(),
        "max_tokens_per_rank": T,
        "hidden_dim": H,
        "num_topk": K,
        "max_token_dtype": torch.float32,
        "overflow": "drop",
        "recv_capacity_per_rank": group.size() * T * K,
        "timeout_s": 20.0,
    }
    ep_bootstrap(**{**settings, **changes})
    return group


def _one_f_one_b(settings: dict[str, Any], seed: int, iterations: int) -> str:
    """F0 F1 F2 B0 F3 B1 ...; nobody waits for the GPU, results are looked at when all is over."""
    rank = _bootstrap(**settings).rank()
    buffers = [EpBuffer() for _ in range(3)]
    batches = [_work(seed, number) for number in range(iterations)]  # a copy from the host would wait for the stream
    own = random.Random(seed + 1 + rank)
    alive: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    results: list[list[torch.Tensor]] = []
    _wait_for_the_device()
    for number in range(iterations + 2):
        if number < iterations:
            tokens, ids, weights, _ = batches[number]
            rows, row_weights, counts = ep_dispatch(buffers[number % 3], tokens, ids, weights)
            alive[number] = _times_expert(rows, counts, rank), row_weights
        _dawdle(own)
        if number >= 2:
            work, (answers, row_weights) = batches[number - 2], alive.pop(number - 2)
            out = ep_combine(buffers[(number - 2) % 3], answers, recv_topk_weights=row_weights)
            results.append([out.detach(), *torch.autograd.grad(out, [work.tokens, work.weights], work.grad)])
    _wait_for_the_device()
    for number, (work, found) in enumerate(zip(batches, results, strict=True)):
        for name, mine, right in zip(("out", "tokens", "weights"), found, _answers(work), strict=True):
            assert torch.equal(mine, right), f"iteration {number}, {name}, seed {seed}"
    ep_finalize()
    return "done"


PIPELINES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"rows_per_peer": T},
    "exact": {"transport": "copy_engine_exact"},
}


@pytest.mark.parametrize("way", PIPELINES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_three_microbatches_in_flight_without_synchronisation(
    request: pytest.FixtureRequest, world_size: int, way: str
) -> None:
    """A slot that is written while a slow peer still reads it shows in some iteration's numbers."""
    _run(request, world_size, _one_f_one_b, PIPELINES[way], SEED, 300)


def _dropping(transport: str, seed: int) -> list[list[int]]:
    """Room for half of the rows: what comes through is still right, and the rest is counted. Nothing waits."""
    capacity = 2 * T
    rank = _bootstrap(transport=transport, recv_capacity_per_rank=capacity).rank()
    buffer, own = EpBuffer(), random.Random(seed + 1 + rank)
    batches = [_work(seed, number, full=True) for number in range(40)]
    results, numbers = [], []
    for tokens, ids, weights, grad in batches:
        rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights)
        out = ep_combine(buffer, _times_expert(rows, counts, rank), recv_topk_weights=row_weights)
        results.append([out.detach(), *torch.autograd.grad(out, [tokens, weights], grad), row_weights.detach()])
        numbers.append(torch.cat([counts, buffer.total_recv_tokens, buffer.dropped]))
        _dawdle(own)
    found = torch.stack(numbers).tolist()
    for *counts, total, dropped in found:
        assert sum(counts) == min(total, capacity)
        assert dropped == max(total - capacity, 0)
    for work, (out, grad_tokens, grad_weights, row_weights) in zip(batches, results, strict=True):
        whole = _answers(work)
        kept = (grad_weights != 0) | (whole[2] == 0)  # a route that was dropped has no gradient
        assert torch.equal(grad_weights, whole[2] * kept)
        left = _answers(work._replace(ids=torch.where(kept, work.ids, -1)))
        certain = (whole[2] != 0).all(1)  # elsewhere a zero does not tell whether its route was dropped
        assert torch.equal(out[certain], left[0][certain])
        assert torch.equal(grad_tokens[certain], left[1][certain])
        assert row_weights.shape == (capacity,)
    ep_finalize()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_without_room_are_dropped_alike(request: pytest.FixtureRequest, world_size: int) -> None:
    transports = "all_to_all", *WIRES
    first, *others = (_run(request, world_size, _dropping, transport, SEED) for transport in transports)
    assert any(dropped for rank in first for *_, dropped in rank), "the test drops something"
    assert all(other == first for other in others)


# --- zero-copy -----------------------------------------------------------------------------------------------


def _zero_copy(dtype: torch.dtype, settings: dict[str, Any], seed: int) -> str:
    group = _bootstrap(max_token_dtype=dtype, **settings)
    symmetric = symm_mem_alloc((T, H), dtype, group)
    assert is_symm_backed(symmetric)
    assert is_symm_backed(symmetric[:3])
    assert not is_symm_backed(torch.empty(T, H, dtype=dtype, device=DEVICE))
    buffer, own = EpBuffer(), random.Random(seed + 1 + group.rank())
    batches = [_work(seed, number, dtype=dtype) for number in range(60)]
    results: dict[str, list[list[torch.Tensor]]] = {"staged": [], "in place": []}
    for tokens, ids, weights, grad in batches:
        for place, kept in results.items():
            mine = tokens.detach()
            if place == "in place":
                symmetric[: len(mine)].copy_(mine)
                mine = symmetric[: len(mine)]
            mine = mine.detach().requires_grad_()
            rows, row_weights, counts = ep_dispatch(buffer, mine, ids, weights)
            if place == "in place":
                symmetric.fill_(float("nan"))  # every peer has read it, in the order of the streams
            answers = torch.tanh(_times_expert(rows, counts, group.rank()))
            out = ep_combine(buffer, answers, recv_topk_weights=row_weights)
            kept.append([rows.detach(), out.detach(), *torch.autograd.grad(out, [mine, weights], grad)])
            _dawdle(own)
    _wait_for_the_device()
    for number, (staged, in_place) in enumerate(zip(*results.values(), strict=True)):
        for mine, theirs in zip(in_place, staged, strict=True):
            assert torch.isfinite(mine).all(), number
            assert torch.equal(mine, theirs), number
    ep_finalize()
    assert not is_symm_backed(symmetric)
    return "done"


@pytest.mark.parametrize(
    "settings", [{}, {"recv_capacity_per_rank": None, "overflow": "raise"}], ids=["static", "raise"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_tokens_in_symmetric_memory_equal_staged_ones(
    request: pytest.FixtureRequest, world_size: int, dtype: str, settings: dict[str, Any]
) -> None:
    _run(request, world_size, _zero_copy, getattr(torch, dtype), settings, SEED)


# --- static shapes: the host never waits ---------------------------------------------------------------------

WIDTH, INNER, ALIGNMENT = 64, 32, 16
CAPACITY = 2 * ALIGNMENT  # a balanced batch fits, others drop rows
STEP = "the step under test"
# Calls that hold the host until the device has come so far, as Kineto names them.
WAITS = re.compile(r"^(?:cuda|cu)(?:Stream|Event|Device|Ctx)Synchronize|^(?:cuda|cu)Memcpy(?:DtoH|HtoD|2D)?(?:_v\d+)?$")


def _grouped_experts(rank: int) -> GroupedExperts:
    """bf16: grouped GEMMs of other types read their offsets on the host."""
    source = torch.Generator().manual_seed(17 + rank)
    shapes = {"gate": (LOCAL, INNER, WIDTH), "up": (LOCAL, INNER, WIDTH), "down": (LOCAL, WIDTH, INNER)}
    return GroupedExperts(
        **{n: (torch.randn(s, generator=source) / s[2] ** 0.5).to(DEVICE, torch.bfloat16) for n, s in shapes.items()}
    )


def _static_layer(implementation: str = "copy_engine", *, static: bool = True) -> ExpertParallel:
    group = dist.group.WORLD
    assert group is not None
    config = EpConfig(
        num_experts=LOCAL * group.size(),
        num_topk=K,
        hidden_dim=WIDTH,
        max_tokens_per_rank=T,
        recv_capacity_per_rank=CAPACITY if static else None,
        alignment=ALIGNMENT,
        overflow="drop" if static else "grow",
        timeout_s=20.0,
    )
    return ExpertParallel(_grouped_experts(group.rank()), group, config, implementation=implementation)


def _wide_work(seed: int, number: int) -> Work:
    return _work(seed, number, full=True, width=WIDTH, dtype=torch.bfloat16)


def _forward_backward(layer: ExpertParallel, work: Work) -> list[torch.Tensor]:
    layer.zero_grad()
    work.tokens.grad = work.weights.grad = None
    out = layer(work.tokens, work.ids, work.weights)
    out.backward(work.grad)
    leaves: list[torch.Tensor] = [work.tokens, work.weights, *layer.parameters()]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@contextlib.contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Any operator of torch that waits for the device raises; proved on one that does."""
    if DEVICE != "cuda":
        yield
        return
    value = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            value.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _static_steps(seed: int) -> str:
    """Every third batch is for the first expert alone: the others' zones are empty, and rows are dropped."""
    batches = [_wide_work(seed, number) for number in range(8)]
    layer, results = _static_layer(), []
    for work in batches[:2]:  # makes the buffers
        _forward_backward(layer, work)
    with _no_synchronisation():
        for work in batches:
            results.append(_forward_backward(layer, work))
    reference = _static_layer("all_to_all")
    for number, (work, found) in enumerate(zip(batches, results, strict=True)):
        expected = _forward_backward(reference, work)
        assert len(found) == len(expected) == 6
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.isfinite(mine).all(), (number, index)
            assert torch.equal(mine, theirs), (number, index)
            if number % 4 == 3 and index > 2:
                assert not mine[1:].any(), "experts without a token"
    ep_finalize()
    return "done"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_static_layer_never_waits_for_the_device(request: pytest.FixtureRequest, world_size: int) -> None:
    """Forward and backward; and the numbers are those of all_to_all with the same capacity, in every bit."""
    _run(request, world_size, _static_steps, SEED)


def _trace(path: str, static: bool, warm_up: int, seed: int) -> str:
    layer, work = _static_layer(static=static), _wide_work(seed, 0)
    for _ in range(warm_up):
        _forward_backward(layer, work)
    _wait_for_the_device()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        with torch.profiler.record_function(STEP):
            _forward_backward(layer, work)
        _wait_for_the_device()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)
    ep_finalize()
    return "done"


class _Seen(NamedTuple):
    calls: list[str]  # of the runtime and the driver, within the step, on any thread
    copies_to_host: list[str]  # in the whole trace, which holds nothing but the step


def _look_at(path: Path) -> _Seen:
    events = json.loads(path.read_text())["traceEvents"]
    (step,) = [e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"]
    first, last = step["ts"], step["ts"] + step["dur"]
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and first <= e["ts"] < last]
    copies = [e["name"] for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    return _Seen(calls, copies)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_static_step_in_a_trace(request: pytest.FixtureRequest, tmp_path: Path, world_size: int) -> None:
    """No call that waits, nothing copied to the host, and copy engines alone move rows."""
    from fsdp_symm.trace import inspect_traces

    path = tmp_path / "trace.json"
    _run(request, world_size, _trace, str(path), True, 1, SEED)
    seen = _look_at(path)
    assert any("LaunchKernel" in name for name in seen.calls), "the step is in the trace"
    assert [name for name in seen.calls if WAITS.match(name)] == []
    assert seen.copies_to_host == []
    (rank,) = inspect_traces(path).ranks
    calls = [c for c in rank.calls if c.kind in ("dispatch", "combine")]
    assert {c.kind for c in calls} == {"dispatch", "combine"}
    assert {(c.kind, c.engine) for c in calls} == {("dispatch", "copy_engine"), ("combine", "copy_engine")}
    assert not any(c.kernels for c in calls)


def test_a_step_that_sizes_its_rows_does_wait(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The documented price of no capacity; also proves that the test above can fail."""
    path = tmp_path / "trace.json"
    _run(request, 2, _trace, str(path), False, 1, SEED)
    seen = _look_at(path)
    assert any(WAITS.match(name) for name in seen.calls), sorted(set(seen.calls))
    assert seen.copies_to_host


# --- compiled ------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "static": {},
    "exact": {"transport": "copy_engine_exact", "recv_capacity_per_rank": None, "overflow": "raise"},
}
# Of the largest element, outputs and gradients. A compiler may take another tanh, and another order of sums in the
# gradient of ``scale``; what is exchanged without arithmetic has to be equal.
TOLERANCES = {"aot_eager": (0.0, 0.0), "inductor": (1e-6, 4e-6)}


def _assert_near(mine: torch.Tensor, right: torch.Tensor, tolerance: float, what: str) -> None:
    assert mine.shape == right.shape, what
    if not right.numel():
        return
    error = float((mine - right).detach().abs().max()) / max(float(right.detach().abs().max()), 1.0)
    assert error <= tolerance, f"{what}: {error:.2e}"


def _compiled(mode: str, backend: str, seed: int) -> str:
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # ranks are daemons, which have no children
    group = _bootstrap(**MODES[mode])
    buffer = EpBuffer()
    scale = torch.rand(H, generator=torch.Generator().manual_seed(5)).to(DEVICE).requires_grad_()

    def layer(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, row_weights, counts = ep_dispatch(buffer, x, ids, w)
        out = ep_combine(buffer, torch.tanh(rows * scale), recv_topk_weights=row_weights)
        return rows, row_weights, counts, out + x

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    names = "rows", "row_weights", "counts", "out", "tokens", "weights", "scale"
    for number, count in enumerate((T, T - 2, 0)):
        mine = max(count - group.rank(), 0)
        whole = _work(seed, number, full=True)
        ids, grad = whole.ids[:mine], whole.grad[:mine]
        answers = []
        for function in (layer, compiled):
            x, w = (t.detach()[:mine].clone().requires_grad_() for t in (whole.tokens, whole.weights))
            *exchanged, out = function(x, ids, w)
            answers.append([*exchanged, out, *torch.autograd.grad(out, [x, w, scale], grad)])
        for index, (name, eager, fast) in enumerate(zip(names, *answers, strict=True)):
            tolerance = 0.0 if index < 3 else TOLERANCES[backend][index > 3]
            _assert_near(fast, eager, tolerance, f"{name}, {count} tokens")
    ep_finalize()
    return "done"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("world_size", "backend"), [(2, "aot_eager"), (2, "inductor"), (4, "aot_eager")])
def test_fullgraph_equals_eager(request: pytest.FixtureRequest, world_size: int, mode: str, backend: str) -> None:
    _run(request, world_size, _compiled, mode, backend, SEED)


def _compiled_module(seed: int) -> str:
    torch._dynamo.reset()
    layer = _static_layer()
    _forward_backward(layer, _wide_work(seed, 0))  # buffers are made outside the graph
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for number in range(1, 4):
        answers = [_forward_backward(function, _wide_work(seed, number)) for function in (layer, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True)), number
    ep_finalize()
    return "done"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_compiled_module_equals_eager_in_every_bit(request: pytest.FixtureRequest, world_size: int) -> None:
    _run(request, world_size, _compiled_module, SEED)


# --- CUDA graphs ---------------------------------------------------------------------------------------------

Program = Callable[[Work], list[torch.Tensor]]


def _functions(backward: bool) -> Program:
    """Dispatch, grouped experts, combine; all results that a caller can see."""
    rank = _bootstrap(hidden_dim=WIDTH, max_token_dtype=torch.bfloat16, recv_capacity_per_rank=CAPACITY).rank()
    buffer, experts = EpBuffer(alignment=ALIGNMENT), _grouped_experts(rank)

    def run(work: Work) -> list[torch.Tensor]:
        rows, row_weights, counts = ep_dispatch(buffer, work.tokens, work.ids, work.weights)
        out = ep_combine(buffer, experts(rows, counts), recv_topk_weights=row_weights)
        found = [rows, row_weights, counts, buffer.total_recv_tokens, buffer.dropped, out]
        if backward:
            found += torch.autograd.grad(out, [work.tokens, work.weights, *experts.parameters()], work.grad)
        return [t.detach() for t in found]

    return run


def _module(backward: bool) -> Program:
    layer = _static_layer()

    def run(work: Work) -> list[torch.Tensor]:
        out = layer(work.tokens, work.ids, work.weights)
        found = [out]
        if backward:
            found += torch.autograd.grad(out, [work.tokens, work.weights, *layer.parameters()], work.grad)
        return [t.detach() for t in found]

    return run


def _fill(static: Work, work: Work) -> None:
    with torch.no_grad():
        for target, source in zip(static, work, strict=True):
            target.copy_(source)


def _record(run: Program, static: Work) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Warm up on a side stream, then capture, as torch's documentation says."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(static)
    return graph, outputs


def _captured(kind: str, backward: bool, seed: int) -> str:
    """Replays and eager calls in turn, and two replays in a row; nobody waits, results are looked at in the end."""
    run = {"functions": _functions, "module": _module}[kind](backward)
    own = random.Random(seed + 1 + dist.get_rank())
    batches = [_wide_work(seed, number) for number in range(5)]
    static = _wide_work(seed, 99)
    graph, outputs = _record(run, static)
    replayed, eager = [], {}
    for number, work in enumerate(batches):
        _fill(static, work)
        _dawdle(own)
        graph.replay()
        replayed.append([t.clone() for t in outputs])
        _dawdle(own)
        if number % 2 == 0:
            eager[number] = run(work)
    for number in (1, 3):
        eager[number] = run(batches[number])
    _fill(static, batches[0])
    graph.replay()
    torch.cuda.synchronize()
    for number, found in enumerate(replayed):
        for index, (mine, right) in enumerate(zip(found, eager[number], strict=True)):
            assert torch.isfinite(mine).all(), (number, index)
            assert torch.equal(mine, right), f"replay {number}, result {index}, seed {seed}"
    assert all(torch.equal(a, b) for a, b in zip(outputs, eager[0], strict=True)), "after the eager calls"
    graph.reset()
    ep_finalize()
    return "done"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward_backward"])
@pytest.mark.parametrize("kind", ["functions", "module"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_captured_layer_equals_eager(
    request: pytest.FixtureRequest, world_size: int, kind: str, backward: bool
) -> None:
    """Static shapes in one CUDA graph: other tokens, ids and weights in every replay, in every bit."""
    _run(request, world_size, _captured, kind, backward, SEED)


# --- with FSDP2 ----------------------------------------------------------------------------------------------


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("moe_example", ROOT / "examples" / "moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _losses(implementation: str, switch: dict[str, Any] | None) -> list[float]:
    """Five steps of the example's model, experts over two ranks; ``switch``: arguments of the switch, if it is on."""
    example, rank, size = _example(), dist.get_rank(), dist.get_world_size()
    dense_mesh = init_device_mesh(DEVICE, (size,), mesh_dim_names=("dense",))
    expert_mesh = init_device_mesh(DEVICE, (size // 2, 2), mesh_dim_names=("fsdp", "ep"))
    torch.manual_seed(0)
    model = example.Model().to(DEVICE)
    example.parallelize(model, expert_mesh, dense_mesh, implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with contextlib.nullcontext() if switch is None else set_symm_mem_for_comm(model, **switch):
        for step in range(5):
            loss = example.loss_of(model, step, range(rank, rank + 1), torch.device(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    ep_finalize()
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("implementation", WIRES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_switch_changes_no_loss(request: pytest.FixtureRequest, world_size: int, implementation: str) -> None:
    plain = _run(request, world_size, _losses, implementation, None)
    gathered = _run(request, world_size, _losses, implementation, {"reduce_scatter": False})
    assert gathered == plain, "all-gather alone changes no digit"
    for found, expected in zip(_run(request, world_size, _losses, implementation, {}), plain, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("implementation", WIRES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_example_equals_a_dense_model(world_size: int, implementation: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    script = [str(ROOT / "examples" / "moe.py"), "--check", "--steps", "3", "--device", DEVICE]
    done = subprocess.run(
        [*launcher, *script, "--implementation", implementation],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(world_size):
        assert f"rank {rank}: losses and parameters equal the dense model's" in done.stdout
