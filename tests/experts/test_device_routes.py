"""Routing tables by kernels, in triton's interpreter, against the operators of torch: equal in every element."""

from __future__ import annotations

import pytest

from tests.kernels import interpret

pytest.importorskip("triton")

COMMON = """
import random, sys
import torch
from fsdp_symm.experts import device_arrange, device_routes, routing
seed = int(sys.argv[1])
print("seed", seed)
chance = random.Random(seed)
torch.manual_seed(seed)

def draw_ids(tokens, topk, experts):
    kind = chance.choice(["any", "one rank", "one expert", "masked", "invalid"])
    high = {"one rank": max(experts // 8, 1), "one expert": 1}.get(kind, experts)
    ids = torch.randint(0, high, (tokens, topk))
    dtype = chance.choice([torch.int32, torch.int64])
    if kind in ("masked", "invalid"):
        ids[torch.rand(tokens, topk) < 0.3] = -1
        ids[torch.rand(tokens, topk) < 0.02] = torch.iinfo(dtype).min
    if kind == "invalid":
        ids[torch.rand(tokens, topk) < 0.1] = experts
        ids[torch.rand(tokens, topk) < 0.05] = torch.iinfo(dtype).max
    ids = ids.to(dtype)
    layout = chance.choice(["plain", "transposed", "wide"])
    if layout == "wide":
        wide = torch.zeros((tokens * 2, topk * 3), dtype=dtype)
        wide[::2, ::3] = ids
        return wide[::2, ::3]
    return ids.t().contiguous().t() if layout == "transposed" else ids

def same(found, expected, *case):
    for name, x, y in zip(expected._fields, found, expected):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y), (name, *case)

SIZES = [(t, k, r) for t in (0, 1, 7, 130) for k in (1, 2, 6, 8) for r in (1, 2, 4, 8)]
SIZES = chance.sample(SIZES, int(sys.argv[2])) + [(5000, 6, 2)]
"""

ROUTE = """
for tokens, topk, ranks in SIZES:
    experts = ranks * chance.choice([1, 3, 8, 256 // ranks])
    ids = draw_ids(tokens, topk, experts)
    for rows in (None, 2**40 if tokens < 9 else max(tokens // 3, 1)):
        for by_token in (False, True):
            how = {"num_experts": experts, "num_ranks": ranks, "rows_per_rank": rows, "by_token": by_token}
            expected = routing.route(ids, **how)
            same(device_routes.route(ids, **how), expected, ids.shape, how)
            if rows == 2**40:
                continue
            home = expected.home
            num_rows = int(home.max()) + 3 if tokens else 5
            assert torch.equal(device_routes.invert(home, num_rows, ranks), routing.tokens_of(home, num_rows))
            home = home.t().contiguous().t()
            assert torch.equal(device_routes.invert(home, num_rows, 1), routing.invert(home, num_rows))
print("done")
"""

ARRANGE = """
for tokens, topk, ranks in SIZES:
    local = chance.choice([1, 3, 8, 33]) if tokens != 130 else 256 // ranks
    experts, first = local * ranks, local * chance.randrange(ranks)
    ids = draw_ids(tokens, topk, experts)
    for alignment in (1, 8, 128) if tokens < 130 else (8,):
        sizes = [None, max(tokens * topk // 3, 1), 0, tokens * topk + 2 * alignment]
        for capacity in sizes if tokens < 130 else chance.sample(sizes, 1):
            how = {"first_expert": first, "num_local": local, "alignment": alignment, "capacity": capacity}
            table = torch.randint(0, 1000, (ranks, ranks + experts + 1))
            columns = table[:, ranks + first : ranks + first + local]
            how["wanted"] = chance.choice([None, columns, columns.sum(0, keepdim=True), columns.t().contiguous().t()])
            expected = routing.arrange(ids, **how)
            same(device_arrange.arrange(ids, **how), expected, ids.shape, how)
print("done")
"""

# The public functions choose kernels by device; here they take them everywhere.
CHOICE = """
import torch
from fsdp_symm.experts import routing
from tests.experts import test_routing
routing.on_gpu = lambda *tensors: True
for name in (
    "gather_and_sum_are_transposes", "sum_is_fp32_in_order_and_rounds_once",
    "missing_rows_are_masked_before_they_are_scaled", "row_numbers_pass_two_to_the_31",
    "masked_ids_stay_signed_and_bad_ones_are_counted", "zero_token_experts_keep_their_place",
    "what_has_no_room_is_dropped_last_experts_first",
):
    getattr(test_routing, "test_" + name)()
test_routing.test_no_rows_at_all(torch.empty(0, 3))
ids = torch.randint(-1, 9, (20, 3))
found = routing.route(ids, num_experts=8, num_ranks=2, rows_per_rank=9)
how = {"first_expert": 4, "num_local": 4, "alignment": 8, "wanted": torch.stack([found.experts, found.experts])[:, 4:]}
laid = routing.arrange(found.narrowed, **how)
rows = routing.to_rank_major(torch.randn(20, 8), found.home, 18)
back = routing.from_rank_major(rows, found.home)
with torch.no_grad():
    weighed = routing.weigh_rows(back, back, torch.randn(20), torch.arange(20), with_dots=True)
assert torch.equal(routing.gather_rows(back, laid.source, divisor=3)[laid.source < 0].unique(), torch.zeros(1))
routing.on_gpu = lambda *tensors: False
assert torch.equal(back, routing.from_rank_major(rows, found.home)) and weighed[0].shape == (20, 8)
for x, y in zip(found, routing.route(ids, num_experts=8, num_ranks=2, rows_per_rank=9)):
    assert torch.equal(x, y)
for x, y in zip(laid, routing.arrange(found.narrowed, **how)):
    assert torch.equal(x, y)
print("done")
"""


def test_public_functions_reach_the_kernels() -> None:
    interpret(CHOICE)


@pytest.mark.parametrize(("code", "sizes"), [(ROUTE, 12), (ARRANGE, 12)], ids=["route", "arrange"])
def test_tables(code: str, sizes: int) -> None:
    interpret(COMMON + code, 7, sizes)


def test_what_int32_has_no_room_for_is_left_to_torch() -> None:
    import torch

    from fsdp_symm.experts.device_arrange import arrangeable

    ids = torch.zeros((5, 2), dtype=torch.int64)
    assert arrangeable(ids, 4, 8, None)
    assert not arrangeable(ids, 4, 8, 2**31)
    assert not arrangeable(ids[:1].expand(2**30, 2), 4, 8, None)
