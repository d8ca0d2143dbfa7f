"""What the kernels of this package have in common: torch's types as triton's, and the widest access of a thread."""

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
