"""What the experts benchmark computes: layers, routings, a dense reference, and the bytes that have to travel.

An expert multiplies its rows by a number of its own, so that time is spent on moving rows, and a row that reaches the
wrong expert is found out. Any rank can make any rank's batch.

Legend: T tokens of a rank, H hidden width, K experts a token, E experts, R ranks, L = E / R experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Task = Literal["dispatch", "combine", "forward_backward"]
TASKS: tuple[Task, ...] = ("dispatch", "combine", "forward_backward")
ROUTINGS = ("uniform", "skewed")
DTYPE = torch.bfloat16
_ROUNDING = 2.0**-8  # of bf16, relative


class Batch(NamedTuple):
    """One rank's input: ``[T, H]`` tokens and the gradient of the output, ``[T, K]`` expert ids and fp32 weights."""

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One mixture-of-experts layer and how its router decides.

    Attributes:
        num_experts, topk, tokens, hidden: E, K, T, H.
        routing: ``"uniform"``: every K experts are as likely; ``"skewed"``: expert e is wanted 1 / (e + 1) as often as
            expert 0, so that the first rank gets most rows.
    """

    num_experts: int
    topk: int
    tokens: int
    hidden: int
    routing: str

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens x {self.hidden}"
        return f"{self.num_experts} experts, top {self.topk}, {sizes}, {self.routing}"

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's tokens."""
        return self.tokens * self.hidden * DTYPE.itemsize

    def ids(self, rank: int) -> torch.Tensor:
        """int64 ``[T, K]`` on the CPU, K different experts a token."""
        random = torch.Generator().manual_seed(1000 + rank)
        gumbel = -torch.log(
            -torch.log(torch.rand(self.tokens, self.num_experts, generator=random).clamp(1e-9, 1 - 1e-7))
        )
        if self.routing == "skewed":
            gumbel -= torch.log(torch.arange(1, self.num_experts + 1))
        return gumbel.topk(self.topk, dim=1).indices.contiguous()

    def batch(self, rank: int, device: torch.device) -> Batch:
        """Rank ``rank``'s."""
        random = torch.Generator(device).manual_seed(2000 + rank)
        shape = self.tokens, self.hidden
        tokens = torch.randn(shape, generator=random, device=device).to(DTYPE)
        grad = torch.randn(shape, generator=random, device=device).to(DTYPE)
        weights = torch.rand((self.tokens, self.topk), generator=random, device=device)
        return Batch(tokens, self.ids(rank).to(device), weights, grad)

    def scales(self, device: torch.device) -> torch.Tensor:
        """bf16 ``[E]``: what each expert multiplies by; sizes 0.5 to 2, either sign."""
        random = torch.Generator().manual_seed(3000)
        size = 0.5 + 1.5 * torch.rand(self.num_experts, generator=random)
        return (size * (2 * torch.randint(2, (self.num_experts,), generator=random) - 1)).to(device, DTYPE)


class ScaleExperts:
    """This rank's experts: ``rows [M, H]``, ``counts [L]`` -> each row times its expert's number. Nothing is read on
    the host; rows behind ``counts.sum()`` are multiplied too."""

    def __init__(self, layer: Layer, rank: int, num_ranks: int, device: torch.device) -> None:
        local = layer.num_experts // num_ranks
        self._scales = layer.scales(device)[rank * local : (rank + 1) * local]

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Differentiable by the rows."""
        number = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(counts.cumsum(0), number, right=True).clamp(max=counts.shape[0] - 1)
        return rows * self._scales[expert].unsqueeze(1)


# --- what is right -----------------------------------------------------------------------------------------


class Reference:
    """What one rank must get, computed from everybody's batches without any exchange."""

    def __init__(self, layer: Layer, rank: int, num_ranks: int, device: torch.device) -> None:
        self._layer = layer
        self.rank, self.num_ranks, self._device = rank, num_ranks, device
        batch = layer.batch(rank, device)
        scale = layer.scales(device).float()[batch.ids]  # [T, K]
        tokens, grad = batch.tokens.float(), batch.grad.float()
        factor, size = (batch.weights * scale).sum(1, keepdim=True), (batch.weights * scale.abs()).sum(1, keepdim=True)
        dot, dot_size = (tokens * grad).sum(1, keepdim=True), (tokens * grad).abs().sum(1, keepdim=True)
        # name, expected, sum of the sizes of its terms: each is rounded up to three times, and each addition once
        self._out = ("output", tokens * factor, tokens.abs() * size)
        self._grad_tokens = ("gradient of the tokens", grad * factor, grad.abs() * size)
        self._grad_weights = ("gradient of the weights", dot * scale, dot_size * scale.abs())

    def wrong_rows(self, rows: torch.Tensor, counts: torch.Tensor) -> str | None:
        """What is wrong with dispatched rows, which are copies and so right in every bit: by expert, then by source
        rank, then by token."""
        local = self._layer.num_experts // self.num_ranks
        every = [self._layer.batch(rank, self._device) for rank in range(self.num_ranks)]
        expected = []
        for expert in range(self.rank * local, (self.rank + 1) * local):
            expected.append(torch.cat([batch.tokens[(batch.ids == expert).any(1)] for batch in every]))
        wanted = [zone.shape[0] for zone in expected]
        if counts.tolist() != wanted:
            return f"rows of each expert: {counts.tolist()}, expected {wanted}"
        differ = (rows[: sum(wanted)].view(torch.int16) != torch.cat(expected).view(torch.int16)).any(1)
        return f"{int(differ.sum())} of {sum(wanted)} dispatched rows differ" if bool(differ.any()) else None

    def wrong_output(self, out: torch.Tensor) -> str | None:
        """What is wrong with combined answers."""
        return self._wrong(out, *self._out)

    def wrong_step(self, out: torch.Tensor, grads: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        """What is wrong with an output and the gradients of tokens and weights."""
        return (
            self._wrong(out, *self._out)
            or self._wrong(grads[0], *self._grad_tokens)
            or self._wrong(grads[1], *self._grad_weights)
        )

    def _wrong(self, found: torch.Tensor, name: str, expected: torch.Tensor, size: torch.Tensor) -> str | None:
        limit = (self._layer.topk + 3) * _ROUNDING * size + 1e-6
        bad = ~((found.float() - expected).abs() <= limit)  # NaN is bad
        return f"{name}: {int(bad.sum())} of {bad.numel()} elements are off" if bool(bad.any()) else None


# --- what travels ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """How much the ranks have for each other.

    Attributes:
        rows: int64 ``[R, R]``, tokens of the outer rank that the inner one's experts want.
        routes: int64 ``[R, R]``, the same with a token counted once an expert.
    """

    rows: torch.Tensor
    routes: torch.Tensor

    @staticmethod
    def of(layer: Layer, num_ranks: int) -> Traffic:
        """From the routings of all ranks."""
        local = layer.num_experts // num_ranks
        owners = [layer.ids(rank) // local for rank in range(num_ranks)]
        wanted = torch.stack([torch.stack([(o == r) for r in range(num_ranks)]) for o in owners])  # [R, R, T, K]
        return Traffic(wanted.any(3).sum(2), wanted.sum((2, 3)))

    @staticmethod
    def padded(layer: Layer, num_ranks: int) -> Traffic:
        """T rows from everybody to everybody."""
        rows = torch.full((num_ranks, num_ranks), layer.tokens)
        return Traffic(rows, rows)

    def peers(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From ``rows`` or ``routes``: what each rank gets from its peers, and what its peers send back to it."""
        others = counts - torch.diag(counts.diagonal())
        return others.sum(0), others.sum(1)
