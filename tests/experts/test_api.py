"""The functions: what Transformer Engine's own tests ask of them, and what they promise beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_symm.experts import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
    is_symm_backed,
    ops,
    symm_mem_alloc,
)
from fsdp_symm.experts.api import current_routing
from fsdp_symm.experts.context import Routing
from tests.harness import Ranks

T, K, H, LOCAL = 4, 2, 32, 2
TRANSPORTS = ["copy_engine", "copy_engine_exact", "all_to_all"]


def bootstrap(**changes: Any) -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    settings: dict[str, Any] = {
        "ep_group": group,
        "num_experts": LOCAL * group.size(),
        "max_tokens_per_rank": T,
        "hidden_dim": H,
        "num_topk": K,
        "max_token_dtype": torch.float32,
        "timeout_s": 20.0,
    }
    ep_bootstrap(**{**settings, **changes})
    return group


def identity_routing(rank: int, size: int) -> torch.Tensor:
    """Balanced: every expert gets as many routes, and no token an expert twice."""
    flat = torch.arange(rank * T * K, (rank + 1) * T * K)
    return (flat % (LOCAL * size)).view(T, K)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(100 * seed + rank)
    tokens = torch.randn(T, H, generator=random).to(dtype).requires_grad_()
    return tokens, identity_routing(rank, size), torch.full((T, K), 1 / K).requires_grad_()


def poison_slots(buffer: EpBuffer) -> None:
    dist.barrier()
    arena = getattr(buffer.context.exchange, "arena", None)
    if arena is not None:
        arena.segment.data(arena.segment.rank, 0, arena.slot_nbytes).fill_(255)


# --- prepare, dispatch, combine ----------------------------------------------------------------------------


def _prepare(transport: str) -> tuple[list[int], int, int]:
    bootstrap(transport=transport)
    buffer = EpBuffer()
    counts = ep_prepare(buffer, identity_routing(dist.get_rank(), dist.get_world_size()))
    assert counts.dtype == torch.int64
    total = counts.sum()
    dist.all_reduce(total)
    found = counts.tolist(), int(total), int(buffer.total_recv_tokens)
    ep_finalize()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prepare_counts_every_route_once(ranks2: Ranks, transport: str) -> None:
    assert ranks2.run(_prepare, transport) == [([4, 4], 2 * T * K, 8)] * 2


def _identity(transport: str, dtype: torch.dtype, weighted_by: str) -> None:
    bootstrap(transport=transport)
    buffer = EpBuffer(payload_dtype=dtype)
    tokens, ids, weights = inputs(dtype)
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    if weighted_by == "combine":
        out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
    else:
        out = ep_combine(buffer, (rows.float() * row_weights.unsqueeze(1)).to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out, tokens, rtol=1e-2, atol=1e-2)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(tokens.grad, torch.ones_like(tokens), rtol=1e-2, atol=1e-2)
    # d(sum out)/d(weight) is the sum of the token's row, whoever applies the weight.
    torch.testing.assert_close(weights.grad, tokens.float().sum(1, keepdim=True).expand(T, K), rtol=2e-2, atol=5e-2)
    ep_finalize()


@pytest.mark.parametrize("weighted_by", ["combine", "caller"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_identity_round_trip(ranks2: Ranks, transport: str, dtype: torch.dtype, weighted_by: str) -> None:
    ranks2.run(_identity, transport, dtype, weighted_by)


def _unweighted(transport: str) -> None:
    bootstrap(transport=transport)
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    rows, _, counts = ep_dispatch(buffer, tokens, ids, weights)
    assert rows.shape == (int(counts.sum()), H)
    (0.5 * rows.square().sum()).backward()
    torch.testing.assert_close(tokens.grad, K * tokens)
    torch.testing.assert_close(weights.grad, torch.zeros_like(weights))  # the loss used no weight
    torch.testing.assert_close(ep_combine(buffer, rows), K * tokens)
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dispatch_vjp_and_unweighted_combine(ranks4: Ranks, transport: str) -> None:
    ranks4.run(_unweighted, transport)


def _subsets(transport: str) -> None:
    """Backward for every subset of used outputs."""
    bootstrap(transport=transport)
    for use_rows in (True, False):
        for use_weights in (True, False):
            if not (use_rows or use_weights):
                continue
            buffer = EpBuffer()
            tokens, ids, weights = inputs()
            rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
            loss = torch.zeros(())
            loss = loss + rows.sum() if use_rows else loss
            loss = loss + row_weights.square().sum() if use_weights else loss
            loss.backward()
            torch.testing.assert_close(tokens.grad, torch.full_like(tokens, K if use_rows else 0.0))
            torch.testing.assert_close(weights.grad, 2 * weights if use_weights else torch.zeros_like(weights))
    # Ranks whose losses use different outputs wait for each other all the same.
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    (rows if dist.get_rank() == 0 else row_weights).sum().backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_backward_of_any_subset_of_outputs(ranks2: Ranks, transport: str) -> None:
    ranks2.run(_subsets, transport)


def _frozen(which: str) -> None:
    bootstrap()
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    frozen = tokens if which == "tokens" else weights
    frozen.requires_grad_(False)
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    ep_combine(buffer, rows, recv_topk_weights=row_weights).sum().backward()
    assert frozen.grad is None
    other: Any = weights if which == "tokens" else tokens
    assert other.grad.any()
    ep_finalize()


@pytest.mark.parametrize("which", ["tokens", "weights"])
def test_frozen_inputs(ranks2: Ranks, which: str) -> None:
    ranks2.run(_frozen, which)


def _bias_and_masks(transport: str) -> None:
    """Experts with a bias answer padding rows too; a masked route has no gradient at all."""
    bootstrap(transport=transport)
    buffer = EpBuffer(alignment=8)
    tokens, ids, weights = inputs()
    ids[1:, 0] = -1  # leaves 1 + 4 routes a rank
    bias = torch.zeros(H, requires_grad=True)
    rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights)
    assert rows.shape[0] == int(counts.sum()) > int(buffer.total_recv_tokens) - 1
    real = int((current_routing(buffer).source >= 0).sum())
    assert real < rows.shape[0], "there is padding"
    assert not rows[current_routing(buffer).source < 0].any(), "and it is zero"
    poisoned = torch.where(current_routing(buffer).source.unsqueeze(1) < 0, float("nan"), rows + bias)
    out = ep_combine(buffer, poisoned, recv_topk_weights=row_weights)
    torch.testing.assert_close(out, tokens * (weights * (ids >= 0)).sum(1, keepdim=True))
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((H,), real / K))
    grad: Any = weights.grad
    assert torch.equal(grad[1:, 0], torch.zeros(T - 1)), "exactly"
    assert grad[:, 1].all()
    own = row_weights.detach().requires_grad_()  # weights that do not go home
    ep_combine(buffer, poisoned.detach(), recv_topk_weights=own).sum().backward()
    assert torch.isfinite(own.grad).all()  # type: ignore[arg-type]
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_padding_and_masked_routes_take_no_part(ranks2: Ranks, transport: str) -> None:
    ranks2.run(_bias_and_masks, transport)


def _second_order() -> None:
    """dispatch and combine are each other's backward, so gradients have gradients."""
    bootstrap()
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    out = ep_combine(buffer, rows.square(), recv_topk_weights=row_weights)
    (grad,) = torch.autograd.grad(out.sum(), tokens, create_graph=True)
    torch.testing.assert_close(grad, 2 * tokens)
    grad.sum().backward()
    torch.testing.assert_close(tokens.grad, torch.full_like(tokens, 2.0))
    ep_finalize()


