"""The row movements of :mod:`fsdp_symm.experts.routing` as kernels: every named row is read once, every result written
once, and nothing else runs.

Legend as in :mod:`fsdp_symm.experts.routing`; rows that are only moved are taken as words of up to 8 bytes, whatever
their bits mean. A unit is as much of a row as one thread may move at once.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (triton's stubs know no constexpr where a dtype is wanted, take a sum for a tuple, and know no launch options)

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import FLOATS, VECTOR_BYTES, WORDS, ceil_div, power_of_two

_TILE = 1024  # words, or elements of a sum, that one program handles
_WARPS = 4
_WORD_BYTES = 8  # the widest integer
_UNROLL = 16  # so many terms of a sum are loaded side by side


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    rows_address,  # noqa: ANN001 - of [N, F]
    index,  # noqa: ANN001 - int64 [M]
    out_address,  # noqa: ANN001 - of [M, F]
    weights,  # noqa: ANN001 - fp32, one for each number that the index may hold
    weights_out,  # noqa: ANN001 - fp32 [M]
    num_rows,  # noqa: ANN001 - M
    width_units,  # noqa: ANN001 - F
    row_units,  # noqa: ANN001 - from one row to the next
    index_stride,  # noqa: ANN001
    FILL: tl.constexpr,  # a word
    DIVISOR: tl.constexpr,
    WEIGHTED: tl.constexpr,  # whether there are weights
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,  # words of a unit
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = rows_address.to(tl.pointer_type(WORD))
    out = out_address.to(tl.pointer_type(WORD))
    if VECTOR > 1:  # lets the compiler use 16-byte accesses; a cast would lose what is known of the address
        rows = tl.multiple_of(rows, 16)
        out = tl.multiple_of(out, 16)
    # Widths and strides are multiples of VECTOR, which tells it that they stay inside a row.
    inside = (at < num_rows)[:, None] & (column < width_units * VECTOR)[None, :]
    named = tl.load(index + at * index_stride, mask=at < num_rows, other=-1)
    present = named >= 0
    source = tl.where(present, named, 0) // DIVISOR
    place = source[:, None] * (row_units * VECTOR) + column[None, :]
    value = tl.load(rows + place, mask=inside & present[:, None], other=0)
    value = tl.where(present[:, None], value, tl.full((ROWS, COLUMNS), FILL, WORD))
    tl.store(out + at[:, None] * (width_units * VECTOR) + column[None, :], value, mask=inside)
    if WEIGHTED:  # by the programs of the first columns
        mine = at < tl.where(tl.program_id(1) == 0, num_rows, 0)
        tl.store(weights_out + at, tl.load(weights + named, mask=mine & present, other=0.0), mask=mine)


@triton.jit
def _add_term(
    total,  # noqa: ANN001
    rows,  # noqa: ANN001 - pointers to the columns of row 0
    scale,  # noqa: ANN001
    source,  # noqa: ANN001 - the row to add, -1: none
    inside,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    scale_stride,  # noqa: ANN001
    SCALED: tl.constexpr,
) -> tl.tensor:
    present = source >= 0
    value = tl.load(rows + source[:, None] * row_stride, mask=inside & present[:, None], other=0.0).to(total.dtype)
    if SCALED:
        factor = tl.load(scale + source * scale_stride, mask=present, other=0.0).to(total.dtype)
        value = value * factor[:, None]
    return total + value  # a sum that starts at +0 is never -0, so that adding +0 for a missing row changes nothing


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    rows,  # noqa: ANN001 - [M, F]
    index,  # noqa: ANN001 - int64 [N, K]
    scale,  # noqa: ANN001 - fp32 [M]
    out,  # noqa: ANN001 - [N, F]
    num_rows,  # noqa: ANN001 - N
    width_units,  # noqa: ANN001 - F
    row_units,  # noqa: ANN001 - from one row to the next
    out_units,  # noqa: ANN001 - the same of the output
    index_stride,  # noqa: ANN001
    k_stride,  # noqa: ANN001
    scale_stride,  # noqa: ANN001
    K: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of a unit
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside = at < num_rows
    inside = row_inside[:, None] & (column < width_units * VECTOR)[None, :]
    terms = index + at * index_stride
    columns = rows + column[None, :]
    stride = row_units * VECTOR
    total = tl.zeros((ROWS, COLUMNS), dtype=ACCUMULATE)
    if UNROLL:
        for k in tl.static_range(K):  # type: ignore[general-type-issues]  # the stub calls it no iterator
            source = tl.load(terms + k * k_stride, mask=row_inside, other=-1)
            total = _add_term(total, columns, scale, source, inside, stride, scale_stride, SCALED)
    else:
        for k in range(K):
            source = tl.load(terms + k * k_stride, mask=row_inside, other=-1)
            total = _add_term(total, columns, scale, source, inside, stride, scale_stride, SCALED)
    tl.store(out + at[:, None] * (out_units * VECTOR) + column[None, :], total.to(OUTPUT), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_kernel(
    grads,  # noqa: ANN001 - [M, F]
    rows,  # noqa: ANN001 - [M, F]
    scale,  # noqa: ANN001 - fp32 [M]
    source,  # noqa: ANN001 - int64 [M]
    out,  # noqa: ANN001 - [M, F]
    dots,  # noqa: ANN001 - fp32 [M]
    num_rows,  # noqa: ANN001 - M
    width_units,  # noqa: ANN001 - F
    grad_units,  # noqa: ANN001 - from one row to the next
    row_units,  # noqa: ANN001
    scale_stride,  # noqa: ANN001
    DOTS: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of a unit
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width = width_units * VECTOR
    real = tl.load(source + at, mask=at < num_rows, other=-1) >= 0
    factor = tl.load(scale + at * scale_stride, mask=real, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        grads_at = grads + at[:, None] * (grad_units * VECTOR) + column[None, :]
        grad = tl.load(grads_at, mask=real[:, None] & inside, other=0.0).to(tl.float32)
        if DOTS:
            rows_at = rows + at[:, None] * (row_units * VECTOR) + column[None, :]
            total += grad * tl.load(rows_at, mask=real[:, None] & inside, other=0.0).to(tl.float32)
        weighed = tl.where(real[:, None], grad * factor[:, None], 0.0).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * width + column[None, :], weighed, mask=(at < num_rows)[:, None] & inside)
    if DOTS:
        tl.store(dots + at, tl.sum(total, axis=1), mask=at < num_rows)


@lru_cache(maxsize=64)
def _fill_word(fill: float, dtype: torch.dtype, word_bytes: int) -> int:
    """The value, over and over, as an integer of so many bytes."""
    value = torch.full((_WORD_BYTES // dtype.itemsize,), fill, dtype=dtype, device="cpu").view(torch.uint8)
    return int.from_bytes(bytes(value.tolist()[:word_bytes]), "little", signed=True)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    columns = min(power_of_two(width), _TILE)
    return _TILE // columns, columns


def _flat(rows: torch.Tensor) -> bool:
    """Whether the elements of a row lie side by side."""
    return rows.shape[1] <= 1 or rows.stride(1) == 1


def _flat_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if _flat(rows) else rows.contiguous()


def gather_rows(rows: torch.Tensor, index: torch.Tensor, fill: float, out: torch.Tensor, divisor: int) -> torch.Tensor:
    """:func:`fsdp_symm.experts.routing.gather_rows`: one launch, no allocation. ``out`` is contiguous."""
    if out.numel() == 0:
        return out
    if rows.shape[0] == 0:
        return out.fill_(fill)
    _gather(rows, index, fill, out, divisor, None, None)
    return out


def gather_routes(tokens: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """:func:`fsdp_symm.experts.routing.gather_routes`: one launch, one allocation. ``out`` is contiguous."""
    found = weights.new_empty(source.shape[0])
    if out.numel() == 0 or weights.numel() == 0:
        gather_rows(tokens, source, 0, out, max(weights.shape[1], 1))
        gather_rows(weights.reshape(-1, 1), source, 0, found.unsqueeze(1), 1)
    else:
        _gather(tokens, source, 0, out, weights.shape[1], weights.contiguous(), found)
    return found


def _gather(
    rows: torch.Tensor,
    index: torch.Tensor,
    fill: float,
    out: torch.Tensor,
    divisor: int,
    weights: torch.Tensor | None,
    found: torch.Tensor | None,
) -> None:
    """Rows, and the weights that the same numbers name if there are any; nothing is empty."""
    rows, size = _flat_rows(rows), rows.element_size()
    width, row_stride = rows.shape[1] * size, rows.stride(0) * size
    source, target = rows.data_ptr(), out.data_ptr()
    together = width | row_stride | source | target | VECTOR_BYTES
    unit = together & -together  # the largest power of two that divides them all
    word = min(unit, _WORD_BYTES)
    tile_rows, columns = _tile(width // word)
    launch(
        _gather_kernel,
        (ceil_div(index.shape[0], tile_rows), ceil_div(width // word, columns)),
        rows.get_device(),
        source,
        index,
        target,
        index if weights is None else weights,
        index if found is None else found,
        index.shape[0],
        width // unit,
        row_stride // unit,
        index.stride(0),
        FILL=_fill_word(fill, rows.dtype, word),
        DIVISOR=divisor,
        WEIGHTED=weights is not None,
        WORD=WORDS[word],
        VECTOR=unit // word,
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=_WARPS,
    )


def copyable(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether :func:`gather_rows` can move such rows to such a place."""
    moves = rows.dtype == out.dtype and rows.element_size() <= _WORD_BYTES
    return moves and index.dtype == torch.int64 and out.is_contiguous()


