"""A dense mixture-of-experts reference, and batches that every rank can make for every rank.

Legend: T tokens of a rank, H hidden width, K experts a token, E experts, R ranks, L = E / R.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_symm.experts import EpConfig, ExpertParallel, ep_finalize
from fsdp_symm.experts.context import _shared
from tests.models import DEVICE

INNER = 8


@dataclass(frozen=True)
class Case:
    """One program. ``tokens`` has an entry a rank."""

    tokens: tuple[int, ...] = (7, 5)
    topk: int = 2
    num_experts: int = 4
    hidden: int = 8
    dtype: str = "float32"
    routing: str = "any"  # any, distinct, first_rank, last_expert, even_experts
    masked: float = 0.0
    idx_dtype: str = "int64"
    strided: bool = False
    seed: int = 0
    implementation: str = "copy_engine"
    weighting: Any = "combine"
    shared_batch: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def ep_config(self) -> EpConfig:
        return EpConfig(
            num_experts=self.num_experts,
            num_topk=self.topk,
            hidden_dim=self.hidden,
            payload_dtype=self.torch_dtype,
            timeout_s=20.0,
            **self.config,
        )


class Batch(NamedTuple):
    tokens: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K]
    weights: torch.Tensor  # fp32 [T, K]
    grad: torch.Tensor  # [T, H], gradient of the output


def make_batch(case: Case, rank: int, step: int = 0) -> Batch:
    """Rank ``rank``'s batch; with a shared batch the same for all."""
    rank = 0 if case.shared_batch else rank
    random = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + rank)
    count, k, experts = case.tokens[rank], case.topk, case.num_experts
    tokens = torch.randn(count, case.hidden, generator=random).to(case.torch_dtype)
    if case.routing == "distinct":
        ids = torch.rand(count, experts, generator=random).argsort(1)[:, :k]
    else:
        low, high = {"first_rank": (0, experts // len(case.tokens)), "last_expert": (experts - 1, experts)}.get(
            case.routing, (0, experts)
        )
        ids = torch.randint(low, high, (count, k), generator=random)
        if case.routing == "even_experts":
            ids = ids // 2 * 2
    ids = torch.where(torch.rand(count, k, generator=random) < case.masked, -1, ids)
    weights = torch.rand(count, k, generator=random)
    grad = torch.randn(count, case.hidden, generator=random).to(case.torch_dtype)
    ids = ids.to(getattr(torch, case.idx_dtype))
    if case.strided:
        ids, weights, tokens = (t.t().contiguous().t() for t in (ids, weights, tokens))
    return Batch(*(t.to(DEVICE) for t in (tokens, ids, weights, grad)))


def expert_weights(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """``[E, H, INNER]`` and ``[E, INNER, H]``."""
    random = torch.Generator().manual_seed(4242 + case.seed)
    first = torch.randn(case.num_experts, case.hidden, INNER, generator=random) / case.hidden**0.5
    second = torch.randn(case.num_experts, INNER, case.hidden, generator=random) / INNER**0.5
    return first.to(DEVICE), second.to(DEVICE)


class LoopExperts(nn.Module):
    """``tanh(x A) B`` for each expert over its zone; the tail behind the zones is NaN on purpose."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        sizes = counts.tolist()
        scales = [None] * len(sizes) if weights is None else weights[: sum(sizes)].split(sizes)
        answers = []
        for index, (zone, scale) in enumerate(zip(rows[: sum(sizes)].split(sizes), scales, strict=True)):
            inner = torch.tanh(zone.float() @ self.first[index])
            if scale is not None:
                inner = inner * scale.unsqueeze(1)
            answers.append(inner @ self.second[index])
        tail = rows.new_full((rows.shape[0] - sum(sizes), rows.shape[1]), float("nan"), dtype=torch.float32)
        return torch.cat([*answers, tail]).to(rows.dtype)


class Result(NamedTuple):
    """What a step made, in fp32."""

    out: torch.Tensor
    tokens: torch.Tensor  # gradient
    weights: torch.Tensor  # gradient
    first: torch.Tensor  # gradient, local experts
    second: torch.Tensor


def dense(case: Case, rank: int, num_ranks: int, step: int = 0) -> Result:
    """All ranks' batches through all experts in one process; what belongs to ``rank``."""
    first, second = (w.requires_grad_() for w in expert_weights(case))
    batches = [make_batch(case, r, step) for r in range(1 if case.shared_batch else num_ranks)]
    outs, leaves = [], []
    for batch in batches:
        tokens = batch.tokens.float().requires_grad_()
        weights = batch.weights.clone().requires_grad_()
        out = torch.zeros(tokens.shape, device=DEVICE)
        for k in range(case.topk):
            ids = batch.ids[:, k].long()
            real = (ids >= 0).float().unsqueeze(1)
            inner = torch.tanh(torch.einsum("th,thf->tf", tokens, first[ids.clamp(min=0)]))
            answer = torch.einsum("tf,tfh->th", inner, second[ids.clamp(min=0)])
            out = out + real * weights[:, k : k + 1] * answer
        outs.append(out)
        leaves.append((tokens, weights))
    torch.stack([(o * b.grad.float()).sum() for o, b in zip(outs, batches, strict=True)]).sum().backward()
    index = 0 if case.shared_batch else rank
    tokens, weights = leaves[index]
    local = slice(rank * case.num_experts // num_ranks, (rank + 1) * case.num_experts // num_ranks)
    grads: list[Any] = [t.grad for t in (tokens, weights, first, second)]
    return Result(outs[index].detach(), grads[0], grads[1], grads[2][local], grads[3][local])


def build(case: Case, group: dist.ProcessGroup | None = None) -> ExpertParallel:
    """This rank's part of the experts behind the implementation under test."""
    group = group or dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    local = slice(rank * case.num_experts // size, (rank + 1) * case.num_experts // size)
    first, second = expert_weights(case)
    return ExpertParallel(
        LoopExperts(first[local], second[local]),
        group,
        case.ep_config(),
        implementation=case.implementation,
        shared_batch=case.shared_batch,
        weighting=case.weighting,
    )


def step(model: ExpertParallel, case: Case, number: int = 0) -> Result:
    """Forward and backward of this rank's batch."""
    batch = make_batch(case, dist.get_rank(), number)
    tokens, weights = batch.tokens.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    experts: Any = model.experts
    experts.zero_grad()
    out = model(tokens, batch.ids, weights)
    out.backward(batch.grad)
    grads: list[Any] = [t.grad for t in (tokens, weights, experts.first, experts.second)]
    return Result(out.detach().float(), grads[0].float(), *(g.clone() for g in grads[1:]))


TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def assert_close(found: Result, expected: Result, case: Case) -> None:
    """Relative to the largest element: sums over many rows have a common scale."""
    for name, mine, reference in zip(Result._fields, found, expected, strict=True):
        assert mine.shape == reference.shape, (name, mine.shape, reference.shape)
        if not reference.numel():
            continue
        assert torch.isfinite(mine).all(), f"{name}: not finite"
        scale = max(float(reference.abs().max()), 1e-3)
        error = float((mine - reference).abs().max()) / scale
        assert error < TOLERANCES[case.dtype], f"{name}: relative error {error:.2e}, {case}"


def poison() -> None:
    """Uninitialised memory is NaN from now on, on CPU ranks in slots too."""
    torch.use_deterministic_algorithms(True)  # fills every empty tensor with NaN, and refuses what has no fixed order
    dist.barrier()  # a slower peer may still be reading these slots
    for context in _shared:
        arena = getattr(context.exchange, "arena", None)
        if arena is not None and DEVICE == "cpu":
            arena.segment.data(arena.segment.rank, 0, arena.slot_nbytes).fill_(255)


def check_steps(case: Case, steps: int = 2) -> dict[str, Any]:
    """A rank's steps against the dense reference, in poisoned memory. Returns the last step's numbers as lists."""
    torch.use_deterministic_algorithms(True)
    try:
        model = build(case)
        result = None
        for number in range(steps):
            if number:
                poison()
            result = step(model, case, number)
            assert_close(result, dense(case, dist.get_rank(), dist.get_world_size(), number), case)
        assert result is not None
        return {name: value.tolist() for name, value in zip(Result._fields, result, strict=True)}
    finally:
        torch.use_deterministic_algorithms(False)
        ep_finalize()