def test_second_derivatives(ranks2: Ranks) -> None:
    ranks2.run(_second_order)


def _second_order_apart() -> None:
    """Each rank's second loss uses another first gradient; the exchanges of both are made on both."""
    bootstrap()
    buffer, rank = EpBuffer(), dist.get_rank()
    tokens, ids, weights = inputs()
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    out = ep_combine(buffer, rows.square(), recv_topk_weights=row_weights)
    first = torch.autograd.grad(out.sum(), (tokens, weights), create_graph=True)
    first[rank].sum().backward()
    topk = ids.shape[1]
    expected = torch.full_like(tokens, 2.0) if rank == 0 else 2.0 * topk * tokens.detach()
    torch.testing.assert_close(tokens.grad, expected)
    ep_finalize()


def test_second_derivatives_of_different_gradients_on_each_rank(ranks2: Ranks) -> None:
    ranks2.run(_second_order_apart)


# --- many steps, many microbatches -------------------------------------------------------------------------


def _stable(transport: str) -> None:
    bootstrap(transport=transport, max_token_dtype=torch.bfloat16)
    buffer = EpBuffer()
    seen = []
    for _ in range(5):
        tokens, ids, weights = inputs(torch.bfloat16)
        rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
        out = ep_combine(buffer, torch.tanh(rows), recv_topk_weights=row_weights)
        out.backward(tokens.detach())
        seen.append((out.detach(), tokens.grad, weights.grad))
        poison_slots(buffer)
    for again in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, seen[0], strict=True))
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_five_iterations_are_bit_equal(ranks4: Ranks, transport: str) -> None:
    ranks4.run(_stable, transport)


