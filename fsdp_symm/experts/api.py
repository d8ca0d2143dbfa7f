"""Expert parallelism as functions: bootstrap once, then prepare, dispatch and combine in every step.

The names and shapes are those of Transformer Engine's ``ep`` module; arguments are keywords. The differences are listed
in ``docs/experts.md``. Legend as in :mod:`fsdp_symm.experts.routing`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.experts import ops, symmetric
from fsdp_symm.experts.config import EpConfig, Overflow, check_alignment, check_capacity, check_dtype, refuse
from fsdp_symm.experts.context import EpContext, Routing, close_shared
from fsdp_symm.experts.registry import check_answers, check_batch, check_ids, check_tensor

_current: EpContext | None = None


def ep_bootstrap(
    *,
    ep_group: dist.ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    rows_per_peer: int | None = None,
    overflow: Overflow = "raise",
    transport: str = "copy_engine",
    max_token_dtype: torch.dtype = torch.bfloat16,
    timeout_s: float = 60.0,
) -> None:
    """Set up expert parallelism in this process. Once, and collective over the group; every argument is the same on
    all ranks.

    Args:
        ep_group: the ranks that share the experts, at least 2.
        transport: see :class:`fsdp_symm.experts.context.EpContext`.
        max_token_dtype: the widest payload type of any :class:`EpBuffer`.
        num_experts, max_tokens_per_rank, hidden_dim, num_topk, recv_capacity_per_rank, rows_per_peer, overflow,
            timeout_s: see :class:`fsdp_symm.experts.config.EpConfig`.

    Raises:
        SymmMemError: it is set up already.
        SymmMemConfigError: a size that makes no sense.
        SymmMemMemoryError: symmetric memory could not be had (raised on all ranks).
    """
    global _current
    if is_ep_bootstrapped():
        raise SymmMemError(
            problem(
                "ep_bootstrap: expert parallelism is set up already",
                found=repr(_current),
                expected="one bootstrap a process",
                fix="call ep_finalize() first, on every rank",
            )
        )
    if ep_group.size() < 2:
        refuse("ep_bootstrap: ep_group", found="1 rank", expected="at least 2", fix="call the experts directly")
    config = EpConfig(
        num_experts=num_experts,
        num_topk=num_topk,
        hidden_dim=hidden_dim,
        payload_dtype=max_token_dtype,
        max_tokens_per_rank=max_tokens_per_rank,
        rows_per_peer=rows_per_peer,
        recv_capacity_per_rank=recv_capacity_per_rank,
        overflow=overflow,
        timeout_s=timeout_s,
    )
    _current = EpContext(ep_group, config, transport)


def is_ep_bootstrapped() -> bool:
    """Whether :func:`ep_bootstrap` was called, and its group is still there."""
    return _current is not None and not _current.closed and compat.group_is_alive(_current.group)


def ep_finalize() -> None:
    """Give back everything that this module, the implementations and :func:`symm_mem_alloc` hold; nothing to give back
    is fine. Collective; call it before ``destroy_process_group()``."""
    global _current
    context, _current = _current, None
    with contextlib.ExitStack() as stack:  # one failure does not keep the others
        stack.callback(symmetric.close_all)
        stack.callback(close_shared)
        if context is not None and compat.group_is_alive(context.group):
            stack.callback(context.close)


def _context() -> EpContext:
    if _current is None or not is_ep_bootstrapped():
        raise SymmMemError(
            problem(
                "expert parallelism is not set up",
                found="no ep_bootstrap(), or its process group was destroyed",
                expected="ep_bootstrap() on every rank of the expert group",
                fix="call ep_bootstrap(ep_group=..., ...) after init_process_group",
            )
        )
    return _current


class EpBuffer:
    """The routing of one microbatch in flight. Rows lie in ordinary tensors and in slots that all buffers share, so a
    buffer costs nothing; it may be used again once its combine was called.

    Args:
        recv_capacity_per_rank: M; by default the bootstrap's. Without either, as many rows as a step needs.
        alignment: rows of an expert are padded to a multiple of it; 0 and 1: not at all.
        payload_dtype: type of the tokens, by default the bootstrap's; at most as wide.

    Attributes:
        tokens_per_expert: int64 ``[L]``, padded rows of each local expert.
        total_recv_tokens: int64 ``[1]``, rows this rank needed, before any drop.
        dropped: int64 ``[1]``, routes to this rank's experts that were dropped. All three are on the tokens' device.

    Raises:
        SymmMemError: before :func:`ep_bootstrap`.
        SymmMemConfigError: an alignment, capacity or type that is not served.
    """

    def __init__(
        self,
        *,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 1,
        payload_dtype: torch.dtype | None = None,
    ) -> None:
        self.context = _context()
        config = self.context.config
        self.alignment = 1 if alignment == 0 else alignment
        check_alignment(self.alignment)
        self.capacity = config.recv_capacity_per_rank if recv_capacity_per_rank is None else recv_capacity_per_rank
        check_capacity(self.capacity, self.alignment)
        self.payload_dtype = payload_dtype or config.payload_dtype
        check_dtype(self.payload_dtype)
        if self.payload_dtype.itemsize > config.payload_dtype.itemsize:
            refuse(
                "EpBuffer: payload_dtype",
                found=self.payload_dtype,
                expected=f"at most {config.payload_dtype.itemsize} bytes an element (max_token_dtype)",
                fix=f"ep_bootstrap(max_token_dtype={self.payload_dtype})",
            )
        self.routing: Routing | None = None

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        return current_routing(self).counts

    @property
    def total_recv_tokens(self) -> torch.Tensor:
        return current_routing(self).total

    @property
    def dropped(self) -> torch.Tensor:
        return current_routing(self).dropped


def current_routing(buffer: EpBuffer) -> Routing:
    """The routing of the buffer's last prepare.

    Raises:
        SymmMemError: there was none.
    """
    if buffer.routing is None:
        raise SymmMemError(
            problem(
                "EpBuffer: no routing yet",
                found="a combine or a count before any dispatch",
                expected="ep_prepare or ep_dispatch first",
                fix="use the buffer that the tokens were dispatched with",
            )
        )
    return buffer.routing


def ep_prepare(buffer: EpBuffer, topk_idx: torch.Tensor) -> torch.Tensor:
    """Exchange expert ids and lay out the rows that will come. Collective; may run early, beside other work.

    Args:
        buffer: holds the routing afterwards.
        topk_idx: int32 or int64 ``[T, K]``, global expert ids, negative: masked. T may differ between ranks and calls.

    Returns:
        int64 ``[L]``: rows of each local expert, padded to the alignment.

    Raises:
        SymmMemConfigError: shape or type; more tokens than ``max_tokens_per_rank`` under ``"drop"``.
        SymmMemError: no room under ``"raise"``, or ids out of range; on every rank.
    """
    check_ids(topk_idx, buffer.context.config)
    buffer.routing = Routing(*ops.prepare(topk_idx, buffer.context.key, buffer.alignment, buffer.capacity))
    return buffer.routing.counts


def ep_dispatch(
    buffer: EpBuffer,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor,
    *,
    recv_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to their experts. Collective, differentiable.

    Args:
        buffer: of this microbatch.
        tokens: ``[T, H]`` of the buffer's payload type; read in place by the peers if it is a tensor of
            :func:`symm_mem_alloc`.
        topk_idx: as for :func:`ep_prepare`, which is done here; ``None``: the buffer is prepared already.
        topk_weights: fp32 ``[T, K]``.
        recv_tokens: where to write the rows, ``[M, H]``, the same tensor in every step if you like; the result shares
            its memory and takes part in autograd.

    Returns:
        ``recv_tokens [M, H]``, expert-major, padding zero; ``recv_topk_weights`` fp32 ``[M]``; ``tokens_per_expert``.

    Raises:
        SymmMemConfigError, SymmMemError: as :func:`ep_prepare`.
    """
    expected = buffer.context.config, buffer.payload_dtype
    check_tensor("tokens", tokens)
    check_tensor("topk_weights", topk_weights)
    if topk_idx is None:
        known = current_routing(buffer).home.shape[0], buffer.context.config.num_topk
        check_batch(tokens, tokens.new_empty(known, dtype=torch.int64), topk_weights, *expected)
    else:
        check_batch(tokens, topk_idx, topk_weights, *expected)
        ep_prepare(buffer, topk_idx)
    found = current_routing(buffer)
    path = found.home, found.table, found.source, found.slots
    if recv_tokens is None:
        rows, weights = ops.dispatch(tokens, topk_weights, *path, buffer.context.key)
    else:
        _check_recv(recv_tokens, tokens, found.source.shape[0])
        rows, weights = ops.dispatch_into(recv_tokens, tokens, topk_weights, *path, buffer.context.key)
    return rows, weights, found.counts


