"""Rows before their experts, by kernels: a stable counting sort of the routes, without a value read on the host.

Routes are counted in blocks, the counts of each expert are summed up over the blocks, and every route then knows its
row: where its expert's zone starts, what earlier blocks have put there, and its turn within its block.

Legend as in :mod:`fsdp_symm.experts.routing`. A route is a number ``row * K + k``, and all of them fit in int32.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (triton's stubs know no constexpr where a dtype is wanted, take a sum for a tuple, and know no launch options)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdp_symm.experts.routing import Arrangement
from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import ceil_div

_BLOCK = 128  # routes, and rows, that one program places
_CHUNK = 32  # experts, or routes, that a block is compared with at a time
_SCAN = 1024  # blocks whose counts are summed up at a time
_LIMIT = 2**30  # routes and rows that int32 has room for, with some to spare
_WARPS = 4


@triton.jit
def _keys(
    ids,  # noqa: ANN001 - int [N, K]
    at,  # noqa: ANN001 - routes
    num_routes,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    first_expert,  # noqa: ANN001
    K: tl.constexpr,
    LOCAL: tl.constexpr,
) -> tl.tensor:
    """The local expert of each route, LOCAL: none."""
    place = ids + (at // K).to(tl.int64) * row_stride + (at % K).to(tl.int64) * k_stride
    expert = tl.load(place, mask=at < num_routes, other=-1).to(tl.int64)
    mine = (expert >= first_expert) & (expert < first_expert + LOCAL)
    return tl.where(mine, expert - first_expert, LOCAL).to(tl.int32)


@triton.jit(do_not_specialize=["num_routes", "first_expert"])
def _count_kernel(
    ids,  # noqa: ANN001 - int [N, K]
    work,  # noqa: ANN001 - int32 [1 + blocks, L] as [L], and [L, blocks]: routes of each expert in all and in a block
    num_routes,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    first_expert,  # noqa: ANN001
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    key = _keys(ids, at, num_routes, row_stride, k_stride, first_expert, K, LOCAL)
    for start in range(0, LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        found = tl.sum((key[:, None] == expert[None, :]).to(tl.int32), axis=0)
        place = work + LOCAL + expert.to(tl.int64) * tl.num_programs(0) + block
        tl.store(place, found, mask=expert < LOCAL)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    work,  # noqa: ANN001 - as above; afterwards: routes of the expert in earlier blocks
    blocks,  # noqa: ANN001
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    counts = work + LOCAL + expert.to(tl.int64) * blocks
    before = 0
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(counts + at, mask=at < blocks, other=0)
        tl.store(counts + at, before + tl.cumsum(found) - found, mask=at < blocks)
        before += tl.sum(found)
    tl.store(work + expert, before)


@triton.jit
def _turns(
    key,  # noqa: ANN001
    at,  # noqa: ANN001
    ids,  # noqa: ANN001
    first_route,  # noqa: ANN001
    num_routes,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    first_expert,  # noqa: ANN001
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """How many earlier routes of the block have the same expert."""
    turn = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, BLOCK, CHUNK):
        other = first_route + start + tl.arange(0, CHUNK)
        keys = _keys(ids, other, num_routes, row_stride, k_stride, first_expert, K, LOCAL)
        same = (key[:, None] == keys[None, :]) & (other[None, :] < at[:, None])
        turn += tl.sum(same.to(tl.int32), axis=1)
    return turn


@triton.jit
def _store_needs(
    wanted,  # noqa: ANN001 - int [SENDERS, L], routes to each expert
    kept,  # noqa: ANN001 - routes that got a row
    total,  # noqa: ANN001 - int64 [1]
    dropped,  # noqa: ANN001 - int64 [1]
    sender_stride,  # noqa: ANN001
    SENDERS: tl.constexpr,
    LOCAL: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    rows = tl.zeros((CHUNK,), dtype=tl.int64)
    routes = tl.zeros((CHUNK,), dtype=tl.int64)
    for start in range(0, LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        real = tl.zeros((CHUNK,), dtype=tl.int64)
        for sender in range(SENDERS):
            real += tl.load(wanted + sender * sender_stride + expert, mask=expert < LOCAL, other=0).to(tl.int64)
        rows += (real + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        routes += real
    tl.store(total, tl.sum(rows))
    tl.store(dropped, tl.sum(routes) - kept)


@triton.jit(do_not_specialize=["num_routes", "num_rows", "first_expert", "blocks"])
def _place_kernel(
    ids,  # noqa: ANN001 - int [N, K]
    work,  # noqa: ANN001 - as above
    slots,  # noqa: ANN001 - int64 [N, K]
    source,  # noqa: ANN001 - int64 [M]
    counts,  # noqa: ANN001 - int64 [L]
    wanted,  # noqa: ANN001 - int [SENDERS, L], routes to each expert
    total,  # noqa: ANN001 - int64 [1]
    dropped,  # noqa: ANN001 - int64 [1]
    num_routes,  # noqa: ANN001
    num_rows,  # noqa: ANN001 - M
    row_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    first_expert,  # noqa: ANN001
    blocks,  # noqa: ANN001
    sender_stride,  # noqa: ANN001
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SENDERS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)  # routes, and then rows
    key = _keys(ids, at, num_routes, row_stride, k_stride, first_expert, K, LOCAL)
    row = _turns(key, at, ids, block * BLOCK, num_routes, row_stride, k_stride, first_expert, K, LOCAL, BLOCK, CHUNK)
    mine = key < LOCAL
    row += tl.load(work + LOCAL + key.to(tl.int64) * blocks + block, mask=mine, other=0)
    taken = tl.zeros((BLOCK,), dtype=tl.int32)
    end = 0
    kept = 0
    for start in range(0, LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        real = tl.load(work + expert, mask=expert < LOCAL, other=0)
        padded = (real + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        ends = end + tl.cumsum(padded)
        starts = ends - padded
        row += tl.sum(tl.where(key[:, None] == expert[None, :], starts[None, :], 0), axis=1)
        in_use = (at[:, None] >= starts[None, :]) & (at[:, None] < (starts + real)[None, :])
        taken += tl.sum(in_use.to(tl.int32), axis=1)
        room = tl.minimum(ends, num_rows) - tl.minimum(starts, num_rows)
        kept += tl.sum(tl.minimum(room, real))
        tl.store(counts + expert, room.to(tl.int64), mask=expert < tl.where(block == 0, LOCAL, 0))
        end += tl.sum(padded)
    if block == 0:
        _store_needs(wanted, kept, total, dropped, sender_stride, SENDERS, LOCAL, ALIGNMENT, CHUNK)
    row = tl.where(mine & (row < num_rows), row, -1)
    tl.store(slots + at, row.to(tl.int64), mask=at < num_routes)
    tl.store(source + row, at.to(tl.int64), mask=row >= 0)
    tl.store(source + at, tl.full((BLOCK,), -1, tl.int64), mask=(at < num_rows) & (taken == 0))


def arrangeable(ids: torch.Tensor, num_local: int, alignment: int, capacity: int | None) -> bool:
    """Whether all routes and rows have numbers in int32."""
    return max(ids.numel() + num_local * alignment, capacity or 0) <= _LIMIT


def arrange(
    ids: torch.Tensor,
    first_expert: int,
    num_local: int,
    alignment: int,
    capacity: int | None,
    wanted: torch.Tensor | None,
) -> Arrangement:
    """:func:`fsdp_symm.experts.routing.arrange`: three launches, six allocations."""
    num_routes, topk = ids.numel(), max(ids.shape[1], 1)
    blocks = ceil_div(num_routes, _BLOCK)
    work = torch.empty((1 + blocks) * num_local, dtype=torch.int32, device=ids.device)
    sizes = {"K": topk, "LOCAL": num_local, "BLOCK": _BLOCK, "CHUNK": _CHUNK}
    device, strides = ids.get_device(), ids.stride()
    if blocks:
        launch(
            _count_kernel, (blocks,), device, ids, work, num_routes, *strides, first_expert, **sizes, num_warps=_WARPS
        )
    launch(_scan_kernel, (num_local,), device, work, blocks, LOCAL=num_local, BLOCK=_SCAN, num_warps=_WARPS)
    if capacity is None:
        capacity = sum(-(-real // alignment) * alignment for real in work[:num_local].tolist())
    slots = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    source = torch.empty(capacity, dtype=torch.int64, device=ids.device)
    counts, total, dropped = (torch.empty(n, dtype=torch.int64, device=ids.device) for n in (num_local, 1, 1))
    if wanted is None:
        wanted = work[:num_local].unsqueeze(0)
    wanted = wanted if wanted.stride(1) == 1 else wanted.contiguous()
    launch(
        _place_kernel,
        (max(blocks, ceil_div(capacity, _BLOCK), 1),),
        device,
        ids,
        work,
        slots,
        source,
        counts,
        wanted,
        total,
        dropped,
        num_routes,
        capacity,
        *strides,
        first_expert,
        blocks,
        wanted.stride(0),
        **sizes,
        ALIGNMENT=alignment,
        SENDERS=wanted.shape[0],
        num_warps=_WARPS,
    )
    return Arrangement(counts, source, slots, total, dropped)
