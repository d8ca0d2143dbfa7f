"""Modules: experts whose rows are grouped, and expert parallelism around any experts.

Legend as in :mod:`fsdp_symm.experts.routing`; F inner width of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fsdp_symm.experts.config import EpConfig, refuse
from fsdp_symm.experts.registry import EPImplementation, EPImplementationInterface, Weighting


class GroupedExperts(nn.Module):
    """L experts ``down(silu(gate(x)) * up(x))`` as grouped GEMMs over expert-major rows.

    Args:
        gate, up: ``[L, F, H]``.
        down: ``[L, H, F]``.

    Raises:
        SymmMemConfigError: shapes that do not belong together, or rows that are no multiple of 16 bytes, which grouped
            GEMMs need.
    """

    def __init__(self, *, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        if gate.shape != up.shape or down.shape != (gate.shape[0], gate.shape[2], gate.shape[1]):
            refuse(
                "GroupedExperts: weights",
                found=f"gate {list(gate.shape)}, up {list(up.shape)}, down {list(down.shape)}",
                expected="gate and up [L, F, H], down [L, H, F]",
                fix="stack the weights of the local experts",
            )
        if any(size * gate.element_size() % 16 for size in gate.shape[1:]):
            refuse(
                "GroupedExperts: widths",
                found=f"F {gate.shape[1]}, H {gate.shape[2]} in {gate.dtype}",
                expected="rows of a multiple of 16 bytes",
                fix="pad the widths",
            )
        self.gate, self.up, self.down = nn.Parameter(gate), nn.Parameter(up), nn.Parameter(down)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, H]`` -> ``[M, H]``; ``weights [M]`` are applied between the two GEMMs. Rows behind ``counts.sum()``
        stay undefined."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up, down = (_local(w).to(rows.dtype).mT for w in (self.gate, self.up, self.down))
        inner = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
        if weights is not None:
            inner = (inner.float() * weights.unsqueeze(1)).to(rows.dtype)
        return F.grouped_mm(inner, down, offs=ends)


class _CurrentExperts:
    """The experts that a module holds now: wrappers (activation checkpoints, quantization) replace submodules."""

    def __init__(self, owner: ExpertParallel) -> None:
        self._owner = owner

    def __call__(self, *rows_and_counts: torch.Tensor) -> torch.Tensor:
        return self._owner.experts(*rows_and_counts)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._owner.experts.parameters()


class ExpertParallel(nn.Module):
    """This rank's experts, reached by the tokens of all ranks of a group.

    Args:
        experts: this rank's E / R experts, see :data:`fsdp_symm.experts.registry.Experts`; may be sharded with
            ``fully_shard`` over the ranks that hold the same experts.
        group: the ranks that share the experts.
        config: sizes and policies; its defaults need only ``num_experts``, ``num_topk``, ``hidden_dim`` and
            ``payload_dtype``.
        implementation: a name known to :class:`EPImplementationInterface`.
        shared_batch: every rank of the group holds the same tokens.
        weighting: ``"combine"``: what experts return is multiplied by the router weights; ``"experts"``: the experts
            take the weights as a third argument and apply them.

    Raises:
        SymmMemConfigError: an unknown implementation, or one that cannot work here.
    """

    def __init__(
        self,
        experts: nn.Module,
        group: dist.ProcessGroup,
        config: EpConfig,
        *,
        implementation: str = "auto",
        shared_batch: bool = False,
        weighting: Weighting = "combine",
    ) -> None:
        super().__init__()
        config.local_experts(group)
        cls = EPImplementationInterface.get(implementation)
        self.experts = experts
        self.implementation_name = implementation
        self.implementation: EPImplementation = cls(
            _CurrentExperts(self), group, config, shared_batch=shared_batch, weighting=weighting
        )

    def extra_repr(self) -> str:
        fields = dataclasses.asdict(self.implementation.config)
        return ", ".join([f"implementation={self.implementation_name!r}", *(f"{k}={v}" for k, v in fields.items())])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[..., H]`` tokens, ``[..., K]`` global expert ids and weights -> ``[..., H]``.

        DTensor arguments are taken by their local part; weights are cast to fp32.
        """
        hidden, ids, weights = (_local(t) for t in (hidden_states, top_k_index, top_k_weights))
        flat = hidden.reshape(-1, hidden.shape[-1])
        width = ids.shape[-1]
        answer = self.implementation(flat, ids.reshape(-1, width), weights.reshape(-1, width).float())
        return answer.view(hidden.shape)


def scale_expert_gradients(module: nn.Module, dense_data_parallel_size: int) -> None:
    """Make FSDP2 divide the gradients of experts by the number of ranks whose losses are averaged.

    Experts are sharded over fewer ranks than dense parameters, but their gradients are sums over the tokens of all
    ranks: FSDP2's own average would be too large by the size of the expert group. (Do not also force SUM reductions on
    experts that FSDP2 shards over one rank: torch 2.13 divides twice then.)

    Args:
        module: experts that ``fully_shard`` was called on, or a module that contains such.
        dense_data_parallel_size: ranks that dense parameters are averaged over.

    Raises:
        SymmMemConfigError: nothing below ``module`` is an FSDP module, or the size is no positive number.
    """
    sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
    if not sharded or dense_data_parallel_size < 1:
        refuse(
            "scale_expert_gradients",
            found=f"{len(sharded)} FSDP modules, dense_data_parallel_size {dense_data_parallel_size}",
            expected="at least one of each",
            fix="call fully_shard(experts, mesh=expert_fsdp_mesh) first",
        )
    for item in sharded:
        item.set_gradient_divide_factor(float(dense_data_parallel_size))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
