"""Expert parallelism on a shared batch: no token travels. Every rank runs its own experts on all tokens that want them,
and one all-reduce sums the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from fsdp_symm.experts import ops, routing
from fsdp_symm.experts.config import EpConfig
from fsdp_symm.experts.exchange import Layout, PartSpec, Prepared, Traffic
from fsdp_symm.experts.registry import ContextEP


class LocalExchange:
    """:class:`fsdp_symm.experts.exchange.Exchange` that moves nothing: all tokens are here already."""

    exact = False

    def __init__(self, group: dist.ProcessGroup, config: EpConfig) -> None:
        self._config = config

    def prepare(self, ids: torch.Tensor) -> Prepared:
        """Rows are tokens."""
        found = routing.route(ids, num_experts=self._config.num_experts, num_ranks=1, rows_per_rank=None, by_token=True)
        home = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        return Prepared(home, found.facts.unsqueeze(0), found.narrowed)

    def layout(self, num_rows: int, table: torch.Tensor) -> Layout:
        """One rank with itself."""
        return Layout(((num_rows,),), 0)

    def to_experts(self, parts: Sequence[torch.Tensor], home: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """As they are."""
        return list(parts)

    def to_homes(
        self, specs: Sequence[PartSpec], write: Callable[[list[torch.Tensor]], None], layout: Layout
    ) -> list[torch.Tensor]:
        """As they are."""
        parts = [torch.empty((layout.sizes[0][0], s.width), dtype=s.dtype, device=s.device) for s in specs]
        write(parts)
        return parts

    def resize(self, max_tokens: int) -> None:
        """Nothing to do."""

    def room(self) -> int | None:
        """Any number of rows fits."""
        return None

    def traffic(self) -> Traffic:
        """Nothing travels."""
        return Traffic("local")

    def fail(self, text: str) -> None:
        """No peer waits here."""

    def close(self) -> None:
        """Nothing is held."""


class AllReduceEP(ContextEP):
    """``"all_reduce"``: for a batch that all ranks share; the cost grows with the batch. Nothing is read on the host
    where ``recv_capacity_per_rank`` is set and ``overflow`` is ``"drop"``."""

    needs_shared_batch: ClassVar[bool] = True
    transport: ClassVar[str] = "local"

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`fsdp_symm.experts.registry.EPImplementation.__call__`."""
        context = self._context()
        hidden = ops.sum_gradients(hidden_states, context.key)
        weights = ops.sum_gradients(top_k_weights, context.key)
        return ops.sum_outputs(self._run(context, hidden, top_k_index, weights), context.key)
