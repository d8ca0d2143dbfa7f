"""Sum (or compare) the ranks' chunks in rank order: the arithmetic of a reduce-scatter, without communication.

Legend: W ranks, C elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError, problem

_Op = compat.ReduceOpKind
SUPPORTED = ("SUM", "AVG", "PREMUL_SUM", "MAX", "MIN")
# One block of fp32 accumulators is 256 KiB: it stays in a core's second-level cache between the W additions.
BLOCK_NUMEL = 65536


def op_name(op: Any) -> str:
    """Name of a reduce op, ``"PREMUL_SUM(0.5)"`` with its factor.

    Raises:
        SymmMemError: an op that FSDP2 never issues.
    """
    kind = op.op if hasattr(op, "op") else op
    name = getattr(kind, "name", str(kind))
    if name not in SUPPORTED:
        raise SymmMemError(
            problem(
                "reduce-scatter: unsupported reduce op",
                found=name,
                expected=SUPPORTED,
                fix="use one of these",
            )
        )
    factor = compat.premul_factor(op)
    return name if factor is None else f"{name}({factor:g})"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every floating type below it, the type itself for fp32, fp64 and integers."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _scaling(op: Any, world_size: int) -> Callable[[torch.Tensor], object] | None:
    kind = op.op if hasattr(op, "op") else op
    if kind == _Op.AVG:
        return lambda total: total.div_(world_size)
    factor = compat.premul_factor(op)
    return None if factor in (None, 1.0) else lambda total: total.mul_(factor)


def reduce_chunks(output: torch.Tensor, chunks: Sequence[torch.Tensor], op: Any) -> None:
    """``output = op(chunks[0], ..., chunks[W-1])``, always in that order.

    Sums are taken in :func:`accumulation_dtype` and rounded once, at the end. ``AVG`` divides the sum by W;
    ``PREMUL_SUM(f)`` multiplies the sum by f, which equals NCCL's scaling of each input for powers of two and is at
    least as exact otherwise.

    Args:
        output: ``[C]``, ordinary memory.
        chunks: W tensors ``[C]`` of the output's dtype, or of a narrower one: an fp32 sum of bf16 numbers is the sum of
            the same numbers in fp32.
        op: a torch reduce op of :data:`SUPPORTED`.
    """
    dtype = accumulation_dtype(output.dtype)
    kind = op.op if hasattr(op, "op") else op
    scale = _scaling(op, len(chunks))
    # The sum of two is rounded once either way, so a scratch for it would only cost time.
    direct = dtype == output.dtype or (len(chunks) == 2 and scale is None and kind not in (_Op.MAX, _Op.MIN))
    numel = output.numel()
    scratch = None if direct else torch.empty(min(BLOCK_NUMEL, numel), dtype=dtype)
    for start in range(0, numel, BLOCK_NUMEL):
        count = min(BLOCK_NUMEL, numel - start)
        blocks = [chunk.narrow(0, start, count) for chunk in chunks]
        target = output.narrow(0, start, count)
        total = target if scratch is None else scratch.narrow(0, 0, count)
        _accumulate(total, blocks, kind)
        if scale is not None:
            scale(total)
        if scratch is not None:
            target.copy_(total)


def _accumulate(total: torch.Tensor, blocks: Sequence[torch.Tensor], kind: Any) -> None:
    if kind in (_Op.MAX, _Op.MIN):
        combine = torch.maximum if kind == _Op.MAX else torch.minimum
        total.copy_(blocks[0])
        for block in blocks[1:]:
            combine(total, block.to(total.dtype), out=total)
        return
    if len(blocks) > 1 and blocks[0].dtype == total.dtype:
        torch.add(blocks[0], blocks[1], out=total)
        rest = blocks[2:]
    else:
        total.copy_(blocks[0])
        rest = blocks[1:]
    for block in rest:
        total.add_(block)
