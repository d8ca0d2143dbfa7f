"""Token layouts: which row goes where, in pure tensor code. Nothing here communicates, and nothing reads a value on the
host unless it is asked to size its result.

Every layout is a table of row numbers with -1 for "no row", and every movement is one of two functions over such a
table: :func:`gather_rows` (a row is copied) and :func:`sum_rows` (rows are added in fp32, in the table's order). They
are each other's transpose, which is why the backward pass needs no code of its own. Row numbers are int64 throughout.

On GPUs the same functions are kernels, in ``device_rows``, ``device_routes`` and ``device_arrange``; what is written
here is what CPUs do, and what the kernels are tested against.

Legend: T tokens of this rank, H hidden width, K experts a token, E experts of the model, R ranks of the expert group,
L = E / R experts of a rank (rank r owns r * L .. r * L + L - 1), C rows that one rank may send to another, N rows of a
rank-major buffer (R * C when padded), M rows of an expert-major buffer.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

_HAS_KERNELS = find_spec("triton") is not None


class Route(NamedTuple):
    """Where this rank's tokens go: one row for each (token, rank), however many experts of the rank want it.

    Attributes:
        home: int64 ``[T, R]``, the row of (token, rank) in the rank-major buffer, -1: not sent.
        facts: int64 ``[R + E + 1]``: :attr:`rows`, :attr:`experts` and :attr:`invalid`, one after the other.
        narrowed: int32 ``[T, K]``, see :func:`narrow`.
    """

    home: torch.Tensor
    facts: torch.Tensor
    narrowed: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """int64 ``[R]``, rows that each rank should get, before any is dropped for want of room."""
        return self.facts[: self.home.shape[1]]

    @property
    def experts(self) -> torch.Tensor:
        """int64 ``[E]``, routes (token, k) to each expert, before any drop."""
        return self.facts[self.home.shape[1] : -1]

    @property
    def invalid(self) -> torch.Tensor:
        """int64 ``[1]``, routes whose expert id is E or more; they are masked like -1."""
        return self.facts[-1:]


class Arrangement(NamedTuple):
    """How the rows that a rank received lie before its experts.

    Attributes:
        counts: int64 ``[L]``, rows of each expert, padded to the alignment; they lie one after the other from row 0.
        source: int64 ``[M]``, the route (``row * K + k``) behind each expert-major row, -1: padding or tail.
        slots: int64 ``[N, K]``, the expert-major row of each route, -1: not of this rank, masked or dropped.
        total: int64 ``[1]``, expert-major rows that were needed, padding included, before any drop.
        dropped: int64 ``[1]``, routes that have no row, here or since their way here.
    """

    counts: torch.Tensor
    source: torch.Tensor
    slots: torch.Tensor
    total: torch.Tensor
    dropped: torch.Tensor


def on_gpu(*tensors: torch.Tensor) -> bool:
    """Whether kernels can take all of these."""
    return _HAS_KERNELS and all(tensor.is_cuda for tensor in tensors)


def route(
    ids: torch.Tensor, *, num_experts: int, num_ranks: int, rows_per_rank: int | None, by_token: bool = False
) -> Route:
    """Decide which (token, rank) pairs travel, and give each a row.

    Args:
        ids: int32 or int64 ``[T, K]``, global expert ids; negative: masked. Duplicates and any strides are fine.
        num_experts, num_ranks: E, R.
        rows_per_rank: C; the rows for rank r start at ``r * C`` and what does not fit is dropped, last tokens first.
            ``None``: as many as there are, packed without gaps.
        by_token: the row of token t is t instead of the next free one. Needs no packing, and one copy of the tokens
            serves all ranks; every rank then needs T rows.
    """
    if on_gpu(ids):
        from fsdp_symm.experts import device_routes

        return device_routes.route(
            ids, num_experts=num_experts, num_ranks=num_ranks, rows_per_rank=rows_per_rank, by_token=by_token
        )
    narrowed = narrow(ids, num_experts)
    ids = ids.long()
    valid = (ids >= 0) & (ids < num_experts)
    invalid = (ids >= num_experts).sum().view(1)
    owner = torch.where(valid, ids // (num_experts // num_ranks), num_ranks)
    wanted = (owner.unsqueeze(-1) == torch.arange(num_ranks, device=ids.device)).any(1)  # [T, R]
    experts = _count(torch.where(valid, ids, num_experts).flatten(), num_experts)
    rows = wanted.sum(0)
    if by_token:
        position = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1).expand_as(wanted)
        rows = torch.full_like(rows, ids.shape[0])
    else:
        position = wanted.long().cumsum(0) - 1
    if rows_per_rank is None:
        start = rows.cumsum(0) - rows
        fits = wanted
    else:
        start = torch.arange(num_ranks, device=ids.device) * rows_per_rank
        fits = wanted & (position < rows_per_rank)
    facts = torch.cat([rows, experts, invalid])
    return Route(torch.where(fits, start + position, -1), facts, narrowed)


def narrow(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Expert ids as int32, everything that is none as -1: int64 masks such as ``iinfo.min`` would wrap to an expert."""
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(torch.int32)


