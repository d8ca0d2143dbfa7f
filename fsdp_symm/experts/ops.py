"""The three operators of expert parallelism: ``prepare``, and ``dispatch`` and ``combine``, each other's transpose.

They return fresh tensors and change none of their arguments, so a compiler may hold them in one graph; the backward of
each is a call of the other, taken with the routing that its forward used. Weight gradients travel home as a second part
of a combine, in fp32.

Legend as in :mod:`fsdp_symm.experts.routing`. ``key`` names the :class:`fsdp_symm.experts.context.EpContext`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_symm.experts.context import context_of
from fsdp_symm.experts.exchange import PartSpec
from fsdp_symm.experts.routing import gather_routes, gather_rows, sum_rows, weigh_rows

_Many = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("fsdp_symm_ep::prepare", mutates_args=())
def prepare(ids: torch.Tensor, key: str, alignment: int, capacity: int | None) -> _Many:
    """``[T, K]`` expert ids -> the fields of :class:`fsdp_symm.experts.context.Routing`."""
    return tuple(context_of(key).prepare(ids, alignment, capacity))  # type: ignore[return-value]  # seven of them


@prepare.register_fake
def _(ids: torch.Tensor, key: str, alignment: int, capacity: int | None) -> _Many:
    context = context_of(key)
    ranks = 1 if context.transport == "local" else context.group.size()
    dynamic = torch.library.get_ctx().new_dynamic_size
    exact_rows = capacity is not None and context.config.overflow != "grow"
    num_expert_rows = capacity if exact_rows else dynamic()
    if context.transport == "local":
        num_rows = ids.shape[0]
    else:
        num_rows = context.padded_rows if context.padded_rows is not None else dynamic()

    def empty(*shape: Any, device: Any = ids.device) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    table_device = "cpu" if context.exchange.exact else ids.device
    return (
        empty(ids.shape[0], ranks),
        empty(ranks, ranks + context.config.num_experts + 1, device=table_device),
        empty(context.num_local),
        empty(num_expert_rows),
        empty(num_rows, ids.shape[1]),
        empty(1),
        empty(1),
    )


def _receive(
    received: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    home: torch.Tensor,
    table: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    key: str,
) -> torch.Tensor:
    """Fill ``received [M, H]`` with the rows of this rank's experts; returns the weights, ``[M]`` or ``[0]``."""
    context = context_of(key)
    parts = [tokens] if weights is None else [tokens, weights]
    rows, *rest = context.exchange.to_experts(parts, home, context.layout(slots.shape[0], table))
    if rest:
        return gather_routes(rows, rest[0], source, out=received)
    gather_rows(rows, source, divisor=slots.shape[1], out=received)
    return tokens.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("fsdp_symm_ep::dispatch", mutates_args=())
def dispatch(
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    home: torch.Tensor,
    table: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, H]`` tokens and fp32 ``[T, K]`` weights -> expert-major ``[M, H]`` and ``[M]`` (``[0]`` without weights).

    Padding and tail rows are zero.
    """
    received = tokens.new_empty((source.shape[0], tokens.shape[1]))
    return received, _receive(received, tokens, weights, home, table, source, slots, key)


@dispatch.register_fake
def _(
    tokens: torch.Tensor, weights: torch.Tensor | None, home: object, table: object, source: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tokens.new_empty((source.shape[0], tokens.shape[1]))
    return rows, tokens.new_empty(0 if weights is None else source.shape[0], dtype=torch.float32)


@torch.library.custom_op("fsdp_symm_ep::combine", mutates_args=())
def combine(
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    extra: torch.Tensor | None,
    home: torch.Tensor,
    table: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert-major ``[M, H]`` -> ``[T, H]``: rows of a token are summed, times ``scale [M]`` if given.

    The experts' rank sums its own rows in fp32 and sends one row a token, the token's rank sums the ranks' in fp32.
    ``extra`` fp32 ``[M]`` goes home unsummed, as ``[T, K]`` (``[T, 0]`` when not given). Padding rows are not read.
    """
    context = context_of(key)
    layout = context.layout(slots.shape[0], table)
    specs = [PartSpec(rows.shape[1], rows.dtype, rows.device)]
    if extra is not None:
        specs.append(PartSpec(slots.shape[1], torch.float32, rows.device))

    def write(parts: list[torch.Tensor]) -> None:
        sum_rows(rows, slots, scale=scale, out=parts[0])
        if extra is not None:
            gather_rows(extra.unsqueeze(1), slots.flatten(), out=parts[1].view(-1, 1))

    answers = context.exchange.to_homes(specs, write, layout)
    tokens, *rest = [sum_rows(answer, home) for answer in answers]
    return tokens, rest[0] if rest else tokens.new_empty((home.shape[0], 0), dtype=torch.float32)


