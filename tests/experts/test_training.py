"""Layers in training and inference, under both kinds of activation checkpoint, and what ``"auto"`` picks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_symm.experts import ExpertParallel, auto, ep_finalize
from fsdp_symm.experts.auto import AutoEP, choose_exchange
from fsdp_symm.experts.config import EpConfig
from tests.experts.moe import Case, build, make_batch, poison
from tests.harness import Ranks

CHECKPOINTS = ["checkpoint", "reentrant"]
IMPLEMENTATIONS = ["copy_engine", "copy_engine_exact", "all_to_all", "all_reduce", "auto"]


class Layer(nn.Module):
    """A router before the experts; ``ties``: all logits are equal, so that any change of top-k's order shows."""

    def __init__(self, case: Case, ties: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(case.hidden, case.num_experts, bias=False)
        if ties:
            nn.init.zeros_(self.router.weight)
        self.moe = build(case)
        self.topk = case.topk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.topk)
        return x + self.moe(x, ids, weights)


def _layers(case: Case, ties: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Layer(case, ties) for _ in range(2))


def _run(layers: nn.ModuleList, x: torch.Tensor, mode: str) -> torch.Tensor:
    for layer in layers:
        out: Any = checkpoint(layer, x, use_reentrant=mode == "reentrant") if mode in CHECKPOINTS else layer(x)
        x = out
    return x


def _gradients(case: Case, mode: str, ties: bool) -> list[torch.Tensor]:
    layers = _layers(case, ties)
    batch = make_batch(case, dist.get_rank())
    x = batch.tokens.requires_grad_()
    out = _run(layers, x, mode)
    out.backward(batch.grad)
    found: list[Any] = [out.detach(), x.grad, *(p.grad for p in layers.parameters())]
    assert all(g is not None for g in found)
    return found


def _compare(case: Case, mode: str, ties: bool) -> float:
    expected = _gradients(case, "train", ties)
    poison()
    found = _gradients(case, mode, ties)
    torch.use_deterministic_algorithms(False)
    ep_finalize()
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpoints_change_no_gradient(ranks2: Ranks, implementation: str, mode: str) -> None:
    case = Case(tokens=(6, 6), implementation=implementation, shared_batch=implementation in ("all_reduce", "auto"))
    for difference in ranks2.run(_compare, case, mode, False):
        # Under "auto" the first, gradient-free pass of a reentrant checkpoint sums in another order.
        assert difference <= (1e-5 if (implementation, mode) == ("auto", "reentrant") else 0.0)


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("implementation", ["copy_engine", "all_to_all"])
def test_recomputed_ties_route_alike(ranks2: Ranks, implementation: str, mode: str) -> None:
    case = Case(tokens=(18, 16), num_experts=6, topk=3, implementation=implementation)
    assert ranks2.run(_compare, case, mode, True) == [0.0, 0.0]


def _inference(case: Case, mode: str) -> float:
    layers = _layers(case)
    x = make_batch(case, dist.get_rank()).tokens
    expected = _run(layers, x.clone().requires_grad_(), "train").detach()
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        found = _run(layers, x, "train")
    assert not found.requires_grad
    again = _gradients(case, "train", False)[0]  # and a training step afterwards
    ep_finalize()
    return max(float((found - expected).abs().max()), float((again - expected).abs().max()))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inference_equals_training(ranks2: Ranks, implementation: str, mode: str) -> None:
    case = Case(tokens=(6, 6), implementation=implementation, shared_batch=implementation in ("all_reduce", "auto"))
    assert max(ranks2.run(_inference, case, mode)) < 1e-5


# --- auto --------------------------------------------------------------------------------------------------


def _auto(shared: bool) -> dict[str, tuple[str, str]]:
    case = Case(tokens=(6, 6), implementation="auto", shared_batch=shared, topk=1)
    model = build(case)
    auto = model.implementation
    assert isinstance(auto, AutoEP)
    batch = make_batch(case, dist.get_rank())
    found = {"before": (str(auto.last), auto.reason)}

    def note(name: str) -> None:
        model(batch.tokens, batch.ids, batch.weights)
        assert auto.last is not None
        found[name] = auto.last.__name__, auto.reason

    note("train")
    with torch.no_grad():
        note("inference")
    model.experts.requires_grad_(False)
    note("nothing to train")
    batch.weights.requires_grad_()
    note("train the router")
    ep_finalize()
    return found


def test_autos_choice_on_a_shared_batch(ranks2: Ranks) -> None:
    for found in ranks2.run(_auto, True):
        assert found["before"] == ("None", "no call yet")
        assert found["train"] == ("CopyEngineEP", "2 ranks for 1 experts a token, symmetric memory")
        assert found["inference"] == ("AllReduceEP", "no gradient can flow and the batch is shared")
        assert found["nothing to train"][0] == "AllReduceEP"
        assert found["train the router"][0] == "CopyEngineEP"


def test_autos_choice_on_batches_of_their_own(ranks2: Ranks) -> None:
    for found in ranks2.run(_auto, False):
        assert {name for key, (name, _) in found.items() if key != "before"} == {"CopyEngineEP"}


def _choice(config: EpConfig) -> tuple[str, str]:
    dist.barrier()  # nobody leaves while another rank is still connecting
    group = dist.group.WORLD
    assert group is not None
    cls, reason = choose_exchange(group, config)
    ep_finalize()
    return cls.__name__, reason


