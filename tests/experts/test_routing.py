"""Token layouts against loops in Python: who gets which row, where it lies before its expert, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_symm.experts import routing
from fsdp_symm.experts.exchange import Layout

NAN = float("nan")


@st.composite
def routings(draw: Any) -> tuple[torch.Tensor, int, int]:
    """Ids ``[T, K]`` with masked, repeated and transposed ones, E and R."""
    ranks = draw(st.integers(1, 4))
    experts = ranks * draw(st.integers(1, 4))
    tokens, k = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    values = draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * k, max_size=tokens * k))
    ids = torch.tensor(values, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(tokens, k)
    return (ids.t().contiguous().t() if draw(st.booleans()) else ids), experts, ranks


def _pairs(ids: torch.Tensor, experts: int, ranks: int) -> list[list[int]]:
    """The tokens that each rank wants, in order."""
    local = experts // ranks
    return [
        [t for t, row in enumerate(ids.tolist()) if any(e >= 0 and e // local == r for e in row)] for r in range(ranks)
    ]


@settings(deadline=None, max_examples=200)
@given(routings(), st.integers(1, 9))
def test_padded_routes_give_each_wanted_pair_the_next_row(drawn: tuple[torch.Tensor, int, int], capacity: int) -> None:
    ids, experts, ranks = drawn
    route = routing.route(ids, num_experts=experts, num_ranks=ranks, rows_per_rank=capacity)
    wanted = _pairs(ids, experts, ranks)
    expected = torch.full((ids.shape[0], ranks), -1)
    for rank, tokens in enumerate(wanted):
        for position, token in enumerate(tokens[:capacity]):
            expected[token, rank] = rank * capacity + position
    assert route.home.dtype == torch.int64
    assert torch.equal(route.home, expected)
    assert route.rows.tolist() == [len(tokens) for tokens in wanted], "before any drop"
    assert route.experts.tolist() == [int((ids == e).sum()) for e in range(experts)]
    assert route.invalid.tolist() == [0]


@settings(deadline=None, max_examples=100)
@given(routings())
def test_exact_routes_have_no_gaps(drawn: tuple[torch.Tensor, int, int]) -> None:
    ids, experts, ranks = drawn
    home = routing.route(ids, num_experts=experts, num_ranks=ranks, rows_per_rank=None).home
    order = [(r, t) for r, tokens in enumerate(_pairs(ids, experts, ranks)) for t in tokens]
    assert [int(home[t, r]) for r, t in order] == list(range(len(order)))
    assert int((home >= 0).sum()) == len(order)


@settings(deadline=None, max_examples=100)
@given(routings())
def test_routes_by_token_need_no_packing(drawn: tuple[torch.Tensor, int, int]) -> None:
    ids, experts, ranks = drawn
    route = routing.route(ids, num_experts=experts, num_ranks=ranks, rows_per_rank=9, by_token=True)
    for rank, tokens in enumerate(_pairs(ids, experts, ranks)):
        column = route.home[:, rank]
        assert [t for t, row in enumerate(column.tolist()) if row >= 0] == tokens
        assert all(int(column[t]) == rank * 9 + t for t in tokens)
    assert route.rows.tolist() == [ids.shape[0]] * ranks, "each rank needs room for all of them"


@settings(deadline=None, max_examples=200)
@given(routings(), st.sampled_from([1, 2, 8, 16]), st.none() | st.integers(1, 12))
def test_rows_lie_by_expert_then_row_then_k(
    drawn: tuple[torch.Tensor, int, int], alignment: int, zones: int | None
) -> None:
    ids, experts, ranks = drawn
    local = experts // ranks
    first = experts - local
    capacity = None if zones is None else zones * alignment
    laid = routing.arrange(ids, first_expert=first, num_local=local, alignment=alignment, capacity=capacity)
    source: list[int] = []
    k = ids.shape[1]
    for expert in range(first, experts):
        routes = [t * k + j for t, row in enumerate(ids.tolist()) for j, e in enumerate(row) if e == expert]
        source += routes + [-1] * (-len(routes) % alignment)
    rows = len(source) if capacity is None else capacity
    expected = (source + [-1] * rows)[:rows]
    assert laid.source.tolist() == expected
    assert int(laid.counts.sum()) == min(len(source), rows)
    assert all(int(count) % alignment == 0 for count in laid.counts)
    slots = torch.full((ids.numel(),), -1)
    for row, flat in enumerate(expected):
        if flat >= 0:
            slots[flat] = row
    assert torch.equal(laid.slots.flatten(), slots)
    assert laid.total.tolist() == [len(source)], "before any drop"
    assert laid.dropped.tolist() == [sum(flat >= 0 for flat in source) - int((slots >= 0).sum())]
    wanted = torch.arange(2 * local).view(2, local)  # more than came
    again = routing.arrange(
        ids, first_expert=first, num_local=local, alignment=alignment, capacity=capacity, wanted=wanted
    )
    needed = wanted.sum(0).tolist()
    assert again.total.tolist() == [sum(-(-n // alignment) * alignment for n in needed)]
    assert again.dropped.tolist() == [sum(needed) - int((slots >= 0).sum())]


@settings(deadline=None, max_examples=100)
@given(routings(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_rank_major_and_back(drawn: tuple[torch.Tensor, int, int], dtype: torch.dtype) -> None:
    ids, experts, ranks = drawn
    capacity = max(ids.shape[0], 1)
    home = routing.route(ids, num_experts=experts, num_ranks=ranks, rows_per_rank=capacity).home
    tokens = torch.randint(-8, 8, (ids.shape[0], 6)).to(dtype)  # sums of small integers are exact
    rows = routing.to_rank_major(tokens, home, ranks * capacity)
    boxes = rows.view(ranks, capacity, 6)
    for rank, wanted in enumerate(_pairs(ids, experts, ranks)):
        assert torch.equal(boxes[rank, : len(wanted)], tokens[wanted])
        assert not boxes[rank, len(wanted) :].any(), "unused rows are zero"
    rows[(routing.tokens_of(home, ranks * capacity) < 0)] = NAN  # what nobody sent may hold anything
    back = routing.from_rank_major(rows, home)
    times = (home >= 0).sum(1, keepdim=True).float()
    assert torch.equal(back, (tokens.float() * times).to(dtype))


def test_gather_and_sum_are_transposes() -> None:
    index = torch.tensor([[0, 2], [-1, 2], [1, -1], [-1, -1]])
    index[1, 1] = -1
    flat = routing.invert(index, 3)
    assert flat.tolist() == [0, 4, 1]
    random = torch.Generator().manual_seed(0)
    rows, grads = (torch.randn(n, 5, generator=random, dtype=torch.float64) for n in (4, 3))
    forward = routing.gather_rows(rows, flat // 2)
    assert torch.allclose((forward * grads).sum(), (rows * routing.sum_rows(grads, index)).sum())


def test_sum_is_fp32_in_order_and_rounds_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1, 2]])
    assert routing.sum_rows(rows, index).item() == 258.0, "bf16 sums would lose both ones"
    scale = torch.tensor([1.0, 0.5, 0.5])
    assert routing.sum_rows(rows.float(), index, scale=scale).item() == 257.0


def test_missing_rows_are_masked_before_they_are_scaled() -> None:
    """A weight of zero times a NaN row would be NaN."""
    rows = torch.tensor([[NAN, NAN], [1.0, 2.0]])
    scale = torch.tensor([0.0, 2.0])
    assert routing.sum_rows(rows, torch.tensor([[-1, 1]]), scale=scale).tolist() == [[2.0, 4.0]]
    assert routing.gather_rows(rows, torch.tensor([-1, 1])).tolist() == [[0.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("empty", [torch.empty(0, 3), torch.empty(0, 3, dtype=torch.bfloat16)])
def test_no_rows_at_all(empty: torch.Tensor) -> None:
    assert routing.gather_rows(empty, torch.tensor([-1, -1])).tolist() == [[0.0] * 3] * 2
    assert routing.sum_rows(empty, torch.full((2, 4), -1)).tolist() == [[0.0] * 3] * 2
    assert routing.gather_rows(empty, torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_row_numbers_pass_two_to_the_31() -> None:
    """rows x width of one rank is beyond int32 in real runs (38000 x 8 x 7168 elements)."""
    rows = 2**40
    route = routing.route(torch.tensor([[3, 0]], dtype=torch.int32), num_experts=4, num_ranks=4, rows_per_rank=rows)
    assert route.home.tolist() == [[0, -1, -1, 3 * rows]]
    layout = Layout.padded(8, 7, 38000, by_token=False)
    assert layout.first_received(7, 7) * 7168 * 2 == 7 * 38000 * 7168 * 2 > 2**31


def test_masked_ids_stay_signed_and_bad_ones_are_counted() -> None:
    ids = torch.tensor([[-1, 256], [255, -7]], dtype=torch.int32)
    route = routing.route(ids, num_experts=256, num_ranks=2, rows_per_rank=2)
    assert route.invalid.tolist() == [1], "an id equal to the number of experts"
    assert route.home.tolist() == [[-1, -1], [-1, 2]]
    laid = routing.arrange(ids, first_expert=128, num_local=128)
    assert int(laid.counts.sum()) == 1
    assert laid.slots.tolist() == [[-1, -1], [0, -1]]


def test_zero_token_experts_keep_their_place() -> None:
    ids = torch.tensor([[1]] * 5 + [[3]] * 3)
    laid = routing.arrange(ids, first_expert=0, num_local=4, alignment=8)
    assert laid.counts.tolist() == [0, 8, 0, 8]
    assert laid.source.tolist() == [0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("num_local", [33, 64])
def test_many_local_experts(num_local: int) -> None:
    ids = torch.arange(num_local).flip(0).unsqueeze(1)
    laid = routing.arrange(ids, first_expert=0, num_local=num_local)
    assert laid.counts.tolist() == [1] * num_local
    assert laid.source.tolist() == list(range(num_local))[::-1]


def test_what_has_no_room_is_dropped_last_experts_first() -> None:
    ids = torch.tensor([[0], [1], [1], [0], [1]])
    laid = routing.arrange(ids, first_expert=0, num_local=2, capacity=3)
    assert laid.counts.tolist() == [2, 1]
    assert laid.slots.flatten().tolist() == [0, 2, -1, 1, -1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=3, max_size=3))
def test_layout_offsets_are_prefix_sums(sizes: list[list[int]]) -> None:
    """How much a rank receives depends on what each rank sends to it, not on the number of its experts."""
    layout = Layout(tuple(map(tuple, sizes)), 1)
    assert layout.sent == tuple(sizes[1])
    assert layout.received == (sizes[0][1], sizes[1][1], sizes[2][1])
    assert layout.first_sent(2, 2) == sizes[2][0] + sizes[2][1]
    assert layout.first_received(2, 0) == sizes[0][0] + sizes[1][0]
