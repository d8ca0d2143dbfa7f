"""Reduction arithmetic against a plain reference, over dtypes, ops, rank counts and sizes around the block size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_symm.errors import SymmMemError
from fsdp_symm.wire.reduce import BLOCK_NUMEL, op_name, reduce_chunks

Op = dist.ReduceOp
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _reference(chunks: list[torch.Tensor], name: str, factor: float) -> torch.Tensor:
    """The documented order: rank by rank, in fp32 (fp64 for fp64), scaled at the end, rounded once."""
    wide = torch.float64 if chunks[0].dtype == torch.float64 else torch.float32
    total = chunks[0].to(wide)
    for chunk in chunks[1:]:
        if name in ("MAX", "MIN"):
            total = (torch.maximum if name == "MAX" else torch.minimum)(total, chunk.to(wide))
        else:
            total = total + chunk.to(wide)
    if name == "AVG":
        total = total / len(chunks)
    if name == "PREMUL_SUM":
        total = total * factor
    return total.to(chunks[0].dtype)


def _op(name: str, factor: float) -> object:
    return Op.PREMUL_SUM(factor) if name == "PREMUL_SUM" else getattr(Op, name)


@settings(max_examples=120, deadline=None)
@given(
    ranks=st.integers(1, 7),
    numel=st.sampled_from([1, 3, 1000, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL + 17]),
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(["SUM", "AVG", "PREMUL_SUM", "MAX", "MIN"]),
    factor=st.sampled_from([1.0, 0.5, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_reduction_equals_the_reference_in_every_bit(
    ranks: int, numel: int, dtype: torch.dtype, name: str, factor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]
    output = torch.full((numel,), float("nan"), dtype=dtype)
    reduce_chunks(output, chunks, _op(name, factor))
    assert torch.equal(output, _reference(chunks, name, factor))


def test_low_precision_sums_are_rounded_once() -> None:
    """1 + 2**-8 + 2**-8 is 1 + 2**-7 in one rounding, and 1 when every partial sum is rounded to bfloat16."""
    chunks = [torch.tensor([v], dtype=torch.bfloat16) for v in (1.0, 2**-8, 2**-8)]
    output = torch.zeros(1, dtype=torch.bfloat16)
    reduce_chunks(output, chunks, Op.SUM)
    assert output.item() == 1 + 2**-7
    assert (chunks[0] + chunks[1] + chunks[2]).item() == 1.0


def test_integers_are_summed_exactly() -> None:
    chunks = [torch.tensor([2**40 + 1, -5]), torch.tensor([1, 2])]
    output = torch.empty(2, dtype=torch.int64)
    reduce_chunks(output, chunks, Op.SUM)
    assert output.tolist() == [2**40 + 2, -3]


def test_nan_and_infinity_come_through() -> None:
    chunks = [torch.tensor([float("nan"), float("inf"), 1.0]), torch.tensor([1.0, 1.0, float("-inf")])]
    output = torch.zeros(3)
    reduce_chunks(output, chunks, Op.AVG)
    assert output.isnan().tolist() == [True, False, False]
    assert output[1] == float("inf")
    assert output[2] == float("-inf")


def test_names_of_ops() -> None:
    assert op_name(Op.AVG) == "AVG"
    assert op_name(Op.PREMUL_SUM(0.25)) == "PREMUL_SUM(0.25)"
    with pytest.raises(SymmMemError, match="found: BAND"):
        op_name(Op.BAND)
