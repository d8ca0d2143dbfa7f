"""Tokens over this package's own wire: rows lie in symmetric memory, and the rank that needs them fetches them.

Padded (``"copy_engine"``), every rank fetches C rows from every other, whatever the router decided, so nothing is read
on the host; one row a (token, rank) keeps that affordable. Where no bound on rows is set, C is the bound on tokens and
rows need no packing at all: one copy of the tokens serves all peers, and each row is at its token's place.
Exact (``"copy_engine_exact"``), the ranks read the counts first and fetch only rows that exist.

A rank's own rows are copied locally and never cross the wire. Answers are summed straight into the slot that the
peers fetch from. Legend as in :mod:`fsdp_symm.experts.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.experts import routing, symmetric
from fsdp_symm.experts.config import EpConfig, refuse
from fsdp_symm.experts.exchange import Layout, PartSpec, Prepared, Traffic
from fsdp_symm.experts.recipe import PART_ALIGNMENT_BYTES, Part, Recipe, empty
from fsdp_symm.experts.registry import TokenExchangeEP
from fsdp_symm.memory.arena import Lease, SymmMemArena
from fsdp_symm.plan import Lane, Ring
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import PullPlan

_SLOTS = 2  # a slot is free at the end of its call; with two, the next call need not wait for slow readers
_RECIPES = 256  # kept; more only come up where the number of rows changes all the time
_FIRST_ROOM = 64  # rows, where the number of tokens is not known beforehand and buffers grow


class WireExchange:
    """:class:`fsdp_symm.experts.exchange.Exchange` in symmetric memory. Construction is collective.

    Raises:
        SymmMemConfigError: no bound on tokens, and buffers that may not grow; or an exact exchange that should drop.
        SymmMemMemoryError: the memory could not be had (raised on all ranks).
    """

    def __init__(self, group: dist.ProcessGroup, config: EpConfig, *, exact: bool) -> None:
        if config.max_tokens_per_rank is None and config.overflow != "grow":
            refuse(
                "copy_engine: the number of tokens has no bound",
                found=f"max_tokens_per_rank=None with overflow={config.overflow!r}",
                expected="a bound that buffers are made for",
                fix="set max_tokens_per_rank, or overflow='grow'",
            )
        if exact and config.overflow == "drop" and config.rows_per_peer is not None:
            refuse(
                "copy_engine_exact: an exact exchange drops no rows on the way",
                found=f"rows_per_peer={config.rows_per_peer} with overflow='drop'",
                expected="no rows_per_peer, or overflow='raise' or 'grow'",
                fix="bound what a rank receives instead: recv_capacity_per_rank",
            )
        self.exact = exact
        self._group = group
        self._config = config
        self._num_ranks, self._rank = group.size(), group.rank()
        self._packed = exact or config.rows_per_peer is not None
        self._room = config.rows_per_peer or config.max_tokens_per_rank or _FIRST_ROOM
        self._recipes: dict[object, Recipe] = {}
        self._bytes_moved = 0
        self._waited_s = 0.0  # in arenas that were given back
        self.arena = self._make_arena()

    def _make_arena(self) -> SymmMemArena:
        config, room = self._config, self._room
        ids, weights = config.num_topk * 4, config.num_topk * 4
        row = config.hidden_dim * config.payload_dtype.itemsize + weights
        gaps = 3 * PART_ALIGNMENT_BYTES
        table = (self._num_ranks + config.num_experts + 1) * 8
        outgoing = room * (self._num_ranks if self._packed else 1)
        rings = [
            Ring("dispatch", _SLOTS, symmetric.align(max(outgoing * row, outgoing * ids + table) + gaps)),
            Ring("combine", _SLOTS, symmetric.align(room * self._num_ranks * row + gaps)),
        ]
        backend = symmetric.backend_of(self._group)
        return SymmMemArena(self._group, rings, backend=backend, timeout_s=config.timeout_s)

    # --- what Exchange asks for ---

    def prepare(self, ids: torch.Tensor) -> Prepared:
        """Expert ids, padded, and the facts of every rank.

        Raises:
            SymmMemConfigError: ids on another kind of device than the symmetric memory.
        """
        if ids.device.type != self.arena.device.type:
            refuse(
                "copy_engine: topk_idx",
                found=f"a tensor on {ids.device}",
                expected=f"tensors on {self.arena.device.type}, where the group's symmetric memory is",
                fix="move the batch, or use a process group of that device",
            )
        found = routing.route(
            ids,
            num_experts=self._config.num_experts,
            num_ranks=self._num_ranks,
            rows_per_rank=self._room,
            by_token=not self._packed,
        )
        mine = found.facts
        layout = Layout.padded(self._num_ranks, self._rank, self._room, by_token=not self._packed)
        parts = [
            Part(PartSpec(ids.shape[1], torch.int32, ids.device), layout),
            Part(PartSpec(mine.numel(), torch.int64, ids.device), self._broadcast),
        ]
        sources = [found.narrowed, mine.unsqueeze(0)]

        def fill(recipe: Recipe, slot: torch.Tensor) -> list[torch.Tensor]:
            return recipe.place(slot, sources, found.home, mark_missing=True)

        received, table = self._call("dispatch", "expert ids", parts, fill)
        if not self.exact:
            return Prepared(found.home, table, received)
        table = table.cpu()
        return self._squeeze(ids, table, received)

    def _squeeze(self, ids: torch.Tensor, table: torch.Tensor, received: torch.Tensor) -> Prepared:
        """Exact rows from padded ones, now that the host knows how many there are."""
        layout = self.layout(0, table)
        blocks = received.view(self._num_ranks, self._room, -1)
        real = [blocks[sender, :rows] for sender, rows in enumerate(layout.received)]
        route = routing.route(ids, num_experts=self._config.num_experts, num_ranks=self._num_ranks, rows_per_rank=None)
        return Prepared(route.home, table, torch.cat(real))

    def layout(self, num_rows: int, table: torch.Tensor) -> Layout:
        """Padded to N / R rows, or the table's counts."""
        if self.exact:
            return Layout(tuple(tuple(row) for row in table[:, : self._num_ranks].tolist()), self._rank)
        rows = num_rows // self._num_ranks
        return Layout.padded(self._num_ranks, self._rank, rows, by_token=not self._packed)

    def to_experts(self, parts: Sequence[torch.Tensor], home: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """Rows in the slot, or tokens in symmetric memory of their own, fetched by the ranks that need them."""
        in_place = self._in_place(parts[0], layout)
        staged = list(parts if in_place is None else parts[1:])
        pieces = [Part(PartSpec(p.shape[1], p.dtype, p.device), layout) for p in staged]

        def fill(recipe: Recipe, slot: torch.Tensor) -> list[torch.Tensor]:
            return recipe.place(slot, staged, home, mark_missing=False)

        # Zero-copy or not is part of the call's signature: ranks that disagree hear of it instead of waiting.
        how = "staged tokens" if in_place is None else "tokens in place"
        answers = self._call("dispatch", how, pieces, fill)
        if in_place is None:
            return answers
        return [self._fetch_in_place(parts[0], layout, *in_place), *answers]

    def to_homes(
        self, specs: Sequence[PartSpec], write: Callable[[list[torch.Tensor]], None], layout: Layout
    ) -> list[torch.Tensor]:
        """Answers are written straight into the slot, and fetched by the tokens' ranks."""
        parts = [Part(spec, layout) for spec in specs]
        return self._call("combine", "answers", parts, lambda recipe, slot: recipe.write(slot, write))

    def resize(self, max_tokens: int) -> None:
        """Another arena with more room. Collective."""
        self._waited_s += self.arena.segment.wait_s
        self.close()
        self._room = max_tokens
        self._recipes.clear()  # what they say names the room
        self.arena = self._make_arena()

    def room(self) -> int | None:
        """C."""
        return self._room

    def traffic(self) -> Traffic:
        """Bytes of the arena, and those pulled from peers' slots."""
        held = 0 if self.arena.closed else self.arena.nbytes
        return Traffic(self.arena.engine, held, self._bytes_moved, self._waited_s + self.arena.segment.wait_s)

    def fail(self, text: str) -> None:
        """Peers that wait for this rank raise with the text; the arena is of no use afterwards."""
        self.arena.segment.fail(text)

    def close(self) -> None:
        """Collective over the group."""
        wire_of(self.arena).close()
        self.arena.close()

    # --- tokens that lie in symmetric memory already ---

    def _in_place(self, tokens: torch.Tensor, layout: Layout) -> tuple[SymmMemArena, Lease] | None:
        if not layout.by_token or (found := symmetric.find(tokens)) is None:
            return None
        arena, lease = found
        same_group = arena.ranks == self.arena.ranks
        return found if same_group and layout.sent[0] * _row_bytes(tokens) <= lease.nbytes else None

    def _fetch_in_place(self, tokens: torch.Tensor, layout: Layout, arena: SymmMemArena, lease: Lease) -> torch.Tensor:
        part = Part(PartSpec(tokens.shape[1], tokens.dtype, tokens.device), layout)
        target = empty(part, sum(layout.received))
        target.narrow(0, layout.first_received(self._rank, self._rank), tokens.shape[0]).copy_(tokens)
        what = f"ep dispatch: tokens in place, {tokens.shape[1]} x {tokens.dtype}"
        plan = self._recipe("dispatch", "tokens in place", (part,)).plan
        self._pull("dispatch", arena, lease, plan, [target], what)
        # The tensor is the caller's, who may write into it next: only when everybody has read it.
        arena.segment.before_reuse(lease, what)
        return target

    # --- one call of the wire ---

    @property
    def _broadcast(self) -> Layout:
        return Layout.padded(self._num_ranks, self._rank, 1, by_token=True)

    def _call(
        self, lane: Lane, content: str, parts: list[Part], fill: Callable[[Recipe, torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        with self.arena.peers_told():
            recipe = self._recipe(lane, content, tuple(parts))
            slot, lease = self.arena.acquire_lease(lane, recipe.nbytes, owner=recipe.what)
            targets = fill(recipe, slot)
        self._pull(lane, self.arena, lease, recipe.plan, targets, recipe.what)
        return targets

    def _recipe(self, lane: Lane, content: str, parts: tuple[Part, ...]) -> Recipe:
        key = (lane, content, parts)
        recipe = self._recipes.get(key)
        if recipe is None:
            kinds = ", ".join(f"{p.spec.width} x {str(p.spec.dtype).removeprefix('torch.')}" for p in parts)
            how = "exact" if self.exact else "packed" if self._packed else "by token"
            what = f"ep {lane}: {content}, rows of {kinds or 'nothing'}, {how}, room for {self._room}"
            recipe = Recipe(lane, what, parts, self._rank, self._num_ranks)
            if not self.exact:  # exact sizes hardly ever come again
                if len(self._recipes) >= _RECIPES:
                    self._recipes.clear()
                self._recipes[key] = recipe
        return recipe

    def _pull(
        self,
        lane: Lane,
        arena: SymmMemArena,
        lease: Lease,
        plan: PullPlan,
        targets: list[torch.Tensor],
        what: str,
    ) -> None:
        """The call itself, in a range that ``fsdp-symm inspect`` reads; its bytes are those that all ranks send one."""
        wire = wire_of(arena)
        self._bytes_moved += plan.nbytes
        with compat.annotate(
            f"fsdp_symm::{lane}",
            module=what,
            bytes=plan.nbytes * self._num_ranks // max(self._num_ranks - 1, 1),
            engine=wire.pull_engine,
            group=arena.group_name,
            group_size=self._num_ranks,
            op="",
        ):
            wire.pull(lease, arena.next_epoch(lease), plan, targets, what=what, async_op=False)


class CopyEngineEP(TokenExchangeEP):
    """``"copy_engine"``: padded rows over this package's wire. Nothing is read on the host where
    ``recv_capacity_per_rank`` is set and ``overflow`` is ``"drop"``."""

    transport: ClassVar[str] = "copy_engine"


class CopyEngineExactEP(TokenExchangeEP):
    """``"copy_engine_exact"``: the same wire, only rows that exist; one host read a layer."""

    transport: ClassVar[str] = "copy_engine_exact"


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1] * tensor.element_size()
