"""Experts under FSDP2, grouped GEMMs with real garbage behind their zones, DTensors, and the example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_symm import set_symm_mem_for_comm
from fsdp_symm.experts import EpConfig, ExpertParallel, GroupedExperts, ep_finalize, scale_expert_gradients
from tests.experts.moe import poison
from tests.harness import Ranks

H, F, E, K, T = 8, 16, 4, 2, 12


def _weights(num_experts: int = E) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"gate": (num_experts, F, H), "up": (num_experts, F, H), "down": (num_experts, H, F)}
    return {name: torch.randn(shape, generator=random) / shape[2] ** 0.5 for name, shape in shapes.items()}


def _batch(rank: int, routing: str = "any") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(T, H, generator=random)
    high = {"any": E, "first": 1}[routing]
    return x, torch.randint(0, high, (T, K), generator=random), torch.rand(T, K, generator=random)


def _dense(weights: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        gate, up, down = (weights[n][ids[:, k]] for n in ("gate", "up", "down"))
        inner = nn.functional.silu(torch.einsum("th,tfh->tf", x, gate)) * torch.einsum("th,tfh->tf", x, up)
        out = out + router[:, k : k + 1] * torch.einsum("tf,thf->th", inner, down)
    return out


def _reference(size: int, routing: str = "any") -> dict[str, torch.Tensor]:
    """Gradients of the mean over ranks of each rank's mean square."""
    weights = {n: w.requires_grad_() for n, w in _weights().items()}
    losses = [_dense(weights, *_batch(r, routing)).square().mean() for r in range(size)]
    torch.stack(losses).mean().backward()
    return {n: w.grad for n, w in weights.items() if w.grad is not None}


