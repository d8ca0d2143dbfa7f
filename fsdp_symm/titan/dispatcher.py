"""torchtitan's token dispatcher over the exchanges of :mod:`fsdp_symm.experts`.

Shapes as in ``torchtitan.models.common.moe``: T tokens of a rank, D width, K experts a token, E experts, e experts of
this rank, R rows that this rank's experts get.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalDispatchMetadata, LocalTokenDispatcher

from fsdp_symm.experts import EpConfig, EPImplementationInterface, ops
from fsdp_symm.experts.auto import choose_exchange
from fsdp_symm.experts.config import Overflow, refuse
from fsdp_symm.experts.context import EpContext, Routing, shared_context
from fsdp_symm.experts.registry import ContextEP, check_batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExchangeMetadata:
    """What ``combine`` needs of its ``dispatch``: whose buffers, the way home, the router's weight of each row."""

    key: str
    routing: Routing
    row_weights: torch.Tensor


class ExchangeTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine of one MoE layer; layers of one shape share their buffers.

    Weights are applied, and rows of a token summed, in fp32; torchtitan's own dispatchers round in between. Without
    expert parallelism (no EP mesh) it is torchtitan's local dispatcher.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """As :class:`fsdp_symm.experts.EpConfig`; numbers that do not depend on the process group."""

        hidden_dim: int
        implementation: str
        payload_dtype: str
        overflow: Overflow = "grow"
        max_tokens_per_rank: int | None = None
        rows_per_peer: int | None = None
        recv_capacity_per_rank: int | None = None
        timeout_s: float = 60.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._contexts: dict[torch.dtype, EpContext] = {}

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Keep the EP mesh, and take the buffers for the expected type of tokens. Collective over the mesh."""
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """The buffers that the first call would take otherwise; none without an EP mesh."""
        if self.ep_mesh is not None:
            self._context(self.ep_mesh, getattr(torch, self._config.payload_dtype))

    def _context(self, mesh: DeviceMesh, dtype: torch.dtype) -> EpContext:
        if dtype not in self._contexts:
            self._contexts[dtype] = self._make_context(mesh, dtype)
        return self._contexts[dtype]

    def _make_context(self, mesh: DeviceMesh, dtype: torch.dtype) -> EpContext:
        group, wanted = mesh.get_group(), self._config
        config = EpConfig(
            num_experts=self.num_experts,
            num_topk=self.top_k,
            hidden_dim=wanted.hidden_dim,
            payload_dtype=dtype,
            max_tokens_per_rank=wanted.max_tokens_per_rank,
            rows_per_peer=wanted.rows_per_peer,
            recv_capacity_per_rank=wanted.recv_capacity_per_rank,
            overflow=wanted.overflow,
            timeout_s=wanted.timeout_s,
        )
        if wanted.implementation == "auto":
            chosen, reason = choose_exchange(group, config)
            _say(f"expert_parallel: auto chose {chosen.__name__} ({reason})")
        else:
            chosen = EPImplementationInterface.get(wanted.implementation)
        if not issubclass(chosen, ContextEP):
            refuse(
                "expert_parallel.implementation",
                found=f"{wanted.implementation!r} ({chosen.__name__}), which has no dispatch and combine of its own",
                expected="an implementation that exchanges tokens",
                fix="use 'copy_engine', 'copy_engine_exact', 'all_to_all' or 'auto'",
            )
        return shared_context(group, config, chosen.transport)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, ExchangeMetadata | LocalDispatchMetadata]:
        """``[T, D]`` tokens, fp32 or other ``[T, K]`` scores, ``[T, K]`` global expert ids -> ``[R, D]`` rows by local
        expert, ``[e]`` rows of each, and what ``combine`` needs. Collective, differentiable."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        context = self._context(self.ep_mesh, x_TD.dtype)
        scores = topk_scores_TK.float()
        check_batch(x_TD, topk_expert_ids_TK, scores, context.config, x_TD.dtype)
        capacity = context.config.recv_capacity_per_rank
        routing = Routing(*ops.prepare(topk_expert_ids_TK, context.key, context.config.alignment, capacity))
        rows, weights = ops.dispatch(x_TD, scores, *_path(routing), context.key)
        return rows, routing.counts, ExchangeMetadata(key=context.key, routing=routing, row_weights=weights)

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: Any,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """``[R, D]`` answers -> ``[T, D]``, weighted and summed for each token. Collective, differentiable."""
        answers = routed_output_RD.to(x_TD.dtype)  # gpt_oss computes in bfloat16 whatever it is given
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, answers, metadata, x_TD)
        path = _path(metadata.routing)
        return ops.combine(answers, metadata.row_weights, None, *path, metadata.key)[0]


@functools.cache
def _say(text: str) -> None:
    """Log a line once, though every layer has it to say."""
    logger.info(text)


def _path(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return routing.home, routing.table, routing.source, routing.slots
