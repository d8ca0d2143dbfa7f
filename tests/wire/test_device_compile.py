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
    word, nbytes = torch.tensor([2**40]), numel * dtype.itemsize
    for aligned, output in ((False, dtype), (True, dtype), (True, torch.float32)):
        piece = device_sum.PieceSum.of(op, dtype, output, 0, world_size)
        (kernel,) = compiled(
            monkeypatch,
            device_sum,
            lambda piece=piece, aligned=aligned: piece.launch(
                word, own.data_ptr(), rows.data_ptr(), 0, nbytes, aligned
            ),
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


def test_aligned_tensors_are_copied_16_bytes_at_a_time(monkeypatch: Any) -> None:
    tensors = [[torch.empty(8192, dtype=torch.bfloat16)] for _ in range(3)]
    (kernel,) = compiled(monkeypatch, device_copy, device_copy.TwoPlaces(*tensors).launch)
    assert "st.global.v4.b32" in kernel.ptx


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float32])
def test_aligned_pieces_are_summed_16_bytes_at_a_time(monkeypatch: Any, output: torch.dtype) -> None:
    own, rows, word = torch.empty(1 << 20, dtype=torch.bfloat16), torch.empty(1 << 20, dtype=torch.bfloat16), [2**40]
    piece = device_sum.PieceSum.of(dist.ReduceOp.AVG, torch.bfloat16, output, 1, 2)
    launch = piece.launch
    (kernel,) = compiled(
        monkeypatch,
        device_sum,
        lambda: launch(torch.tensor(word), own.data_ptr(), rows.data_ptr(), 1 << 21, 1 << 20, True),
    )
    assert "ld.global.v4.b32" in kernel.ptx
    assert "st.global.v4.b32" in kernel.ptx
