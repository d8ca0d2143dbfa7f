"""Parts that go to two places, in triton's interpreter, against the operators of torch: equal in every byte."""

from __future__ import annotations

import pytest

from tests.kernels import interpret

pytest.importorskip("triton")

COMMON = """
import random
import torch
chance = random.Random(7)
torch.manual_seed(7)
"""

PARTS = """
from fsdp_symm.experts.device_parts import Placing, copy_parts

def frame(nbytes):
    '''Bytes inside a larger tensor, sometimes off 16.'''
    before = chance.choice([0, 0, 2, 8, 13])
    whole = torch.full((before + nbytes + 40,), 77, dtype=torch.uint8)
    return whole, whole[before : before + nbytes]

for turn in range(60):
    parts, frames = [], []
    for _ in range(chance.choice([1, 2])):
        unit = chance.choice([1, 2, 4, 8, 16, 48])
        copied = unit * chance.choice([0, 1, 7, 300, 2048 * 16 // unit, 2049 * 16 // unit])
        total = copied + unit * chance.choice([0, 0, 1, 900])
        source = frame(copied)[1].random_()
        expected = torch.cat([source, torch.full((total - copied,), 255, dtype=torch.uint8)])
        places = [frame(total) for _ in range(2)]
        parts.append(Placing(source.data_ptr(), *(inside.data_ptr() for _, inside in places), copied, total))
        frames += [(whole, inside, expected, source) for whole, inside in places]
    copy_parts(parts, -1)
    for whole, inside, expected, _ in frames:
        assert torch.equal(inside, expected), parts
        assert (whole == 77).sum() - (inside == 77).sum() == whole.numel() - inside.numel(), "nothing else is written"
copy_parts([], -1)
print("done")
"""

# A slot and targets by the kernel, against those by copies.
RECIPE = """
from fsdp_symm.experts import routing
from fsdp_symm.experts.exchange import Layout, PartSpec
from fsdp_symm.experts.recipe import Part, Recipe

def filled(by_kernel, recipe, slot, sources, marked):
    routing.on_gpu = lambda *tensors: by_kernel
    return recipe.place(slot, sources, None, mark_missing=marked)

CPU = torch.device("cpu")
for ranks, rank, room, tokens, dtype in (
    (2, 0, 40, 33, torch.bfloat16), (2, 1, 40, 40, torch.float32), (4, 2, 5, 0, torch.float16),
    (8, 7, 9, 12, torch.float64), (1, 0, 3, 3, torch.bfloat16), (2, 1, 0, 0, torch.float32),
):
    layout = Layout.padded(ranks, rank, room, by_token=True)
    broadcast = Layout.padded(ranks, rank, 1, by_token=True)
    rows = torch.randn(tokens, 37).to(dtype)
    rows = chance.choice([rows, rows.t().contiguous().t()])
    ids, facts = torch.randint(-1, 9, (tokens, 6), dtype=torch.int32), torch.randint(0, 99, (1, 21))
    for sources, layouts, marked in (
        ([rows, torch.randn(tokens, 6)], [layout, layout], False), ([rows], [layout], False),
        ([ids, facts], [layout, broadcast], True),
    ):
        parts = tuple(Part(PartSpec(s.shape[1], s.dtype, CPU), l) for s, l in zip(sources, layouts))
        recipe = Recipe("dispatch", "a test", parts, rank, ranks)
        slots = [torch.full((recipe.nbytes,), 77, dtype=torch.uint8) for _ in range(2)]
        found, expected = (filled(k, recipe, s, sources, marked) for k, s in zip((True, False), slots))
        assert torch.equal(*slots)
        for x, y, source, own in zip(found, expected, sources, layouts):
            assert x.shape == y.shape and x.dtype == y.dtype
            first = rank * own.sizes[0][0]
            last = first + (own.sizes[0][0] if marked else min(source.shape[0], room))
            assert torch.equal(x[first:last].view(torch.uint8), y[first:last].view(torch.uint8)), "its own share"
print("done")
"""


@pytest.mark.parametrize("code", [PARTS, RECIPE], ids=["parts", "recipe"])
def test_parts(code: str) -> None:
    interpret(COMMON + code)
