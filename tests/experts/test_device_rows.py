"""Moving and adding rows by kernels, in triton's interpreter, against the operators of torch."""

from __future__ import annotations

import pytest

from tests.kernels import interpret

pytest.importorskip("triton")

# The interpreter truncates to bfloat16 where GPUs round, so bfloat16 is only moved here.
COMMON = """
import random, sys
import torch
from fsdp_symm.experts import device_rows, routing
seed = int(sys.argv[1])
print("seed", seed)
chance, NAN = random.Random(seed), float("nan")
torch.manual_seed(seed)

def frame(shape, dtype, fill):
    '''A contiguous tensor inside a larger one, sometimes off 16 bytes, and a check that only it was written.'''
    before, numel = chance.choice([0, 3, 16]), shape[0] * shape[1]
    whole = torch.full((before + numel + 9,), fill, dtype=dtype)
    inside = whole[before : before + numel].view(shape)
    def check():
        for part in (whole[:before], whole[before + numel :]):
            assert same(part, torch.full_like(part, fill))
    return inside, check

def strided(rows):
    '''The same rows with other strides.'''
    how = chance.choice(["plain", "wide", "transposed"])
    if how == "wide":
        wide = rows.new_zeros(rows.shape[0], rows.shape[1] + chance.choice([1, 16]))
        wide[:, : rows.shape[1]] = rows
        return wide[:, : rows.shape[1]]
    return rows.t().contiguous().t() if how == "transposed" else rows

def same(x, y):
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    word = kinds[x.element_size()]
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.view(word), y.view(word))
"""

GATHER = """
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
for turn in range(80):
    dtype = TYPES[turn % len(TYPES)]
    n, m = chance.choice([0, 1, 9, 40]), chance.choice([0, 1, 7, 50])
    width = chance.choice([0, 1, 6, 8, 33, 128]) if turn % 20 else 9001
    rows = torch.randint(-128, 128, (n * width * dtype.itemsize,), dtype=torch.int8)  # any bits, NaNs too
    rows = strided((rows.view(dtype) if dtype != torch.bool else rows > 0).view(n, width))
    divisor = chance.choice([1, 1, 2, 6])
    index = torch.randint(-1, max(n * divisor, 1), (m,)) if n else torch.full((m,), -1)
    if chance.random() < 0.3:
        index = index.repeat_interleave(2)[::2]
    fill = 0 if dtype in (torch.bool, torch.uint8) else chance.choice([0, -1])
    out, check = frame((m, width), dtype, 1)
    assert device_rows.copyable(rows, index, out)
    device_rows.gather_rows(rows, index, fill, out, divisor)
    expected = routing.gather_rows(rows, index, fill=fill, divisor=divisor)
    assert same(expected, routing.gather_rows(rows, index // divisor, fill=fill))
    assert same(out, expected), (dtype, n, m, width, divisor, fill)
    check()

for turn in range(30):
    dtype = TYPES[turn % 5]
    n, m, k = chance.choice([0, 1, 9, 40]), chance.choice([0, 1, 7, 50]), chance.choice([1, 2, 6])
    width = chance.choice([0, 1, 8, 33]) if turn % 10 else 5000
    tokens, weights = strided(torch.randn(n, width).to(dtype)), strided(torch.randn(n, k))
    source = torch.randint(-1, n * k, (m,)) if n else torch.full((m,), -1)
    out, check = frame((m, width), dtype, 1)
    expected = torch.empty(m, width, dtype=dtype)
    other = routing.gather_routes(tokens, weights, source, out=expected)
    found = device_rows.gather_routes(tokens, weights, source, out)
    assert same(found, other) and same(out, expected), (dtype, n, m, k, width)
    check()
print("done")
"""

SUM = """
for turn in range(60):
    dtype = [torch.float32, torch.float16, torch.float64][turn % 3]
    n, m, k = chance.choice([0, 1, 7, 20]), chance.choice([0, 1, 9, 30]), chance.choice([0, 1, 2, 6, 8, 17])
    width = chance.choice([0, 1, 5, 16, 48]) if turn % 20 else 2052
    rows = torch.randn(m, width).to(dtype) * 10.0 ** chance.choice([0, -3, 3])
    index = torch.randint(-1, max(m, 1), (n, k)) if m else torch.full((n, k), -1)
    named = torch.zeros(m, dtype=torch.bool)
    named[index[index >= 0]] = True
    scale = chance.choice([None, torch.randn(m), torch.randn(3 * m)[::3]])
    rows[~named] = NAN
    if m > 4:
        rows[:3] = -0.0
    if scale is not None:
        scale = torch.where(named, scale, NAN)
    rows, index = strided(rows), strided(index)
    out, check = frame((n, width), dtype, NAN)
    assert device_rows.summable(rows, index, scale, out)
    device_rows.sum_rows(rows, index, scale, out)
    assert same(out, routing.sum_rows(rows, index, scale=scale)), (dtype, n, m, k, width, scale is None)
    check()
other = device_rows.sum_rows(torch.randn(3, 8).half(), torch.tensor([[0, 2]]), None, torch.empty(1, 8))
assert other.dtype == torch.float32 and not torch.equal(other, other.half().float()), "another type is rounded to once"
print("done")
"""

WEIGH = """
for turn in range(24):
    dtype = [torch.float32, torch.float16][turn % 2]
    m, width = chance.choice([0, 1, 9, 40]), chance.choice([1, 5, 64, 1100])
    source = torch.where(torch.rand(m) < 0.3, -1, torch.arange(m))
    grads, rows, scale = torch.randn(m, width).to(dtype), torch.randn(m, width).to(dtype), torch.randn(m)
    for tensor in (grads, rows, scale):
        tensor[source < 0] = NAN
    grads = grads[:1].expand(m, width) if m and not (source < 0).any() and turn % 3 == 0 else strided(grads)
    expected = routing.weigh_rows(grads, rows, scale, source, with_dots=True)
    weighed, dots = device_rows.weigh_rows(grads, strided(rows), scale, source, True)
    assert same(weighed, expected[0])
    torch.testing.assert_close(dots, expected[1], rtol=1e-4, atol=1e-4)  # another order of adding
    weighed, dots = device_rows.weigh_rows(grads, rows, scale, source, False)
    assert same(weighed, expected[0]) and dots.shape == (0,)
print("done")
"""


@pytest.mark.parametrize("code", [GATHER, SUM, WEIGH], ids=["gather", "sum", "weigh"])
def test_rows(code: str) -> None:
    interpret(COMMON + code, 7)