def summable(rows: torch.Tensor, index: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor | None) -> bool:
    """Whether :func:`sum_rows` knows the types and can write there."""
    if out is not None and not (out.is_cuda == rows.is_cuda and out.dtype in FLOATS and _flat(out)):
        return False
    adds = rows.dtype in FLOATS and index.dtype == torch.int64
    return adds and (scale is None or scale.dtype == torch.float32)


def weighable(grads: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether :func:`weigh_rows` knows the types."""
    return grads.dtype in FLOATS and rows.dtype in FLOATS and scale.dtype == torch.float32


def sum_rows(rows: torch.Tensor, index: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """:func:`fsdp_symm.experts.routing.sum_rows`: one launch, no allocation."""
    if out.numel() == 0:
        return out
    if rows.shape[0] == 0:
        return out.zero_()
    rows, (num_rows, terms) = _flat_rows(rows), index.shape
    together = rows.shape[1] | rows.stride(0) | out.stride(0) | VECTOR_BYTES
    vector = together & -together
    tile_rows, columns = _tile(rows.shape[1])
    launch(
        _sum_kernel,
        (ceil_div(num_rows, tile_rows), ceil_div(rows.shape[1], columns)),
        rows.get_device(),
        rows,
        index,
        rows if scale is None else scale,
        out,
        num_rows,
        rows.shape[1] // vector,
        rows.stride(0) // vector,
        out.stride(0) // vector,
        *index.stride(),
        1 if scale is None else scale.stride(0),
        K=terms,
        SCALED=scale is not None,
        ACCUMULATE=tl.float64 if rows.dtype == torch.float64 else tl.float32,
        OUTPUT=FLOATS[out.dtype],
        VECTOR=vector,
        UNROLL=terms <= _UNROLL,
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # a product is rounded before it is added
    )
    return out


def weigh_rows(
    grads: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, source: torch.Tensor, with_dots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fsdp_symm.experts.routing.weigh_rows`: one launch, two allocations."""
    grads, rows, source = _flat_rows(grads), _flat_rows(rows), source.contiguous()
    num_rows, width = grads.shape
    out = grads.new_empty((num_rows, width), dtype=grads.dtype)
    dots = grads.new_empty(num_rows if with_dots else 0, dtype=torch.float32)
    if num_rows == 0:
        return out, dots
    together = width | rows.stride(0) | grads.stride(0) | VECTOR_BYTES
    vector = together & -together
    tile_rows, columns = _tile(max(width, 1))
    launch(
        _weigh_kernel,
        (ceil_div(num_rows, tile_rows),),
        rows.get_device(),
        grads,
        rows,
        scale,
        source,
        out,
        dots if with_dots else scale,
        num_rows,
        width // vector,
        grads.stride(0) // vector,
        rows.stride(0) // vector,
        scale.stride(0),
        DOTS=with_dots,
        VECTOR=vector,
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return out, dots