def test_auto_weighs_padding(ranks4: Ranks) -> None:
    config = EpConfig(num_experts=4, num_topk=1, hidden_dim=8)
    expected = "AllToAllEP", "4 ranks for 1 experts a token: padded rows would be mostly empty"
    assert ranks4.run(_choice, config) == [expected] * 4


def test_auto_needs_a_bound_or_growth(ranks2: Ranks) -> None:
    config = EpConfig(num_experts=4, num_topk=1, hidden_dim=8, overflow="raise")
    for name, reason in ranks2.run(_choice, config):
        assert name == "AllToAllEP"
        assert "no bound and buffers may not grow" in reason


def _choice_as_on_gpus(config: EpConfig) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:  # the rule only: memory still comes from this host
        patch.setattr(auto, "symmetric", SimpleNamespace(backend_of=lambda group: "nccl"))
        return _choice(config)


@pytest.mark.parametrize("static", [False, True])
def test_auto_on_two_gpus_depends_on_what_the_host_reads(ranks2: Ranks, static: bool) -> None:
    options: dict[str, Any] = {"overflow": "drop", "recv_capacity_per_rank": 64} if static else {}
    config = EpConfig(num_experts=4, num_topk=2, hidden_dim=8, max_tokens_per_rank=8, **options)
    for name, reason in ranks2.run(_choice_as_on_gpus, config):
        if static:
            assert (name, reason) == ("CopyEngineEP", "2 ranks for 2 experts a token, symmetric memory")
        else:
            assert name == "AllToAllEP"
            assert reason.startswith("2 ranks whose hosts read counts in every layer: exact splits took 0.84 to 1.08")


def test_auto_on_four_gpus(ranks4: Ranks) -> None:
    config = EpConfig(num_experts=4, num_topk=2, hidden_dim=8, max_tokens_per_rank=8)
    expected = "CopyEngineEP", "4 ranks for 2 experts a token, symmetric memory"
    assert ranks4.run(_choice_as_on_gpus, config) == [expected] * 4


def test_auto_without_symmetric_memory(ranks2: Ranks) -> None:
    config = EpConfig(num_experts=4, num_topk=2, hidden_dim=2**20, max_tokens_per_rank=2**30)  # petabytes
    for name, reason in ranks2.run(_choice, config):
        assert name == "AllToAllEP"
        assert reason.startswith("no symmetric memory: ")
        assert "could not be had" in reason


# --- layers share what they can ----------------------------------------------------------------------------


def _shared_buffers() -> tuple[bool, bool, bool]:
    case = Case(tokens=(3, 3))
    one, two = build(case), build(case)
    other = build(Case(tokens=(3, 3), hidden=16))

    def context(model: ExpertParallel) -> Any:
        return model.implementation._context()  # type: ignore[attr-defined]

    group: Any = dist.new_group()
    elsewhere = build(Case(tokens=(3, 3)), group)
    made = context(one)
    found = made is context(two), made is context(other), made is context(elsewhere)
    ep_finalize()
    return found


def test_layers_of_one_shape_share_their_buffers(ranks2: Ranks) -> None:
    assert ranks2.run(_shared_buffers) == [(True, False, False)] * 2


def _weights_inside(implementation: str) -> None:
    """Experts that are not linear in the weight tell who applies it."""
    case = Case(implementation=implementation, weighting="experts", shared_batch=implementation == "all_reduce")
    case = replace(case, tokens=(6, 6))
    model = build(case)
    model.experts = _Squashed()
    tokens, ids, weights, _ = make_batch(case, dist.get_rank())
    expected = torch.stack([torch.tanh(tokens * weights[:, k : k + 1]) for k in range(ids.shape[1])]).sum(0)
    torch.testing.assert_close(model(tokens, ids, weights), expected)
    ep_finalize()


class _Squashed(nn.Module):
    def forward(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows * weights.unsqueeze(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_handed_to_the_experts(ranks2: Ranks, implementation: str) -> None:
    ranks2.run(_weights_inside, implementation)


class _Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(*args)


def _wrapped(implementation: str) -> bool:
    case = Case(implementation=implementation)
    model = build(case)
    batch = make_batch(case, dist.get_rank())
    before = model(batch.tokens, batch.ids, batch.weights)
    model.experts = _Doubled(model.experts)
    same = torch.equal(model(batch.tokens, batch.ids, batch.weights), 2 * before)
    ep_finalize()
    return same


@pytest.mark.parametrize("implementation", ["copy_engine", "auto"])
def test_experts_that_are_wrapped_later_are_used(ranks2: Ranks, implementation: str) -> None:
    assert ranks2.run(_wrapped, implementation) == [True, True]


def _shapes() -> list[tuple[int, ...]]:
    case = Case(tokens=(6, 6))
    model = build(case)
    batch = make_batch(case, dist.get_rank())
    flat = model(batch.tokens, batch.ids, batch.weights)
    boxed = model(batch.tokens.view(2, 3, -1), batch.ids.view(2, 3, -1), batch.weights.view(2, 3, -1).bfloat16())
    assert "implementation='copy_engine'" in repr(model)
    assert torch.allclose(boxed.view_as(flat), flat, atol=2e-2)
    ep_finalize()
    return [tuple(flat.shape), tuple(boxed.shape)]


def test_leading_dimensions_and_other_weight_types(ranks2: Ranks) -> None:
    assert ranks2.run(_shapes) == [[(6, 8), (2, 3, 8)]] * 2
