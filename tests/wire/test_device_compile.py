"""The wire's kernels, compiled for a GPU that is not there: what the interpreter does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels import compiled

pytest.importorskip("triton")

from fsdp_symm.wire import device_copy, device_sum

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "avg"])
def test_sum(monkeypatch: Any, dtype: torch.dtype, world_size: int, op: Any) -> None:
    numel = 9000
    own, rows = torch.empty(numel, dtype=dtype), torch.empty((world_size - 1, numel), dtype=dtype)
    output = torch.empty(numel, dtype=dtype)
    word, nbytes = torch.tensor([output.data_ptr()]), numel * dtype.itemsize
    piece = device_sum.PieceSum.of(op, dtype, 0, world_size)
    for aligned in (False, True):
        (kernel,) = compiled(
            monkeypatch,
            device_sum,
            lambda aligned=aligned: piece.launch(word, own.data_ptr(), rows.data_ptr(), 0, nbytes, aligned),
        )
        assert ".ftz" not in kernel.ptx


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
    + [(dtype, dtype) for dtype in (torch.uint8, torch.int64)],
)
@pytest.mark.parametrize("skip", [0, 1])
def test_copy(monkeypatch: Any, source: torch.dtype, target: torch.dtype, skip: int) -> None:
    tensors = [[torch.empty(n + skip, dtype=kind)[skip:] for n in (5000, 3)] for kind in (source, target, target)]
    copies = device_copy.TwoPlaces(*tensors)
    assert compiled(monkeypatch, device_copy, copies.launch)
