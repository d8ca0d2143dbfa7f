"""Which token goes to which rank, by kernels: counts in blocks of tokens, then the row of every (token, rank).

Legend as in :mod:`fsdp_symm.experts.routing`. A block is so many tokens that their ids make one tile.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (triton's stubs know no constexpr where a dtype is wanted, take a sum for a tuple, and know no launch options)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdp_symm.experts.routing import Route
from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import ceil_div, power_of_two

_TILE = 512  # ids of a block
_CHUNK = 16  # experts that a block is compared with at a time; facts that one program sums up
_BLOCKS = 64  # blocks whose counts are summed up at a time
_FLAT = 1024  # elements of a program that handles them one by one
_WARPS = 4


@triton.jit
def _load_ids(
    ids,  # noqa: ANN001 - int [T, K]
    token,  # noqa: ANN001
    num_tokens,  # noqa: ANN001
    token_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # K, or the next power of two
) -> tl.tensor:
    """int64 ``[tokens, WIDTH]``, -1 where there is none."""
    k = tl.arange(0, WIDTH)
    place = ids + token.to(tl.int64)[:, None] * token_stride + k.to(tl.int64)[None, :] * k_stride
    return tl.load(place, mask=(token < num_tokens)[:, None] & (k < K)[None, :], other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    ids,  # noqa: ANN001 - int [T, K]
    work,  # noqa: ANN001 - int32 [R + E + 1, blocks]: tokens for each rank, routes to each expert, ids of E or more
    narrowed,  # noqa: ANN001 - int32 [T, K]
    num_tokens,  # noqa: ANN001 - T
    token_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_ids(ids, token, num_tokens, token_stride, k_stride, K, WIDTH)
    valid = (expert >= 0) & (expert < EXPERTS)
    tl.store(work + (RANKS + EXPERTS) * blocks + block, tl.sum(tl.sum((expert >= EXPERTS).to(tl.int32), axis=1)))
    expert = tl.where(valid, expert, -1).to(tl.int32)
    k = tl.arange(0, WIDTH)
    place = narrowed + token.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(place, expert, mask=(token < num_tokens)[:, None] & (k < K)[None, :])
    owner = tl.where(valid, expert // (EXPERTS // RANKS), RANKS)
    for rank in range(RANKS):
        wanted = tl.max((owner == rank).to(tl.int32), axis=1)
        tl.store(work + rank * blocks + block, tl.sum(wanted))
    flat = tl.reshape(expert, (BLOCK * WIDTH,))
    for start in range(0, EXPERTS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        found = tl.sum((flat[:, None] == other[None, :]).to(tl.int32), axis=0)
        tl.store(work + (RANKS + other) * blocks + block, found, mask=other < EXPERTS)


@triton.jit
def _sum_facts(
    work,  # noqa: ANN001 - as above
    facts,  # noqa: ANN001 - int64 [R + E + 1]
    part,  # noqa: ANN001 - which CHUNK of them
    num_tokens,  # noqa: ANN001
    blocks,  # noqa: ANN001
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    fact = part * CHUNK + tl.arange(0, CHUNK)
    known = fact < RANKS + EXPERTS + 1
    total = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, blocks, BLOCKS):
        other = start + tl.arange(0, BLOCKS)
        place = work + fact[:, None] * blocks + other[None, :]
        total += tl.sum(tl.load(place, mask=known[:, None] & (other < blocks)[None, :], other=0), axis=1)
    if BY_TOKEN:
        total = tl.where(fact < RANKS, num_tokens, total)
    tl.store(facts + fact, total.to(tl.int64), mask=known)


@triton.jit
def _give_rows(
    ids,  # noqa: ANN001 - int [T, K]
    work,  # noqa: ANN001 - as above
    home,  # noqa: ANN001 - int64 [T, R]
    block,  # noqa: ANN001
    num_tokens,  # noqa: ANN001 - T
    rows_per_rank,  # noqa: ANN001 - C
    blocks,  # noqa: ANN001
    token_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PADDED: tl.constexpr,  # whether there is a C
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    token = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_ids(ids, token, num_tokens, token_stride, k_stride, K, WIDTH)
    valid = (expert >= 0) & (expert < EXPERTS)
    owner = tl.where(valid, expert.to(tl.int32) // (EXPERTS // RANKS), RANKS)
    first = rows_per_rank.to(tl.int64) * 0
    for rank in range(RANKS):
        wanted = tl.max((owner == rank).to(tl.int32), axis=1)
        before = 0
        rows = 0
        if BY_TOKEN:
            position = token
            rows = num_tokens
        else:
            for start in range(0, blocks, BLOCKS):
                other = start + tl.arange(0, BLOCKS)
                found = tl.load(work + rank * blocks + other, mask=other < blocks, other=0)
                before += tl.sum(tl.where(other < block, found, 0))
                rows += tl.sum(found)
            position = before + tl.cumsum(wanted) - 1
        fits = wanted > 0
        if PADDED:
            fits = fits & (position < rows_per_rank)
        row = tl.where(fits, first + position, -1)
        tl.store(home + token.to(tl.int64) * RANKS + rank, row, mask=token < num_tokens)
        if PADDED:
            first += rows_per_rank
        else:
            first += rows


@triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "blocks"])
def _home_kernel(
    ids,  # noqa: ANN001 - int [T, K]
    work,  # noqa: ANN001 - as above
    home,  # noqa: ANN001 - int64 [T, R]
    facts,  # noqa: ANN001 - int64 [R + E + 1]
    num_tokens,  # noqa: ANN001 - T
    rows_per_rank,  # noqa: ANN001 - C
    blocks,  # noqa: ANN001
    token_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PADDED: tl.constexpr,  # whether there is a C
) -> None:
    block = tl.program_id(0)
    if block < blocks:
        _give_rows(
            ids, work, home, block, num_tokens, rows_per_rank, blocks, token_stride, k_stride,
            K, WIDTH, EXPERTS, RANKS, BY_TOKEN, PADDED, BLOCK, BLOCKS,
        )  # fmt: skip
    else:  # programs behind the tokens sum up the facts
        _sum_facts(work, facts, block - blocks, num_tokens, blocks, EXPERTS, RANKS, BY_TOKEN, CHUNK, BLOCKS)


@triton.jit(do_not_specialize=["numel", "num_rows"])
def _invert_kernel(
    table,  # noqa: ANN001 - int64 [T, R]
    result,  # noqa: ANN001 - int64 [N], -1 where nothing is written
    numel,  # noqa: ANN001
    num_rows,  # noqa: ANN001 - N
    token_stride,  # noqa: ANN001
    rank_stride,  # noqa: ANN001
    RANKS: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(table + at // RANKS * token_stride + at % RANKS * rank_stride, mask=at < numel, other=-1)
    tl.store(result + row, at // DIVISOR, mask=(row >= 0) & (row < num_rows))


def route(ids: torch.Tensor, *, num_experts: int, num_ranks: int, rows_per_rank: int | None, by_token: bool) -> Route:
    """:func:`fsdp_symm.experts.routing.route`: two launches, four allocations."""
    num_tokens, topk = ids.shape
    width = power_of_two(max(topk, 1))
    block = max(_TILE // width, 1)
    blocks = ceil_div(num_tokens, block)
    num_facts = num_ranks + num_experts + 1
    work = torch.empty(num_facts * blocks, dtype=torch.int32, device=ids.device)
    home = torch.empty((num_tokens, num_ranks), dtype=torch.int64, device=ids.device)
    facts = torch.empty(num_facts, dtype=torch.int64, device=ids.device)
    narrowed = torch.empty((num_tokens, topk), dtype=torch.int32, device=ids.device)
    sizes = {"K": topk, "WIDTH": width, "EXPERTS": num_experts, "RANKS": num_ranks, "BLOCK": block, "CHUNK": _CHUNK}
    device, strides = ids.get_device(), ids.stride()
    if blocks:
        launch(_count_kernel, (blocks,), device, ids, work, narrowed, num_tokens, *strides, **sizes, num_warps=_WARPS)
    launch(
        _home_kernel,
        (blocks + ceil_div(num_facts, _CHUNK),),
        device,
        ids,
        work,
        home,
        facts,
        num_tokens,
        -1 if rows_per_rank is None else rows_per_rank,
        blocks,
        *strides,
        **sizes,
        BLOCKS=_BLOCKS,
        BY_TOKEN=by_token,
        PADDED=rows_per_rank is not None,
        num_warps=_WARPS,
    )
    return Route(home, facts, narrowed)


def invert(table: torch.Tensor, num_rows: int, divisor: int) -> torch.Tensor:
    """:func:`fsdp_symm.experts.routing.invert` of a table ``[T, R]``, divided: two launches, one allocation."""
    result = torch.full((num_rows,), -1, dtype=torch.int64, device=table.device)
    if table.numel() and num_rows:
        launch(
            _invert_kernel,
            (ceil_div(table.numel(), _FLAT),),
            table.get_device(),
            table,
            result,
            table.numel(),
            num_rows,
            *table.stride(),
            RANKS=table.shape[1],
            DIVISOR=divisor,
            BLOCK=_FLAT,
        )
    return result
