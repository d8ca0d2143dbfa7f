"""The parts of a call, each to two places at once: a rank's slot, where its peers find them, and its own share of what
it receives. One launch, every byte read once.

Bytes are moved as words of up to 8, whatever they mean. A unit is as much as one thread may move at once.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (triton's stubs know no constexpr where a dtype is wanted, take a sum for a tuple, and know no launch options)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fsdp_symm.wire.kernel_launch import launch
from fsdp_symm.wire.kernel_types import VECTOR_BYTES, WORDS, ceil_div

MOST = 2  # parts of one launch: ids and facts, tokens and weights
_BLOCK = 2048  # words that one program moves
_WARPS = 8
_WORD_BYTES = 8  # the widest integer


class Placing(NamedTuple):
    """Bytes that go to two places.

    Attributes:
        source, first, second: addresses.
        copied: bytes of the source.
        total: bytes of either place; those behind the copied ones get -1, all bits of them 1.
    """

    source: int
    first: int
    second: int
    copied: int
    total: int


@triton.jit
def _copy(
    block,  # noqa: ANN001 - of this part
    source,  # noqa: ANN001
    first,  # noqa: ANN001
    second,  # noqa: ANN001
    copied,  # noqa: ANN001 - units
    words,  # noqa: ANN001 - of either place
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,  # words of a unit
    BLOCK: tl.constexpr,
) -> None:
    source = source.to(tl.pointer_type(WORD))
    first = first.to(tl.pointer_type(WORD))
    second = second.to(tl.pointer_type(WORD))
    if VECTOR > 1:  # lets the compiler use 16-byte accesses; a cast would lose what is known of the address
        source = tl.multiple_of(source, 16)
        first = tl.multiple_of(first, 16)
        second = tl.multiple_of(second, 16)
    at = block * BLOCK + tl.arange(0, BLOCK)
    # Ends are multiples of VECTOR, which tells it that a unit is inside or outside as a whole.
    value = tl.load(source + at, mask=at < copied.to(tl.int64) * VECTOR, other=-1)
    tl.store(first + at, value, mask=at < words)
    tl.store(second + at, value, mask=at < words)


_NUMBERS = [f"{name}_{part}" for part in range(MOST) for name in Placing._fields]


@triton.jit(do_not_specialize=_NUMBERS)
def _parts_kernel(
    source_0,  # noqa: ANN001 - the fields of each part; numbers of bytes as units
    first_0,  # noqa: ANN001
    second_0,  # noqa: ANN001
    copied_0,  # noqa: ANN001
    total_0,  # noqa: ANN001
    source_1,  # noqa: ANN001
    first_1,  # noqa: ANN001
    second_1,  # noqa: ANN001
    copied_1,  # noqa: ANN001
    total_1,  # noqa: ANN001
    WORD_0: tl.constexpr,
    VECTOR_0: tl.constexpr,  # words of a unit
    WORD_1: tl.constexpr,
    VECTOR_1: tl.constexpr,  # 0: there is no second part
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    words_0 = total_0.to(tl.int64) * VECTOR_0
    words_1 = total_1.to(tl.int64) * VECTOR_1
    blocks_0 = tl.cdiv(words_0, BLOCK)
    if block < blocks_0:
        _copy(block, source_0, first_0, second_0, copied_0, words_0, WORD_0, VECTOR_0, BLOCK)
    elif VECTOR_1:
        _copy(block - blocks_0, source_1, first_1, second_1, copied_1, words_1, WORD_1, VECTOR_1, BLOCK)


def copy_parts(parts: Sequence[Placing], device: int) -> None:
    """Copy up to :data:`MOST` parts on the current stream of a device, in one launch and without an allocation."""
    numbers: list[int] = []
    words: list[Any] = []
    programs = 0
    for source, first, second, copied, total in parts:
        source = source if copied else first  # an empty tensor has no address
        together = source | first | second | copied | total | VECTOR_BYTES
        unit = together & -together  # the largest power of two that divides them all
        word = min(unit, _WORD_BYTES)
        numbers += (source, first, second, copied // unit, total // unit)
        words += (WORDS[word], unit // word)
        programs += ceil_div(total, word * _BLOCK)
    if not programs:
        return
    if len(parts) < MOST:
        numbers += (0, 0, 0, 0, 0)
        words += (tl.int8, 0)
    launch(
        _parts_kernel,
        (programs,),
        device,
        *numbers,
        WORD_0=words[0],
        VECTOR_0=words[1],
        WORD_1=words[2],
        VECTOR_1=words[3],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