def ep_combine(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    *,
    recv_topk_weights: torch.Tensor | None = None,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Bring the experts' answers home and sum them for each token. Collective, differentiable.

    Args:
        buffer: of this microbatch.
        expert_out: ``[M, H]``, what the experts made of the rows; padding and tail rows are not read.
        recv_topk_weights: fp32 ``[M]`` from :func:`ep_dispatch`, to weight the answers here; ``None``: they contain the
            weights already, or need none.
        routing: of an earlier dispatch (``buffer.routing`` at that time), when the buffer was used again since.

    Returns:
        ``[T, H]``.

    Raises:
        SymmMemError: nothing was dispatched.
        SymmMemConfigError: ``expert_out`` or the weights do not belong to that dispatch.
    """
    found = current_routing(buffer) if routing is None else routing
    num_rows = found.source.shape[0]
    shape = num_rows, buffer.context.config.hidden_dim
    check_answers(expert_out, torch.empty(shape, dtype=buffer.payload_dtype, device="meta"), found.source.device)
    if recv_topk_weights is not None:
        _check_recv_weights(recv_topk_weights, num_rows, expert_out.device)
    path = found.home, found.table, found.source, found.slots
    return ops.combine(expert_out, recv_topk_weights, None, *path, buffer.context.key)[0]


def _check_recv_weights(weights: torch.Tensor, num_rows: int, device: torch.device) -> None:
    check_tensor("recv_topk_weights", weights)
    if weights.shape != (num_rows,) or weights.dtype != torch.float32 or weights.device != device:
        refuse(
            "ep_combine: recv_topk_weights",
            found=f"{weights.dtype} {list(weights.shape)} on {weights.device}",
            expected=f"torch.float32 [{num_rows}] on {device}, as ep_dispatch returned them",
            fix="pass the weights of the same dispatch",
        )


def _check_recv(recv_tokens: torch.Tensor, tokens: torch.Tensor, num_rows: int) -> None:
    check_tensor("recv_tokens", recv_tokens)
    good = recv_tokens.shape == (num_rows, tokens.shape[1]) and recv_tokens.dtype == tokens.dtype
    good = good and recv_tokens.device == tokens.device
    if not good or not recv_tokens.is_contiguous() or recv_tokens.requires_grad:
        refuse(
            "ep_dispatch: recv_tokens",
            found=f"{recv_tokens.dtype} {list(recv_tokens.shape)} on {recv_tokens.device}, "
            f"strides {list(recv_tokens.stride())}" + (", requires grad" if recv_tokens.requires_grad else ""),
            expected=f"a contiguous {tokens.dtype} [{num_rows}, {tokens.shape[1]}] on {tokens.device} that requires no"
            " grad",
            fix="allocate it with recv_capacity_per_rank rows, and set that capacity",
        )