def _one_f_one_b(transport: str, num_buffers: int) -> None:
    """F0 F1 B0 F2 B1 B2; with fewer buffers than microbatches the routing is kept by hand."""
    bootstrap(transport=transport)
    buffers = [EpBuffer() for _ in range(num_buffers)]
    alive: dict[int, Any] = {}

    def forward(i: int) -> None:
        tokens, ids, weights = inputs(seed=i)
        rows, row_weights, _ = ep_dispatch(buffers[i % num_buffers], tokens, ids.roll(i, 0), weights)
        alive[i] = tokens, weights, rows * 2, row_weights, buffers[i % num_buffers].routing, ids.roll(i, 0)

    def finish(i: int) -> None:
        tokens, weights, answers, row_weights, kept, _ = alive.pop(i)
        buffer = buffers[i % num_buffers]
        out = ep_combine(buffer, answers, recv_topk_weights=row_weights, routing=kept if num_buffers < 3 else None)
        torch.testing.assert_close(out, 2 * tokens)
        out.sum().backward()
        torch.testing.assert_close(tokens.grad, torch.full_like(tokens, 2.0))
        torch.testing.assert_close(weights.grad, 2 * tokens.detach().sum(1, keepdim=True).expand(T, K))

    for action, i in [(forward, 0), (forward, 1), (finish, 0), (forward, 2), (finish, 1), (finish, 2)]:
        action(i)
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_buffers", [3, 1])
def test_three_microbatches_in_flight(ranks2: Ranks, transport: str, num_buffers: int) -> None:
    ranks2.run(_one_f_one_b, transport, num_buffers)


def _token_counts_change(transport: str) -> None:
    bootstrap(transport=transport)
    buffer, rank = EpBuffer(), dist.get_rank()
    for count in (4, 0, 1, 3, 2):
        mine = max(count - rank, 0)
        tokens = torch.randn(mine, H, requires_grad=True)
        weights = torch.rand(mine, K, requires_grad=True)
        ids = torch.randint(0, LOCAL * 2, (mine, K))
        rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
        out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
        torch.testing.assert_close(out, tokens * weights.sum(1, keepdim=True))
        assert out.grad_fn is not None, "also without a row"
        out.sum().backward()
        assert tokens.grad is not None
        assert tokens.grad.shape == (mine, H)
    ep_finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_token_counts_change_every_call(ranks2: Ranks, transport: str) -> None:
    ranks2.run(_token_counts_change, transport)


def _zero_receive(transport: str) -> list[int]:
    bootstrap(transport=transport)
    buffer = EpBuffer()
    tokens, _, weights = inputs()
    ids = torch.tensor([[0, 1]] * T, dtype=torch.int32)
    rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights)
    if dist.get_rank():
        assert rows.shape == (0, H)
        assert rows.data_ptr() == 0
        assert rows.grad_fn is not None
    out = ep_combine(buffer, rows * 3, recv_topk_weights=row_weights)
    out.sum().backward()
    torch.testing.assert_close(tokens.grad, torch.full_like(tokens, 3.0))
    ep_finalize()
    return counts.tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_receives_nothing(ranks2: Ranks, transport: str) -> None:
    assert ranks2.run(_zero_receive, transport) == [[2 * T, 2 * T], [0, 0]]


# --- prepared routing, the caller's memory, zero-copy ------------------------------------------------------


def _prepared_once() -> None:
    bootstrap()
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    ep_prepare(buffer, ids)
    kept = buffer.routing
    for _ in range(2):  # a recomputation needs no second exchange of ids
        rows, row_weights, _ = ep_dispatch(buffer, tokens, None, weights)
        assert buffer.routing is kept
        torch.testing.assert_close(ep_combine(buffer, rows, recv_topk_weights=row_weights), tokens)
    ep_finalize()


def test_a_prepared_buffer_is_dispatched_without_ids(ranks2: Ranks) -> None:
    ranks2.run(_prepared_once)


def _callers_memory() -> None:
    capacity = 16
    bootstrap(recv_capacity_per_rank=capacity)
    buffer = EpBuffer()
    mine = torch.full((capacity, H), float("nan"))
    for _ in range(2):
        tokens, ids, weights = inputs()
        rows, row_weights, counts = ep_dispatch(buffer, tokens, ids, weights, recv_tokens=mine)
        assert rows.data_ptr() == mine.data_ptr()
        assert not rows[int(counts.sum()) :].any(), "the tail is zero"
        out = ep_combine(buffer, rows * 1, recv_topk_weights=row_weights)
        torch.testing.assert_close(out, tokens)
        out.sum().backward()
        torch.testing.assert_close(tokens.grad, torch.ones_like(tokens))
        torch.testing.assert_close(weights.grad, tokens.detach().sum(1, keepdim=True).expand(T, K))
        assert not mine.requires_grad
        mine.fill_(float("nan"))
    ep_finalize()


