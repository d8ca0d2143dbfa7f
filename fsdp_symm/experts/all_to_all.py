"""Exact exchange over ``all_to_all_single``: only rows that are needed travel, and the host learns every size.

Works with any process group and any number of tokens on any rank, also none. One host read a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdp_symm.experts import routing
from fsdp_symm.experts.config import EpConfig
from fsdp_symm.experts.exchange import Layout, PartSpec, Prepared, Traffic
from fsdp_symm.experts.registry import TokenExchangeEP


class CollectiveExchange:
    """:class:`fsdp_symm.experts.exchange.Exchange` by the process group's own collectives."""

    exact = True

    def __init__(self, group: dist.ProcessGroup, config: EpConfig) -> None:
        self._group = group
        self._config = config
        self._num_ranks = group.size()
        self._rank = group.rank()
        self._bytes_moved = 0

    def prepare(self, ids: torch.Tensor) -> Prepared:
        """All-gather the facts, then send each rank the ids of its rows."""
        found = routing.route(ids, num_experts=self._config.num_experts, num_ranks=self._num_ranks, rows_per_rank=None)
        mine = found.facts
        table = mine.new_empty((self._num_ranks, mine.numel()))
        dist.all_gather(list(table.unbind(0)), mine, group=self._group)
        table = table.cpu()
        layout = self.layout(0, table)
        sent = routing.to_rank_major(found.narrowed, found.home, sum(layout.sent))
        return Prepared(found.home, table, self._swap(sent, layout.sent, layout.received))

    def layout(self, num_rows: int, table: torch.Tensor) -> Layout:
        """The table's counts, which are on the host."""
        return Layout(tuple(tuple(row) for row in table[:, : self._num_ranks].tolist()), self._rank)

    def to_experts(self, parts: Sequence[torch.Tensor], home: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """One exchange a part."""
        packed = [routing.to_rank_major(part, home, sum(layout.sent)) for part in parts]
        return [self._swap(part, layout.sent, layout.received) for part in packed]

    def to_homes(
        self, specs: Sequence[PartSpec], write: Callable[[list[torch.Tensor]], None], layout: Layout
    ) -> list[torch.Tensor]:
        """One exchange a part, the other way round."""
        parts = [torch.empty((sum(layout.received), s.width), dtype=s.dtype, device=s.device) for s in specs]
        write(parts)
        return [self._swap(part, layout.received, layout.sent) for part in parts]

    def _swap(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), rows.shape[1]))
        if rows.shape[1]:
            dist.all_to_all_single(result, rows, list(received), list(sent), group=self._group)
            self._bytes_moved += (len(result) - received[self._rank]) * rows.shape[1] * rows.element_size()
        return result

    def resize(self, max_tokens: int) -> None:
        """Nothing to do."""

    def room(self) -> int | None:
        """Any number of rows fits."""
        return None

    def traffic(self) -> Traffic:
        """Rows received from peers; the facts that go before them are not counted."""
        return Traffic("all_to_all", bytes_moved=self._bytes_moved)

    def fail(self, text: str) -> None:
        """A process group has no way to say it; its own timeout ends the peers' wait."""

    def close(self) -> None:
        """Nothing is held."""


class AllToAllEP(TokenExchangeEP):
    """``"all_to_all"``: exact splits over the process group's collectives; any layout, one host read a layer."""

    transport = "all_to_all"
