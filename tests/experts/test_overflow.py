"""No room: an error on every rank, rows that are dropped and counted, or more room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm.experts import EpBuffer, ep_combine, ep_dispatch, ep_finalize, ep_prepare
from tests.experts.test_api import LOCAL, H, K, T, bootstrap, inputs
from tests.harness import Ranks

TO_RANK_0 = [[0, 1]] * T
BOUNDED = ["copy_engine", "copy_engine_exact"]


def _finally(job: Any, *args: Any) -> Any:
    try:
        return job(*args)
    finally:
        ep_finalize()


# --- raise -------------------------------------------------------------------------------------------------


def _too_many(settings: dict[str, Any], tokens_of_rank_1: int) -> None:
    bootstrap(**settings)
    buffer = EpBuffer()
    count = tokens_of_rank_1 if dist.get_rank() else 1
    ids = torch.tensor(TO_RANK_0 * 4)[:count]
    error = None
    for _ in range(2):  # nothing is broken by it: the next call says the same
        try:
            ep_prepare(buffer, ids)
        except RuntimeError as raised:
            error = raised
    counts = ep_prepare(buffer, ids[:1])
    assert int(counts.sum()) in (0, 4)
    assert error is not None
    raise error


def _raise(settings: dict[str, Any], tokens_of_rank_1: int) -> None:
    _finally(_too_many, settings, tokens_of_rank_1)


@pytest.mark.parametrize("transport", BOUNDED)
def test_more_tokens_than_room_is_an_error_on_every_rank(ranks2: Ranks, transport: str) -> None:
    for failure in ranks2.failures(_raise, {"transport": transport}, T + 3):
        assert failure.kind == "SymmMemError"
        assert "found: rank 1 has 7 rows for one rank" in failure.text
        assert f"expected: at most {T} (rows_per_peer, or else max_tokens_per_rank)" in failure.text
        assert "overflow='grow' or 'drop'" in failure.text


def test_more_rows_than_a_peer_takes_is_an_error_on_every_rank(ranks2: Ranks) -> None:
    for failure in ranks2.failures(_raise, {"rows_per_peer": 2}, T):
        assert "found: rank 1 has 4 rows for one rank" in failure.text
        assert "expected: at most 2" in failure.text


@pytest.mark.parametrize("transport", [*BOUNDED, "all_to_all"])
def test_more_rows_than_a_rank_receives_is_an_error_on_every_rank(ranks2: Ranks, transport: str) -> None:
    """Rank 1 has room, and hears of rank 0 all the same."""
    settings = {"recv_capacity_per_rank": 9, "transport": transport}
    for failure in ranks2.failures(_raise, settings, T):
        assert failure.kind == "SymmMemError"
        assert "found: 10 rows for the experts of rank 0" in failure.text
        assert "expected: at most 9" in failure.text
        assert "recv_capacity_per_rank" in failure.text


def _bad_id(transport: str) -> None:
    bootstrap(transport=transport)
    ids = torch.zeros(T, K, dtype=torch.int64)
    if dist.get_rank():
        ids[2, 1] = LOCAL * 2  # equal to the number of experts
    ep_prepare(EpBuffer(), ids)


def _raise_bad_id(transport: str) -> None:
    _finally(_bad_id, transport)


@pytest.mark.parametrize("transport", [*BOUNDED, "all_to_all"])
def test_ids_out_of_range_are_an_error_on_every_rank(ranks2: Ranks, transport: str) -> None:
    for failure in ranks2.failures(_raise_bad_id, transport):
        assert "found: 1 ids on rank 1" in failure.text
        assert "expected: ids below 4, or negative for masked routes" in failure.text


def _exactly_enough(transport: str) -> list[int]:
    bootstrap(transport=transport, recv_capacity_per_rank=2 * T)
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights)
    assert rows.shape == (2 * T, H)
    torch.testing.assert_close(ep_combine(buffer, rows, recv_topk_weights=row_weights), tokens)
    ep_finalize()
    return counts.tolist()


@pytest.mark.parametrize("transport", [*BOUNDED, "all_to_all"])
def test_a_capacity_that_is_just_enough_is_enough(ranks2: Ranks, transport: str) -> None:
    """It counts the rows of one rank, not those of all."""
    assert ranks2.run(_exactly_enough, transport) == [[T, T], [T, T]]


# --- drop --------------------------------------------------------------------------------------------------


def _drop_received(transport: str) -> dict[str, Any]:
    """All tokens of both ranks to rank 0, which takes 5 of 16 rows."""
    bootstrap(overflow="drop", recv_capacity_per_rank=5, transport=transport)
    buffer = EpBuffer()
    tokens, _, weights = inputs()
    rows, row_weights, counts = ep_dispatch(buffer, tokens, torch.tensor(TO_RANK_0), weights)
    assert rows.shape == (5, H)
    out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
    out.sum().backward()
    kept: Any = weights.grad != 0
    torch.testing.assert_close(out, tokens * (weights * kept).sum(1, keepdim=True))
    torch.testing.assert_close(tokens.grad, (weights * kept).sum(1, keepdim=True).expand(T, H))
    found = {
        "counts": counts.tolist(),
        "total": buffer.total_recv_tokens.tolist(),
        "dropped": buffer.dropped.tolist(),
        "kept": kept.tolist(),
    }
    assert buffer.dropped.device == tokens.device
    ep_finalize()
    return found


@pytest.mark.parametrize("transport", [*BOUNDED, "all_to_all"])
def test_rows_beyond_the_capacity_are_dropped_and_counted(ranks2: Ranks, transport: str) -> None:
    first, second = ranks2.run(_drop_received, transport)
    assert first["counts"] == [5, 0], "they sum to the capacity"
    assert first["total"] == [16], "before the drop"
    assert first["dropped"] == [11]
    assert second["counts"] == [0, 0]
    assert second["dropped"] == [0]
    assert first["kept"] == [[True, False]] * 4, "expert 0, rows in rank order"
    assert second["kept"] == [[True, False]] + [[False, False]] * 3


def _drop_sent() -> dict[str, Any]:
    bootstrap(overflow="drop", rows_per_peer=3, recv_capacity_per_rank=16)
    buffer = EpBuffer()
    tokens, _, weights = inputs()
    rows, row_weights, counts = ep_dispatch(buffer, tokens, torch.tensor(TO_RANK_0), weights)
    out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
    torch.testing.assert_close(out[:3], tokens[:3])
    assert not out[3].any(), "the last token had no room"
    out.sum().backward()
    assert not tokens.grad[3].any()  # type: ignore[index]
    found = {"counts": counts.tolist(), "total": buffer.total_recv_tokens.tolist(), "dropped": buffer.dropped.tolist()}
    ep_finalize()
    return found


def test_rows_that_a_peer_does_not_take_are_dropped_and_counted(ranks2: Ranks) -> None:
    first, second = ranks2.run(_drop_sent)
    assert first == {"counts": [6, 6], "total": [16], "dropped": [4]}
    assert second == {"counts": [0, 0], "total": [0], "dropped": [0]}


def _drop_bad_id() -> tuple[list[int], bool]:
    """Nobody reads the table: a bad id is masked, and touches no memory."""
    bootstrap(overflow="drop", recv_capacity_per_rank=16)
    buffer = EpBuffer()
    tokens, _, weights = inputs()
    ids = torch.tensor([[0, LOCAL * 2 + dist.get_rank()]] * T)
    rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights)
    out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
    torch.testing.assert_close(out, tokens * 0.5)
    out.sum().backward()
    ep_finalize()
    return counts.tolist(), bool(weights.grad[:, 1].any())  # type: ignore[index]


def test_bad_ids_are_masked_under_drop(ranks2: Ranks) -> None:
    assert ranks2.run(_drop_bad_id) == [([8, 0], False), ([0, 0], False)]


def _drop_too_many_tokens() -> None:
    bootstrap(overflow="drop", recv_capacity_per_rank=16)
    count = T + 1 if dist.get_rank() else T
    ep_prepare(EpBuffer(), torch.zeros(count, K, dtype=torch.int64))


def _raise_too_many_tokens() -> None:
    _finally(_drop_too_many_tokens)


def test_more_tokens_than_the_buffers_hold_is_an_error_even_under_drop(ranks2: Ranks) -> None:
    other, guilty = ranks2.failures(_raise_too_many_tokens)
    assert "ValueError" in guilty.bases
    assert "found: 5 tokens on rank 1" in guilty.text
    assert "expected: at most max_tokens_per_rank = 4" in guilty.text
    assert "rank 1 reported" in other.text, "the peer does not wait for the timeout"
    assert "5 tokens on rank 1" in other.text


# --- grow --------------------------------------------------------------------------------------------------


def _grow(settings: dict[str, Any]) -> list[int]:
    bootstrap(overflow="grow", **settings)
    buffer = EpBuffer()
    rooms = []
    pending = None
    for count in (T, 70, 1, 0, 200):
        mine = count if dist.get_rank() else 1
        tokens = torch.randn(mine, H, requires_grad=True)
        weights = torch.rand(mine, K, requires_grad=True)
        ids = torch.randint(0, LOCAL * 2, (mine, K))
        rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
        out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
        torch.testing.assert_close(out, tokens * weights.sum(1, keepdim=True))
        if pending is not None:  # a backward pass whose forward ran before the buffers grew
            pending[0].sum().backward()
            torch.testing.assert_close(pending[1].grad, pending[2].sum(1, keepdim=True).expand_as(pending[1]))
        pending = out, tokens, weights.detach()
        rooms.append(buffer.context.exchange.room() or 0)
        assert int(buffer.dropped) == 0
    ep_finalize()
    return rooms


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recv_capacity_per_rank": 8},
        {"transport": "copy_engine_exact"},
        {"rows_per_peer": 3},
    ],
    ids=str,
)
def test_buffers_grow_on_every_rank(ranks2: Ranks, settings: dict[str, Any]) -> None:
    first, second = ranks2.run(_grow, settings)
    assert first == second
    assert first[0] <= T or settings.get("rows_per_peer"), "nothing grows while there is room"
    assert first == sorted(first)
    assert first[-1] > first[0]


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_room_that_no_rank_needs_is_cut_off(rows: int) -> None:
    from fsdp_symm.experts.context import _without_spare_room
    from fsdp_symm.experts.exchange import Prepared

    ranks, room, width = 3, 7, 2
    token = torch.arange(rows).unsqueeze(1)
    first = torch.arange(ranks)
    wanted = torch.rand(rows, ranks, generator=torch.Generator().manual_seed(rows)) < 0.7
    home = torch.where(wanted, first * room + token, -1)
    ids = torch.arange(ranks * room * width, dtype=torch.int32).view(-1, width)
    cut = _without_spare_room(Prepared(home, ids, ids), rows)
    assert torch.equal(cut.home, torch.where(wanted, first * rows + token, -1))
    kept = torch.cat([torch.arange(rank * room, rank * room + rows) for rank in range(ranks)])
    assert torch.equal(cut.ids, ids[kept])
    assert (cut.home is home) == (rows == room), "nothing is touched where no row is spare"