def _model(ep: int, implementation: str, param_dtype: torch.dtype | None = None, **config: Any) -> ExpertParallel:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("fsdp", "ep"))
    group = mesh.get_group("ep")
    mine = slice(group.rank() * E // ep, (group.rank() + 1) * E // ep)
    experts = GroupedExperts(**{n: w[mine].clone() for n, w in _weights().items()})
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(experts, mesh=mesh["fsdp"], mp_policy=policy)
    scale_expert_gradients(experts, size)
    sizes: dict[str, Any] = {"num_experts": E, "num_topk": K, "hidden_dim": H, "payload_dtype": torch.float32}
    return ExpertParallel(experts, group, EpConfig(**{**sizes, **config}), implementation=implementation)


def _sharded(ep: int, implementation: str, switch: bool, routing: str) -> None:
    model = _model(ep, implementation)
    fully_shard(model)  # the root, with no parameters of its own
    if not switch and ep < dist.get_world_size():
        model.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no PREMUL_SUM
    handle = set_symm_mem_for_comm(model) if switch else None
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = _reference(size, routing)
    for step in range(2):
        model.zero_grad()
        if step:
            poison()
        x, ids, router = _batch(rank, routing)
        model(x.requires_grad_(), ids, router).square().mean().backward()
        for name, parameter in model.experts.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient on rank {rank}"
            found = parameter.grad.full_tensor()  # type: ignore[attr-defined]
            local = found.shape[0]
            first = (rank % ep) * local
            torch.testing.assert_close(found, expected[name][first : first + local], rtol=1e-4, atol=1e-6)
    torch.use_deterministic_algorithms(False)
    if handle is not None:
        handle.close()
    ep_finalize()


@pytest.mark.parametrize("routing", ["any", "first"])
@pytest.mark.parametrize("switch", [True, False], ids=["symm", "plain"])
@pytest.mark.parametrize("implementation", ["copy_engine", "all_to_all"])
@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_have_dense_gradients(
    ranks2: Ranks, ep: int, implementation: str, switch: bool, routing: str
) -> None:
    """``first``: every token goes to one expert; the other ranks have zero gradients, and nobody waits."""
    ranks2.run(_sharded, ep, implementation, switch, routing)


@pytest.mark.parametrize("switch", [True, False], ids=["symm", "plain"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_four_ranks_have_dense_gradients(ranks4: Ranks, ep: int, switch: bool) -> None:
    """The same gradients however many ranks share the experts: divided by the dense data-parallel size."""
    ranks4.run(_sharded, ep, "copy_engine", switch, "any")


def _unscaled() -> float:
    model = _model(2, "copy_engine")
    model.experts.set_gradient_divide_factor(None)  # type: ignore[operator]
    x, ids, router = _batch(dist.get_rank())
    model(x, ids, router).square().mean().backward()
    expected = _reference(2)
    local: Any = model.experts
    first = dist.get_rank() * E // 2
    ratio = local.gate.grad.full_tensor() / expected["gate"][first : first + E // 2]
    ep_finalize()
    return float(ratio.nanmedian())


def test_without_the_scale_gradients_are_too_large(ranks2: Ranks) -> None:
    """Why :func:`scale_expert_gradients` exists."""
    assert ranks2.run(_unscaled) == pytest.approx([2.0, 2.0], rel=1e-3)


def _grouped(alignment: int, weighting: Any, dtype: torch.dtype) -> None:
    """bf16 and fp32 grouped GEMMs, zero-token experts, a static capacity whose tail the GEMMs never write."""
    torch.use_deterministic_algorithms(True)
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    experts = GroupedExperts(**{n: w[rank * 2 : rank * 2 + 2].to(dtype) for n, w in _weights().items()})
    config = EpConfig(
        num_experts=E,
        num_topk=K,
        hidden_dim=H,
        payload_dtype=dtype,
        max_tokens_per_rank=T,
        recv_capacity_per_rank=128,
        alignment=alignment,
        overflow="drop",
    )
    model = ExpertParallel(experts, group, config, implementation="copy_engine", weighting=weighting)
    expected = _reference(2, "first")
    for step in range(3):
        if step:
            poison()
        model.zero_grad()
        x, ids, router = _batch(rank, "first")
        x, router = x.to(dtype).requires_grad_(), router.requires_grad_()
        (model(x, ids, router).float().square().mean() / 2).backward()
        for name, parameter in experts.named_parameters():
            assert parameter.grad is not None
            found = parameter.grad.float()
            assert torch.isfinite(found).all(), name
            reference = expected[name][rank * 2 : rank * 2 + 2]
            tolerance = 1e-5 if dtype == torch.float32 else 0.05
            assert float((found - reference).abs().max()) <= tolerance * max(float(reference.abs().max()), 0.01)
            assert rank or not found[1].any(), "an expert without a token"
        assert x.grad is not None
        assert router.grad is not None
        assert torch.isfinite(x.grad).all()
        assert torch.isfinite(router.grad).all()
    torch.use_deterministic_algorithms(False)
    ep_finalize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighting", ["combine", "experts"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_grouped_gemms_in_poisoned_memory(ranks2: Ranks, alignment: int, weighting: str, dtype: torch.dtype) -> None:
    ranks2.run(_grouped, alignment, weighting, dtype)


def _dtensors() -> None:
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    experts = GroupedExperts(**_weights())
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    config = EpConfig(num_experts=E, num_topk=K, hidden_dim=H, payload_dtype=torch.float32)
    model = ExpertParallel(experts, mesh.get_group(), config, implementation="all_to_all")
    x, ids, router = _batch(group.rank())
    leaf = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
    parts = [DTensor.from_local(t, mesh, [Shard(0)]) for t in (ids, router)]
    out = model(leaf, *parts)
    torch.testing.assert_close(out, _dense(_weights(), x, ids, router), rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert isinstance(leaf.grad, DTensor)
    assert leaf.grad.placements == (Shard(0),)
    gate: Any = experts.gate
    assert isinstance(gate.grad, DTensor)
    assert gate.grad.placements == (Shard(0),) != (Replicate(),)
    ep_finalize()


def test_dtensor_inputs_and_parameters(ranks2: Ranks) -> None:
    ranks2.run(_dtensors)


def _mixed_precision() -> None:
    model = _model(2, "copy_engine", torch.bfloat16, payload_dtype=torch.bfloat16)
    x, ids, router = _batch(dist.get_rank())
    out = model(x.bfloat16(), ids, router)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    expected = _reference(2)
    experts: Any = model.experts
    first = dist.get_rank() * E // 2
    found = experts.down.grad.full_tensor()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected["down"][first : first + E // 2], rtol=0.1, atol=5e-3)
    ep_finalize()


def test_fp32_masters_and_bf16_tokens(ranks2: Ranks) -> None:
    ranks2.run(_mixed_precision)


def _state() -> list[str]:
    model = _model(2, "auto")
    x, ids, router = _batch(dist.get_rank())
    model(x, ids, router)
    ep_finalize()
    return sorted(model.state_dict())


def test_a_checkpoint_holds_the_experts_and_nothing_else(ranks2: Ranks) -> None:
    assert ranks2.run(_state)[0] == ["experts.down", "experts.gate", "experts.up"]


def test_the_example_checks_itself() -> None:
    script = Path(__file__).parents[2] / "examples" / "moe.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, "--check", "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: losses and parameters equal the dense model's" in done.stdout
    assert "blocks.0.moe.experts" in done.stdout, "the switch's table"
