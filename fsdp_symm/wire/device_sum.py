"""One kernel that sums the ranks' pieces in rank order, scales and rounds once: read every input once, write once.

Legend: W ranks, P elements of a piece.
"""

# pyright: reportArgumentType=false
# (triton's stubs know no constexpr where a dtype is wanted)

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import FLOATS, VECTOR_BYTES, ceil_div
from fsdp_symm.wire.reduce import accumulation_dtype, op_name

_BLOCK_BYTES = 32768  # of every rank's piece that a program sums at once: enough in flight to hide the memory's latency
_WARPS = 16
# So many programs walk over a piece: enough to keep up with a link, few enough to leave most SMs to the model.
PROGRAMS = 32
_Op = compat.ReduceOpKind


@triton.jit
def _sum_block(  # noqa: ANN202
    own,  # noqa: ANN001
    rows,  # noqa: ANN001
    at,  # noqa: ANN001
    numel,  # noqa: ANN001
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr,  # a mask forbids wide accesses
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
    for rank in tl.static_range(WORLD_SIZE):  # type: ignore[general-type-issues]  # the stub calls it no iterator
        if rank == RANK:
            source = own
        elif rank < RANK:
            source = rows + rank * numel
        else:
            source = rows + (rank - 1) * numel
        value = tl.load(source + at, mask=at < numel) if MASKED else tl.load(source + at)
        total = value.to(ACCUMULATE) if rank == 0 else total + value.to(ACCUMULATE)
    return total


@triton.jit
def _scaled(total, SCALE_BITS: tl.constexpr, DIVIDE: tl.constexpr, ACCUMULATE: tl.constexpr):  # noqa: ANN001, ANN202
    scale = tl.full((1,), SCALE_BITS, tl.int64).to(tl.float64, bitcast=True).to(ACCUMULATE)
    if not DIVIDE:
        return total * scale
    elif ACCUMULATE == tl.float32:  # noqa: SIM300 - triton compares the other way round too, but reads worse
        return tl.div_rn(total, scale)
    else:
        return total / scale


@triton.jit
def _sum_kernel(
    output_word,  # noqa: ANN001 - int64 [1], the address of the whole output
    own_address,  # noqa: ANN001 - of this rank's piece
    rows_address,  # noqa: ANN001 - of the peers' pieces, [W - 1, P]
    first,  # noqa: ANN001 - element of the output at which the piece starts
    numel,  # noqa: ANN001 - P
    SCALE_BITS: tl.constexpr,  # of a double: a float argument would be rounded to fp32
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    DIVIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    output = tl.load(output_word).to(tl.pointer_type(OUTPUT)) + first
    own = own_address.to(tl.pointer_type(DTYPE))
    rows = rows_address.to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler use 16-byte accesses; said of an integer, it would be forgotten by the cast
        output = tl.multiple_of(output, 16)
        own = tl.multiple_of(own, 16)
        rows = tl.multiple_of(rows, 16)
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)  # a piece is far below 2**31 elements
        if (block + 1) * BLOCK <= numel:
            total = _sum_block(own, rows, at, numel, RANK, WORLD_SIZE, ACCUMULATE, False, BLOCK)
            tl.store(output + at, _scaled(total, SCALE_BITS, DIVIDE, ACCUMULATE).to(OUTPUT))
        else:
            total = _sum_block(own, rows, at, numel, RANK, WORLD_SIZE, ACCUMULATE, True, BLOCK)
            tl.store(output + at, _scaled(total, SCALE_BITS, DIVIDE, ACCUMULATE).to(OUTPUT), mask=at < numel)


def summable(op: Any, dtype: torch.dtype) -> bool:
    """Whether :class:`PieceSum` knows the op and the dtype of its pieces."""
    kind = op.op if hasattr(op, "op") else op
    return kind in (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM) and dtype in FLOATS


@dataclass(frozen=True)
class PieceSum:
    """``scale * (x_0 + ... + x_(W-1))``, or the sum divided by W where W is no power of two.

    Attributes:
        dtype: of the pieces.
        output: of the result: ``dtype``, or the type of the sum, fp32 for the narrower ones.
        rank, world_size: where this rank's own piece stands in the order.
        scale: factor or divisor.
        divide: whether to divide.
    """

    dtype: torch.dtype
    output: torch.dtype
    rank: int
    world_size: int
    scale: float
    divide: bool

    @staticmethod
    def of(op: Any, dtype: torch.dtype, output: torch.dtype, rank: int, world_size: int) -> PieceSum:
        """The arithmetic of a reduce op on pieces of ``dtype``.

        Raises:
            SymmMemError: another op than SUM, AVG and PREMUL_SUM, or not a floating dtype.
        """
        if not summable(op, dtype):
            raise SymmMemError(
                problem(
                    "reduce-scatter by copy engines: this cannot be summed",
                    found=f"{op_name(op)} of {dtype}",
                    expected="SUM, AVG or PREMUL_SUM of a floating dtype",
                    fix="use reduce_scatter='nccl'",
                )
            )
        kind = op.op if hasattr(op, "op") else op
        if kind == _Op.AVG:
            # Dividing by a power of two is multiplying by its inverse, bit for bit, and much cheaper.
            divide = world_size & (world_size - 1) != 0
            return PieceSum(dtype, output, rank, world_size, float(world_size) if divide else 1.0 / world_size, divide)
        factor = compat.premul_factor(op)
        return PieceSum(dtype, output, rank, world_size, 1.0 if factor is None else factor, False)

    def launch(self, output_word: torch.Tensor, own: int, rows: int, start: int, nbytes: int, aligned: bool) -> None:
        """Sum one piece on the current stream.

        Args:
            output_word: int64 ``[1]`` that holds the address of the whole output.
            own, rows: addresses of this rank's piece ``[P]`` and of the peers' ``[W - 1, P]`` in rank order.
            start, nbytes: the piece's place in a rank's chunk, in bytes of ``dtype``.
            aligned: whether the output starts on 16 bytes.
        """
        width = self.dtype.itemsize
        numel = nbytes // width
        block = _BLOCK_BYTES // width
        aligned = aligned and all(n % VECTOR_BYTES == 0 for n in (own, rows, start, nbytes))
        launch(
            _sum_kernel,
            (min(PROGRAMS, ceil_div(numel, block)),),
            output_word.get_device(),
            output_word,
            own,
            rows,
            start // width,
            numel,
            SCALE_BITS=struct.unpack("<q", struct.pack("<d", self.scale))[0],
            RANK=self.rank,
            WORLD_SIZE=self.world_size,
            DIVIDE=self.divide,
            DTYPE=FLOATS[self.dtype],
            OUTPUT=FLOATS[self.output],
            ACCUMULATE=FLOATS[accumulation_dtype(self.dtype)],
            ALIGNED=aligned,
            BLOCK=block,
            num_warps=_WARPS,
        )