def _count(values: torch.Tensor, bins: int) -> torch.Tensor:
    """How often 0 .. bins - 1 occur; ``bins`` itself counts as "none". Integer sums, so the order does not matter."""
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values))[:bins]


def invert(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The transpose of a table of rows: for each row 0 .. ``num_rows`` - 1 the flat position that names it, or -1.

    No row may be named twice.
    """
    if on_gpu(table):
        from fsdp_symm.experts import device_routes

        return device_routes.invert(table if table.dim() == 2 else table.reshape(-1, 1), num_rows, 1)
    flat = table.flatten()
    positions = torch.arange(flat.numel(), device=flat.device)
    result = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=flat.device)
    return result.scatter_(0, torch.where(flat >= 0, flat, num_rows), positions)[:num_rows]  # "none" goes past the end


def tokens_of(home: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 ``[N]``: the token behind each row of the rank-major buffer, -1: none."""
    if on_gpu(home):
        from fsdp_symm.experts import device_routes

        return device_routes.invert(home, num_rows, max(home.shape[1], 1))
    return torch.div(invert(home, num_rows), max(home.shape[1], 1), rounding_mode="floor")


def to_rank_major(tokens: torch.Tensor, home: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[T, H]`` -> ``[N, H]``, unused rows zero; view it as ``[R, C, H]`` when rows are padded."""
    return gather_rows(tokens, tokens_of(home, num_rows))


def from_rank_major(rows: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """``[N, H]`` -> ``[T, H]``: what all ranks answered for a token, summed in rank order; unused rows are not read."""
    return sum_rows(rows, home)


def arrange(
    ids: torch.Tensor,
    *,
    first_expert: int,
    num_local: int,
    alignment: int = 1,
    capacity: int | None = None,
    wanted: torch.Tensor | None = None,
) -> Arrangement:
    """Sort received rows by local expert; within an expert by row, then by k.

    Args:
        ids: int32 or int64 ``[N, K]``, global expert ids of each received row; foreign and negative ones are ignored.
        first_expert, num_local: which experts are local (L of them).
        alignment: each expert's rows are padded to a multiple of it, for grouped GEMMs.
        capacity: M. ``None``: as many rows as needed, which reads one number on the host.
        wanted: int64, for every rank its routes to each local expert, whether they came or not; ``None``: those that
            came.
    """
    if on_gpu(ids):
        from fsdp_symm.experts import device_arrange

        if device_arrange.arrangeable(ids, num_local, alignment, capacity):
            return device_arrange.arrange(ids, first_expert, num_local, alignment, capacity, wanted)
    local = ids.long() - first_expert
    key = torch.where((local >= 0) & (local < num_local), local, num_local).flatten()
    real = _count(key, num_local)
    counts = align_up(real, alignment)
    ends = counts.cumsum(0)
    num_rows = int(counts.sum()) if capacity is None else capacity
    order = torch.argsort(key, stable=True)
    expert = key[order]
    # A route's row: where its expert's zone starts, plus how many routes of that expert come before it.
    shift = torch.cat([(ends - counts) - (real.cumsum(0) - real), ends.new_zeros(1)])
    row = torch.arange(key.numel(), device=key.device) + shift[expert]
    mine = expert < num_local
    row = torch.where(mine & (row < num_rows), row, -1)
    slots = torch.empty_like(row).scatter_(0, order, row).view(ids.shape)
    kept = ends.clamp(max=num_rows)
    counts = kept.diff(prepend=kept.new_zeros(1))
    wanted = real if wanted is None else wanted.sum(0)
    total, dropped = align_up(wanted, alignment).sum(), wanted.sum() - (slots >= 0).sum()
    return Arrangement(counts, invert(slots, num_rows), slots, total.view(1), dropped.view(1))


def align_up(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Counts padded to multiples of the alignment."""
    return (counts + alignment - 1) // alignment * alignment


def gather_rows(
    rows: torch.Tensor, index: torch.Tensor, *, fill: float = 0, out: torch.Tensor | None = None, divisor: int = 1
) -> torch.Tensor:
    """``out[i] = rows[index[i] // divisor]``, and ``fill`` where the index is -1.

    Args:
        rows: ``[N, F]``; rows that no index names are never read into the result, whatever they hold.
        index: int64 ``[M]``.
        fill: the value of missing rows.
        out: where to write ``[M, F]``; contiguous.
        divisor: K where the index numbers routes and the rows belong to tokens.
    """
    if out is None:
        out = rows.new_empty((index.shape[0], rows.shape[1]))
    if on_gpu(rows, index, out):
        from fsdp_symm.experts import device_rows

        if device_rows.copyable(rows, index, out):
            return device_rows.gather_rows(rows, index, fill, out, divisor)
    if rows.shape[0] == 0:
        return out.fill_(fill)
    if divisor != 1:
        index = torch.div(index, divisor, rounding_mode="floor")
    torch.index_select(rows, 0, index.clamp(min=0), out=out)
    return out.masked_fill_((index < 0).unsqueeze(1), fill)


def gather_routes(
    tokens: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """``out[m] = tokens[source[m] // K]``, and the weight of route ``source[m]``; zero where that is -1.

    Args:
        tokens: ``[N, F]``.
        weights: ``[N, K]``.
        source: int64 ``[M]``, numbers of routes.
        out: where to write ``[M, F]``; contiguous.

    Returns:
        ``[M]``, in the type of ``weights``.
    """
    if on_gpu(tokens, weights, source, out) and weights.dtype == torch.float32:
        from fsdp_symm.experts import device_rows

        if device_rows.copyable(tokens, source, out):
            return device_rows.gather_routes(tokens, weights, source, out)
    gather_rows(tokens, source, divisor=weights.shape[1], out=out)
    return gather_rows(weights.reshape(-1, 1), source).squeeze(1)


def sum_rows(
    rows: torch.Tensor, index: torch.Tensor, *, scale: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``out[n] = sum over k of scale[index[n, k]] * rows[index[n, k]]``: fp32, k in order, rounded once.

    Args:
        rows: ``[M, F]``; only rows that the index names are read.
        index: int64 ``[N, K]``, -1: no term.
        scale: fp32 ``[M]``.
        out: where to write ``[N, F]``.
    """
    if on_gpu(rows, index):
        from fsdp_symm.experts import device_rows

        if device_rows.summable(rows, index, scale, out):
            out = rows.new_empty((index.shape[0], rows.shape[1])) if out is None else out
            return device_rows.sum_rows(rows, index, scale, out)
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros((index.shape[0], rows.shape[1]), dtype=wide)
    for column in index.unbind(1):
        # A missing row is zero before it is scaled: a factor of zero would not silence a NaN.
        term = gather_rows(rows, column).to(wide)
        if scale is not None:
            term = term * gather_rows(scale.unsqueeze(1), column)
        total += term
    return total.to(rows.dtype) if out is None else out.copy_(total)


def weigh_rows(
    grads: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, source: torch.Tensor, *, with_dots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gradients of ``scale[m] * rows[m]``, in fp32, zero for rows without a route.

    Args:
        grads: ``[M, F]``, gradients of the products.
        rows: ``[M, F]``; padding may hold anything.
        scale: fp32 ``[M]``.
        source: int64 ``[M]``, -1: no route.
        with_dots: whether the gradient of ``scale`` is wanted.

    Returns:
        ``[M, F]`` in the type of ``grads``, and fp32 ``[M]`` (``[0]`` when not wanted). Both can be differentiated
        where torch records gradients; only elsewhere a kernel runs.
    """
    if on_gpu(grads, rows, scale, source) and not torch.is_grad_enabled():
        from fsdp_symm.experts import device_rows

        if device_rows.weighable(grads, rows, scale):
            return device_rows.weigh_rows(grads, rows, scale, source, with_dots)
    real = source >= 0
    weighed = torch.where(real.unsqueeze(1), grads.float() * scale.unsqueeze(1), 0.0).to(grads.dtype)
    if not with_dots:
        return weighed, scale.new_empty(0)
    return weighed, torch.where(real, (grads.float() * rows.float()).sum(-1), 0.0)