def test_rows_in_the_callers_memory(ranks2: Ranks) -> None:
    ranks2.run(_callers_memory)


def _zero_copy(dtype: torch.dtype) -> None:
    group = bootstrap(max_token_dtype=dtype)
    symmetric = symm_mem_alloc((T, H), dtype, group)
    assert is_symm_backed(symmetric)
    assert is_symm_backed(symmetric[:2]), "its first rows too"
    assert not is_symm_backed(symmetric[1:])
    assert not is_symm_backed(torch.empty(T, H))
    buffer = EpBuffer()
    for step in range(4):
        tokens, ids, weights = inputs(dtype, seed=step)
        count = T - step * dist.get_rank()  # fewer rows than the tensor has
        answers = []
        for source in ("staged", "in place"):
            mine = tokens.detach()[:count].clone()
            if source == "in place":
                symmetric[:count].copy_(mine)
                mine = symmetric[:count]
            mine.requires_grad_()
            handed = buffer.context.exchange.arena.stats().handed_out["dispatch"]  # type: ignore[attr-defined]
            rows, row_weights, _ = ep_dispatch(buffer, mine, ids[:count], weights[:count])
            assert buffer.context.exchange.arena.stats().handed_out["dispatch"] == handed + 2  # type: ignore[attr-defined]
            if source == "in place":
                with torch.no_grad():
                    symmetric.fill_(float("nan"))  # every peer has read it
            out = ep_combine(buffer, rows, recv_topk_weights=row_weights)
            (grad,) = torch.autograd.grad(out.sum(), mine)
            answers.append((rows.detach(), out.detach(), grad))
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    ep_finalize()
    assert not is_symm_backed(symmetric)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_in_symmetric_memory_are_read_in_place(ranks2: Ranks, dtype: torch.dtype) -> None:
    ranks2.run(_zero_copy, dtype)


def _in_place_moves_no_token_through_a_slot() -> list[int]:
    group = bootstrap()
    symmetric = symm_mem_alloc((T, H), torch.float32, group)
    buffer = EpBuffer()
    _, ids, weights = inputs()
    arena: Any = buffer.context.exchange
    asked: list[int] = []
    acquire = arena.arena.acquire_lease
    arena.arena.acquire_lease = lambda lane, nbytes, **kw: asked.append(nbytes) or acquire(lane, nbytes, **kw)
    ep_dispatch(buffer, symmetric, ids, weights)
    ep_dispatch(buffer, symmetric.clone(), ids, weights)
    ep_finalize()
    return asked


def test_zero_copy_tokens_take_no_slot_bytes(ranks2: Ranks) -> None:
    for ids, in_place, _, staged in ranks2.run(_in_place_moves_no_token_through_a_slot):
        assert ids > 0
        assert in_place == T * K * 4, "only the weights"
        assert staged >= T * H * 4 + T * K * 4


