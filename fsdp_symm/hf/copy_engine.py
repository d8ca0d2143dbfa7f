"""What transformers calls for the experts of a module: tokens of this rank in, their weighted answers out.

Legend: T tokens of this rank's batch, H hidden width, K experts a token, L experts of this rank, M rows they get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_symm.experts import CopyEngineEP, EpConfig, ops
from fsdp_symm.experts.context import shared_context

_SUMS = "local"  # a context that holds no buffers; it names a group for sums


class CopyEngineCall:
    """The call of a transformers ``EPImplementation``, whose constructor and attributes it relies on.

    Rows travel padded, in symmetric memory, and buffers grow with the largest batch. Router weights are applied and
    rows summed in fp32. Ranks of a tensor-parallel group share a batch: each sends a slice of it, and the answers are
    summed over that group. Every rank of the expert group calls together, also with no tokens; a backward pass too.
    """

    experts_forward: Any
    num_local_experts: int
    ep_mesh: Any
    tp_mesh: Any

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[T, H]`` tokens, ``[T, K]`` global expert ids (negative: masked) and weights -> ``[T, H]``."""
        config = EpConfig(
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            num_topk=top_k_index.shape[-1],
            hidden_dim=hidden_states.shape[-1],
            payload_dtype=hidden_states.dtype,
        )
        weights = top_k_weights.float()
        if self.tp_mesh.size() == 1:
            return self._exchange(config, hidden_states, top_k_index, weights)
        sums = shared_context(self.tp_mesh.get_group(), config, _SUMS).key
        count = hidden_states.shape[0]
        size = -(-count // self.tp_mesh.size())
        first = min(size * self.tp_mesh.get_local_rank(), count)
        mine = slice(first, min(first + size, count))
        hidden = ops.sum_gradients(hidden_states, sums)[mine]
        part = self._exchange(config, hidden, top_k_index[mine], ops.sum_gradients(weights, sums)[mine])
        return ops.sum_outputs(nn.functional.pad(part, (0, 0, mine.start, count - mine.stop)), sums)

    def _exchange(
        self, config: EpConfig, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return CopyEngineEP(self._run_experts, self.ep_mesh.get_group(), config)(hidden, ids, weights)

    def _run_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``[M, H]`` rows by local expert, ``[L]`` of each -> ``[M, H]``, unweighted."""
        num_rows = rows.shape[0]
        local = torch.arange(self.num_local_experts, device=rows.device)
        ids = local.repeat_interleave(counts, output_size=num_rows)
        if not num_rows:
            # The experts get one row of zeros: their parameters then have gradients, and the backward pass reaches
            # the exchange, for which the peers wait.
            rows, ids = nn.functional.pad(rows, (0, 0, 0, 1)), local[:1]
        ones = torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device)
        return self.experts_forward(rows, ids.unsqueeze(1), ones)[:num_rows].to(rows.dtype)
