"""``"auto"``: picks an implementation for each call, by a rule that every rank evaluates alike.

1. No gradient can flow and the batch is shared: ``all_reduce``. No token travels; decoding has few tokens.
2. Else ``copy_engine`` where its padding is affordable and symmetric memory can be had. Padded, a token takes R rows;
   sent to each of its experts it would take K. R <= 2 K bounds the padding to twice those bytes. On 2 GPUs only where
   nothing is read on the host too (``overflow="drop"`` with a ``recv_capacity_per_rank``): where the host has to wait
   in every layer anyway, exact splits were measured to take 0.84 to 1.08 of the time on 2 ranks, but 1.08 and 1.13 on 4
   (profiles/experts_w2.csv, _w4, nvlink/experts_w2.csv).
3. Else ``all_to_all``.

On 4 ranks that share one GPU the static way, which nothing else can do, was measured to take 1.4 to 1.6 times as long
as exact splits. More than half of its time there goes to the benchmark's stand-in for experts, which multiplies empty
rows too; experts that leave them out (a grouped GEMM does) spare that. Nothing was measured over NVLink on more than 2.

The choice between 2 and 3 is made once, with all ranks, when it is first needed; ``reason`` says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_symm.errors import SymmMemMemoryError, SymmMemUnavailableError
from fsdp_symm.experts import symmetric
from fsdp_symm.experts.all_reduce import AllReduceEP
from fsdp_symm.experts.all_to_all import AllToAllEP
from fsdp_symm.experts.config import EpConfig
from fsdp_symm.experts.context import shared_context
from fsdp_symm.experts.copy_engine import CopyEngineEP
from fsdp_symm.experts.registry import EPImplementation, Experts


class AutoEP(EPImplementation):
    """See the module's text. ``last`` is the class that ran last, ``reason`` why it was chosen."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup, config: EpConfig, **options: Any) -> None:
        super().__init__(experts, group, config, **options)
        self._options = options
        self._made: dict[type[EPImplementation], EPImplementation] = {}
        self._exchange: tuple[type[EPImplementation], str] | None = None
        self.last: type[EPImplementation] | None = None
        self.reason = "no call yet"

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`EPImplementation.__call__`."""
        cls, self.reason = self._choose(hidden_states, top_k_weights)
        self.last = cls
        if cls not in self._made:
            self._made[cls] = cls(self.experts, self.group, self.config, **self._options)
        return self._made[cls](hidden_states, top_k_index, top_k_weights)

    def _choose(self, hidden: torch.Tensor, weights: torch.Tensor) -> tuple[type[EPImplementation], str]:
        parameters: Iterable[torch.Tensor] = getattr(self.experts, "parameters", tuple)()
        training = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, weights, *parameters))
        if self.shared_batch and not training:
            return AllReduceEP, "no gradient can flow and the batch is shared"
        if self._exchange is None:
            self._exchange = choose_exchange(self.group, self.config)
        return self._exchange


def choose_exchange(group: dist.ProcessGroup, config: EpConfig) -> tuple[type[EPImplementation], str]:
    """``copy_engine`` or ``all_to_all``, and why. Collective over the group."""
    ranks, topk = group.size(), config.num_topk
    if ranks > 2 * topk:
        return AllToAllEP, f"{ranks} ranks for {topk} experts a token: padded rows would be mostly empty"
    if config.max_tokens_per_rank is None and config.overflow != "grow":
        return AllToAllEP, "the number of tokens has no bound and buffers may not grow"
    reads = config.overflow != "drop" or config.recv_capacity_per_rank is None
    if reads and ranks == 2 and symmetric.backend_of(group) == "nccl":
        return AllToAllEP, "2 ranks whose hosts read counts in every layer: exact splits took 0.84 to 1.08 of the time"
    try:
        shared_context(group, config, CopyEngineEP.transport)
    except (SymmMemMemoryError, SymmMemUnavailableError) as error:  # the same on every rank
        return AllToAllEP, f"no symmetric memory: {error}"
    return CopyEngineEP, f"{ranks} ranks for {topk} experts a token, symmetric memory"
