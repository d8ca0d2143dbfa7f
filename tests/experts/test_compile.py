"""``torch.compile`` with ``fullgraph``: the operators' fakes, and the same numbers as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp_symm.experts import EpBuffer, ep_combine, ep_dispatch, ep_finalize, ep_prepare, ops
from tests.experts.moe import Case, build, make_batch
from tests.experts.test_api import LOCAL, H, K, bootstrap
from tests.harness import Ranks

MODES: dict[str, dict[str, Any]] = {
    "static": {"overflow": "drop", "recv_capacity_per_rank": 32},
    "sized_by_the_step": {"overflow": "raise"},
    "exact": {"transport": "copy_engine_exact"},
    "growing": {"overflow": "grow"},
    "all_to_all": {"transport": "all_to_all"},
    "callers_memory": {"overflow": "drop", "recv_capacity_per_rank": 32},
}


def _compiled(mode: str, backend: str, recompute: bool) -> None:
    torch._dynamo.reset()
    bootstrap(**MODES[mode])
    buffer = EpBuffer()
    scale = torch.nn.Parameter(torch.rand(H))
    memory = torch.empty(32, H) if mode == "callers_memory" else None

    def layer(x: torch.Tensor, ids: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
        rows, row_weights, _ = ep_dispatch(buffer, x, ids, w, recv_tokens=memory)
        return ep_combine(buffer, torch.tanh(rows * scale), recv_topk_weights=row_weights)

    def block(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if not recompute:
            return layer(x, ids, w) + x
        ep_prepare(buffer, ids)  # outside: a recomputation uses the same routing
        out: Any = checkpoint(layer, x, None, w, use_reentrant=False)
        return out + x

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for count in (4, 3, 0):
        answers = []
        for function in (block, compiled):
            random = torch.Generator().manual_seed(dist.get_rank())
            x = torch.randn(count, H, generator=random, requires_grad=True)
            w = torch.rand(count, K, generator=random, requires_grad=True)
            ids = torch.randint(0, LOCAL * 2, (count, K), generator=random)
            scale.grad = None
            out = function(x, ids, w)
            out.square().sum().backward()
            answers.append((out.detach(), x.grad, w.grad, scale.grad))
        for eager, fast in zip(*answers, strict=True):
            torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-5)
    ep_finalize()


@pytest.mark.parametrize("mode", MODES)
def test_fullgraph(ranks2: Ranks, mode: str) -> None:
    ranks2.run(_compiled, mode, "aot_eager", False)


def test_fullgraph_with_recomputation(ranks2: Ranks) -> None:
    ranks2.run(_compiled, "static", "aot_eager", True)


def _compiled_module(implementation: str) -> None:
    torch._dynamo.reset()
    bounded = {"max_tokens_per_rank": 6, "overflow": "drop", "recv_capacity_per_rank": 64}
    shared = implementation == "all_reduce"
    case = Case(tokens=(6, 6), implementation=implementation, shared_batch=shared, config=bounded)
    model = build(case)
    experts: Any = model.experts

    def once(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows @ experts.first[0]) @ experts.second[0]  # no host reads, for the compiler's sake

    model.implementation.experts = once
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = make_batch(case, dist.get_rank())
    model(batch.tokens, batch.ids, batch.weights)  # buffers are made outside the graph
    answers = []
    for function in (model, compiled):
        tokens = batch.tokens.clone().requires_grad_()
        out = function(tokens, batch.ids, batch.weights)
        out.backward(batch.grad)
        answers.append((out, tokens.grad))
    for eager, fast in zip(*answers, strict=True):
        assert torch.equal(eager, fast)
    ep_finalize()


@pytest.mark.parametrize("implementation", ["copy_engine", "all_reduce", "all_to_all"])
def test_module_fullgraph(ranks2: Ranks, implementation: str) -> None:
    ranks2.run(_compiled_module, implementation)


def _compiled_at_once(implementation: str) -> str:
    """Nothing made buffers before the first compiled call."""
    torch._dynamo.reset()
    bounded = {"max_tokens_per_rank": 6, "overflow": "drop", "recv_capacity_per_rank": 64}
    case = Case(tokens=(6, 6), implementation=implementation, config=bounded)
    model = build(case)
    batch = make_batch(case, dist.get_rank())
    arguments = batch.tokens, batch.ids, batch.weights
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        torch.compile(model, fullgraph=True, backend="eager")(*arguments)
    torch._dynamo.reset()
    broken = torch.compile(model, backend="eager")
    answer = broken(*arguments)  # a break in the graph makes them
    assert torch.equal(answer, model(*arguments))
    ep_finalize()
    assert torch.equal(answer, broken(*arguments)), "and again once they are gone"
    ep_finalize()
    return str(refused.value)


@pytest.mark.parametrize("implementation", ["auto", "copy_engine_exact", "all_to_all"])
def test_a_first_call_that_is_compiled(ranks2: Ranks, implementation: str) -> None:
    for text in ranks2.run(_compiled_at_once, implementation):
        assert "buffers of experts are made with all ranks, outside of compiled code" in text
        assert "call the module once without torch.compile, also after ep_finalize()" in text


def _schemas() -> None:
    """torch's own checks of the operators: schema, mutation, fakes, autograd registration."""
    bootstrap(overflow="drop", recv_capacity_per_rank=32)
    buffer = EpBuffer()
    key = buffer.context.key
    ids = torch.randint(0, LOCAL * 2, (4, K))
    torch.library.opcheck(ops.prepare, (ids, key, 1, 32), test_utils=("test_schema", "test_faketensor"))
    found = ops.prepare(ids, key, 1, 32)
    home, table, _, source, slots, *_ = found
    tokens, weights = torch.randn(4, H, requires_grad=True), torch.rand(4, K, requires_grad=True)
    for w in (weights, None):
        torch.library.opcheck(ops.dispatch, (tokens, w, home, table, source, slots, key))
    rows, scale = torch.randn(32, H, requires_grad=True), torch.rand(32, requires_grad=True)
    for s, extra in ((None, None), (scale, None), (None, scale)):
        torch.library.opcheck(ops.combine, (rows, s, extra, home, table, source, slots, key))
    memory = torch.empty(32, H)
    out_op: Any = ops._dispatch_out
    inputs = (memory, tokens.detach(), weights.detach(), home, table, source, slots, key)
    torch.library.opcheck(out_op, inputs, test_utils=("test_schema", "test_faketensor"))
    ep_finalize()


def test_opcheck(ranks2: Ranks) -> None:
    ranks2.run(_schemas)
