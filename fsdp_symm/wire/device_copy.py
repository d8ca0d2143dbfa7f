"""One kernel that copies many tensors, each to two places: a shard is read once, cast, and written for the peers and
for its own rank.

Legend: N tensors of one call.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (triton's stubs know no constexpr where a dtype is wanted, and take a sum for a tuple)

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import FLOATS, VECTOR_BYTES, WORDS, ceil_div, power_of_two

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _copy_kernel(
    table,  # noqa: ANN001 - int64 [5, COUNT]: first block, source, both targets, elements; blocks of -1 behind the last
    COUNT: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    firsts = tl.load(table + tl.arange(0, COUNT))
    index = tl.sum(((firsts >= 0) & (firsts <= block)).to(tl.int32)) - 1
    source = tl.load(table + COUNT + index)
    first = tl.load(table + 2 * COUNT + index)
    second = tl.load(table + 3 * COUNT + index)
    numel = tl.load(table + 4 * COUNT + index)
    inputs = source.to(tl.pointer_type(SOURCE))
    outputs = first.to(tl.pointer_type(TARGET))
    others = second.to(tl.pointer_type(TARGET))
    if ALIGNED:  # lets the compiler use 16-byte accesses; said of an integer, it would be forgotten by the cast
        inputs = tl.multiple_of(inputs, 16)
        outputs = tl.multiple_of(outputs, 16)
        others = tl.multiple_of(others, 16)
    start = (block - tl.load(table + index)) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # without a mask, which would forbid wide accesses
        value = tl.load(inputs + at).to(TARGET)
        tl.store(outputs + at, value)
        tl.store(others + at, value)
    else:
        mask = at < numel
        value = tl.load(inputs + at, mask=mask).to(TARGET)
        tl.store(outputs + at, value, mask=mask)
        tl.store(others + at, value, mask=mask)


class _Kind(NamedTuple):
    """Tensors that one launch can copy."""

    source: Any
    target: Any
    aligned: bool


@dataclass(frozen=True)
class _Launch:
    table: torch.Tensor
    blocks: int
    kind: _Kind


def castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether :class:`TwoPlaces` knows this pair."""
    return source == target or (source in FLOATS and target in FLOATS)


class TwoPlaces:
    """A copy of N tensors that can be launched again and again, as long as all addresses stay good.

    Args:
        sources: contiguous, on one GPU.
        firsts, seconds: contiguous tensors of as many elements and of one dtype, pairwise; see :func:`castable`.

    The tables are ready when the constructor returns, so that any stream may launch.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], firsts: Sequence[torch.Tensor], seconds: Sequence[torch.Tensor]
    ) -> None:
        kinds: defaultdict[_Kind, list[tuple[int, int, int, int]]] = defaultdict(list)
        for source, first, second in zip(sources, firsts, seconds, strict=True):
            if source.numel():
                row = (source.data_ptr(), first.data_ptr(), second.data_ptr(), source.numel())
                kinds[_kind(source.dtype, first.dtype, row)].append(row)
        self._launches = [_launch(kind, rows, sources[0].device) for kind, rows in kinds.items()]

    def launch(self) -> None:
        """Copy on the current stream."""
        for one in self._launches:
            launch(
                _copy_kernel,
                (one.blocks,),
                one.table.get_device(),
                one.table,
                COUNT=one.table.shape[1],
                SOURCE=one.kind.source,
                TARGET=one.kind.target,
                ALIGNED=one.kind.aligned,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )


def _kind(source: torch.dtype, target: torch.dtype, row: tuple[int, int, int, int]) -> _Kind:
    aligned = all(address % VECTOR_BYTES == 0 for address in row[:3])
    if source == target:
        word = WORDS[source.itemsize]
        return _Kind(word, word, aligned)
    return _Kind(FLOATS[source], FLOATS[target], aligned)


def _launch(kind: _Kind, rows: list[tuple[int, int, int, int]], device: torch.device) -> _Launch:
    columns = torch.full((5, power_of_two(len(rows))), -1, dtype=torch.int64)
    blocks = 0
    for index, (source, first, second, numel) in enumerate(rows):
        columns[:, index] = torch.tensor([blocks, source, first, second, numel])
        blocks += ceil_div(numel, _BLOCK)
    table = columns.to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once: a copy from pageable memory may end later
    return _Launch(table, blocks, kind)