def _staged_after_all(settings: dict[str, Any], own_group: bool) -> None:
    """Symmetric tensors that cannot be read in place take the staged path, with the same result."""
    group = bootstrap(**settings)
    if own_group:
        pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[dist.get_rank() // 2]
    symmetric = symm_mem_alloc((T, H), torch.float32, group)
    tokens, ids, weights = inputs()
    symmetric.copy_(tokens.detach())
    exchange: Any = EpBuffer().context.exchange
    assert exchange._in_place(symmetric, exchange.layout(T * dist.get_world_size(), None)) is None
    buffer = EpBuffer()
    rows, row_weights, _ = ep_dispatch(buffer, symmetric, ids, weights)
    torch.testing.assert_close(ep_combine(buffer, rows, recv_topk_weights=row_weights), tokens)
    ep_finalize()


def test_symmetric_tokens_of_packed_rows_are_staged(ranks2: Ranks) -> None:
    ranks2.run(_staged_after_all, {"rows_per_peer": T}, False)


def test_symmetric_tokens_of_another_group_are_staged(ranks4: Ranks) -> None:
    ranks4.run(_staged_after_all, {}, True)


def _too_small() -> list[bool]:
    """Peers fetch ``max_tokens_per_rank`` rows, whatever a rank has: a tensor without that room is staged."""
    group = bootstrap(max_tokens_per_rank=T + 1)
    small, roomy = (symm_mem_alloc((n, H), torch.float32, group) for n in (T, T + 1))
    buffer = EpBuffer()
    tokens, ids, weights = inputs()
    in_place = []
    for memory in (small, roomy):
        memory[:T].copy_(tokens.detach())
        rows, row_weights, _ = ep_dispatch(buffer, memory[:T], ids, weights)
        torch.testing.assert_close(ep_combine(buffer, rows, recv_topk_weights=row_weights), tokens)
        exchange: Any = buffer.context.exchange
        layout = exchange.layout(2 * (T + 1), torch.empty(0))
        in_place.append(exchange._in_place(memory[:T], layout) is not None)
    ep_finalize()
    return in_place


def test_symmetric_tokens_need_room_for_the_maximum(ranks2: Ranks) -> None:
    assert ranks2.run(_too_small) == [[False, True]] * 2


def _half_symmetric() -> None:
    group = bootstrap()
    symmetric = symm_mem_alloc((T, H), torch.float32, group)
    tokens, ids, weights = inputs()
    symmetric.copy_(tokens.detach())
    try:
        ep_dispatch(EpBuffer(), symmetric if dist.get_rank() else tokens.detach(), ids, weights)
    finally:
        ep_finalize()


def test_ranks_that_disagree_about_zero_copy_are_told(ranks2: Ranks) -> None:
    failures = ranks2.failures(_half_symmetric)
    text = "\n".join(f.text for f in failures)
    assert "issued different collectives" in text
    assert "tokens in place" in text
    assert "staged tokens" in text


# --- nothing is read on the host ---------------------------------------------------------------------------

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")


class _NoHostReads(TorchDispatchMode):
    """Notes every operator that brings a value, or a size that depends on one, to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(HOST_READS):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.patches = pytest.MonkeyPatch()
        for name in ("tolist", "item", "cpu", "numpy"):  # of a CPU tensor no operator tells
            self.patches.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def _noting(self, name: str, method: Any) -> Any:
        return lambda tensor, *args: self.found.append(name) or method(tensor, *args)

    def __exit__(self, *error: Any) -> None:
        self.patches.undo()
        super().__exit__(*error)


def _body(op: Any) -> Any:
    """The function behind a custom operator (``torch.library.CustomOpDef._init_fn``, read in torch 2.13 and 2.14)."""
    return op._init_fn


def _host_reads(transport: str, overflow: str, capacity: int | None) -> list[str]:
    """The operators' own bodies: a dispatch mode does not look into an operator."""
    bootstrap(transport=transport, overflow=overflow, recv_capacity_per_rank=capacity)
    buffer = EpBuffer()
    key = buffer.context.key
    tokens, ids, weights = (t.detach() for t in inputs())
    with _NoHostReads() as mode:
        found = Routing(*_body(ops.prepare)(ids, key, 1, buffer.capacity))
        path = found.home, found.table, found.source, found.slots
        rows, scale = _body(ops.dispatch)(tokens, weights, *path, key)
        out, _ = _body(ops.combine)(rows, scale, scale, *path, key)
    torch.testing.assert_close(out, tokens)
    ep_finalize()
    return mode.found


def test_padded_dispatch_and_combine_read_nothing_on_the_host(ranks2: Ranks) -> None:
    assert ranks2.run(_host_reads, "copy_engine", "drop", 32) == [[], []]


@pytest.mark.parametrize(
    ("transport", "overflow", "capacity"),
    [("copy_engine", "drop", None), ("copy_engine", "raise", 32), ("copy_engine_exact", "grow", 32)],
)
def test_the_others_do(ranks2: Ranks, transport: str, overflow: str, capacity: int | None) -> None:
    """The documented price; also proves that the test above can fail."""
    expected = {"drop": "_local_scalar_dense", "raise": "tolist", "grow": "cpu"}[overflow]
    assert all(expected in names for names in ranks2.run(_host_reads, transport, overflow, capacity))


# --- life ----------------------------------------------------------------------------------------------------


def _life() -> list[bool]:
    found = [is_ep_bootstrapped()]
    ep_finalize()  # nothing to give back is fine
    for _ in range(2):
        bootstrap()
        found.append(is_ep_bootstrapped())
        ep_finalize()
        ep_finalize()
        found.append(is_ep_bootstrapped())
    bootstrap()  # and left behind: the harness destroys the process group
    return found


def test_bootstrap_and_finalize_can_be_repeated(ranks2: Ranks) -> None:
    expected = [False, True, False, True, False]
    assert ranks2.run(_life) == [expected] * 2
    assert ranks2.run(_life) == [expected] * 2, "a context of a destroyed group does not count"
