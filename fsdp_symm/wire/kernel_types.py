"""What the kernels of this package have in common: torch's types as triton's, the widest access of a thread, and the
arithmetic of grids (triton's own, made for kernels too, costs the host 2 to 5 us a call)."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

FLOATS: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
WORDS: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by bytes, whatever the bits mean
VECTOR_BYTES = 16


def ceil_div(number: int, size: int) -> int:
    """So many blocks of a size that they hold a number of things."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    """The next power of two from a number on, which is at least 1."""
    return 1 << (number - 1).bit_length()
