"""One kernel that sums the ranks' pieces in rank order, scales and rounds once: read every input once, write once.

Legend: W ranks, P elements of a piece.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.wire.reduce import accumulation_dtype, op_name

_BLOCK = 4096
_WARPS = 8
_Op = compat.ReduceOpKind
_TL_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _sum_kernel(
    output,  # noqa: ANN001 - a pointer, as are the next two
    own,  # noqa: ANN001
    rows,  # noqa: ANN001
    numel,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    scale,  # noqa: ANN001
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    DIVIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
    for rank in tl.static_range(WORLD_SIZE):  # type: ignore[general-type-issues]  # the stub calls it no iterator
        if rank == RANK:
            value = tl.load(own + at, mask=mask)
        elif rank < RANK:
            value = tl.load(rows + rank * row_stride + at, mask=mask)
        else:
            value = tl.load(rows + (rank - 1) * row_stride + at, mask=mask)
        total = value.to(ACCUMULATE) if rank == 0 else total + value.to(ACCUMULATE)
    if DIVIDE:
        total = tl.div_rn(total, scale.to(ACCUMULATE)) if tl.float32 == ACCUMULATE else total / scale.to(ACCUMULATE)
    else:
        total = total * scale.to(ACCUMULATE)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=mask)


def summable(op: Any, dtype: torch.dtype) -> bool:
    """Whether :func:`sum_pieces` knows the op and the dtype."""
    kind = op.op if hasattr(op, "op") else op
    return kind in (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM) and accumulation_dtype(dtype) in _TL_DTYPES


def sum_pieces(output: torch.Tensor, own: torch.Tensor, rows: torch.Tensor, rank: int, op: Any) -> None:
    """``output = scale * (x_0 + ... + x_(W-1))`` with ``x_rank = own`` and the others from ``rows`` in rank order.

    Args:
        output, own: ``[P]``, contiguous.
        rows: ``[W - 1, P]``, contiguous, of the same dtype.
        rank: this rank's number in the group.
        op: SUM, AVG or PREMUL_SUM.

    Raises:
        SymmMemError: another op or dtype.
    """
    if not summable(op, output.dtype):
        raise SymmMemError(
            problem(
                "reduce-scatter by copy engines: this cannot be summed",
                found=f"{op_name(op)} of {output.dtype}",
                expected="SUM, AVG or PREMUL_SUM of a floating dtype",
                fix="use reduce_scatter='nccl'",
            )
        )
    world_size, numel = rows.size(0) + 1, output.numel()
    kind = op.op if hasattr(op, "op") else op
    factor = compat.premul_factor(op)
    # Dividing by a power of two is multiplying by its inverse, bit for bit, and much cheaper.
    exact = kind == _Op.AVG and world_size & (world_size - 1) == 0
    divide = kind == _Op.AVG and not exact
    scale = 1.0 / world_size if exact else float(world_size) if divide else 1.0 if factor is None else factor
    _sum_kernel[(triton.cdiv(numel, _BLOCK),)](
        output,
        own,
        rows,
        numel,
        rows.stride(0),
        scale,
        RANK=rank,
        WORLD_SIZE=world_size,
        DIVIDE=divide,
        ACCUMULATE=_TL_DTYPES[accumulation_dtype(output.dtype)],
        BLOCK=_BLOCK,
        num_warps=_WARPS,  # type: ignore[call-arg]  # a launch option of triton, not of the kernel
    )