@combine.register_fake
def _(
    rows: torch.Tensor,
    scale: object,
    extra: torch.Tensor | None,
    home: torch.Tensor,
    table: object,
    source: object,
    slots: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = 0 if extra is None else slots.shape[1]
    return (
        rows.new_empty((home.shape[0], rows.shape[1])),
        rows.new_empty((home.shape[0], width), dtype=torch.float32),
    )


# --- gradients ---------------------------------------------------------------------------------------------


@torch.library.custom_op("fsdp_symm_ep::weigh", mutates_args=())
def _weigh(
    grads: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, source: torch.Tensor, with_dots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fsdp_symm.experts.routing.weigh_rows`, which compilers need not look into."""
    return weigh_rows(grads, rows, scale, source, with_dots=with_dots)


@_weigh.register_fake
def _(
    grads: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, source: torch.Tensor, with_dots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return grads.new_empty(grads.shape), grads.new_empty(grads.shape[0] if with_dots else 0, dtype=torch.float32)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tokens, _, *routing, ctx.key = inputs
    ctx.save_for_backward(*routing)
    ctx.like = tokens.dtype, tokens.shape[1]
    ctx.set_materialize_grads(False)


def _send_home(
    ctx: Any, grad_tokens: torch.Tensor | None, grad_weights: torch.Tensor | None, with_weights: bool
) -> tuple[torch.Tensor | None, ...]:
    home, table, source, slots = ctx.saved_tensors
    dtype, width = ctx.like
    # Whatever of its outputs this rank's loss has used, the peers wait for both parts.
    if grad_tokens is None:
        grad_tokens = torch.zeros((source.shape[0], width), dtype=dtype, device=source.device)
    if with_weights and grad_weights is None:
        grad_weights = torch.zeros(source.shape[0], dtype=torch.float32, device=source.device)
    extra = grad_weights if with_weights else None
    tokens, weights = combine(grad_tokens, None, extra, home, table, source, slots, ctx.key)
    return tokens, weights if with_weights else None, None, None, None, None, None


def _dispatch_backward(
    ctx: Any, grad_tokens: torch.Tensor | None, grad_weights: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return _send_home(ctx, grad_tokens, grad_weights, ctx.needs_input_grad[1])


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    rows, scale, _, *routing, ctx.key = inputs
    ctx.like = rows.dtype, rows.shape[1]
    ctx.weighted = scale is not None
    ctx.save_for_backward(*routing, *([] if scale is None else [rows, scale]))
    ctx.set_materialize_grads(False)


def _combine_backward(
    ctx: Any, grad_tokens: torch.Tensor | None, grad_extra: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    home, table, source, slots, *weighting = ctx.saved_tensors
    dtype, width = ctx.like
    if grad_tokens is None:
        grad_tokens = torch.zeros((home.shape[0], width), dtype=dtype, device=home.device)
    extra = grad_extra if ctx.needs_input_grad[2] else None
    if ctx.needs_input_grad[2] and extra is None:  # the peers wait for it, whatever this rank's loss has used
        extra = torch.zeros((home.shape[0], slots.shape[1]), dtype=torch.float32, device=home.device)
    grads, extra_grad = dispatch(grad_tokens, extra, home, table, source, slots, ctx.key)
    grad_rows, grad_scale = grads, None
    if ctx.weighted:
        # A kernel has no derivative; second ones go through the operators of torch.
        weigh = weigh_rows if torch.is_grad_enabled() else _weigh
        rows, scale = weighting
        grad_rows, dots = weigh(grads, rows, scale, source, with_dots=ctx.needs_input_grad[1])
        grad_scale = dots if ctx.needs_input_grad[1] else None
    return grad_rows, grad_scale, extra_grad if extra is not None else None, None, None, None, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
combine.register_autograd(_combine_backward, setup_context=_save_combine)


# --- shared batches: every rank holds the same tokens and computes the same loss ---------------------------


@torch.library.custom_op("fsdp_symm_ep::sum_outputs", mutates_args=())
def sum_outputs(partial: torch.Tensor, key: str) -> torch.Tensor:
    """Sum over the group in fp32; the gradient of a shared result is shared already, so backward is the identity."""
    total = partial.to(torch.promote_types(partial.dtype, torch.float32), copy=True)
    dist.all_reduce(total, group=context_of(key).group)
    return total.to(partial.dtype)


@sum_outputs.register_fake
def _(partial: torch.Tensor, key: str) -> torch.Tensor:
    return torch.empty_like(partial)


sum_outputs.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None)


class _SumGradients(torch.autograd.Function):
    """Identity; backward sums over the group, since each rank sees the part of the gradient of its own experts."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, key: str) -> torch.Tensor:
        ctx.key = key
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_outputs(grads[0], ctx.key), None


def sum_gradients(shared: torch.Tensor, key: str) -> torch.Tensor:
    """Let the gradient of a tensor that all ranks share be summed over them; free where none can flow."""
    if not (torch.is_grad_enabled() and shared.requires_grad):
        return shared
    result: torch.Tensor = _SumGradients.apply(shared, key)  # type: ignore[assignment]  # its stub knows no types
    return result


# --- into the caller's memory --------------------------------------------------------------------------------


@torch.library.custom_op("fsdp_symm_ep::dispatch_out", mutates_args={"received"})
def _dispatch_out(
    received: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    home: torch.Tensor,
    table: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    key: str,
) -> torch.Tensor:
    """:func:`dispatch` with its rows written into ``received [M, H]``; returns the weights."""
    return _receive(received, tokens, weights, home, table, source, slots, key)


@_dispatch_out.register_fake
def _(
    received: object,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    home: object,
    table: object,
    source: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return tokens.new_empty(0 if weights is None else source.shape[0], dtype=torch.float32)


class _DispatchInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _save_dispatch(ctx, inputs, ())
        weights = _dispatch_out(received, *inputs)
        return received, weights  # not marked dirty: the caller's own tensor stays outside the graph, for the next step

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_send_home(ctx, grads[0], grads[1], ctx.needs_input_grad[2])


def dispatch_into(received: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`dispatch` into the caller's ``[M, H]``, which is returned; takes part in autograd like a fresh result."""
    result: tuple[torch.Tensor, torch.Tensor] = _DispatchInto.apply(received, *inputs)  # type: ignore[assignment]
    return result
