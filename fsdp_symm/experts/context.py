"""One expert group at work: its configuration, what moves its rows, and what happens when there is no room.

Legend as in :mod:`fsdp_symm.experts.routing`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemConfigError, SymmMemError, problem
from fsdp_symm.experts import routing
from fsdp_symm.experts.agreement import agree
from fsdp_symm.experts.config import EpConfig, refuse
from fsdp_symm.experts.exchange import Exchange, Layout, Prepared

TRANSPORTS = ("copy_engine", "copy_engine_exact", "all_to_all", "local")
_ROOM_STEP = 64  # a grown buffer has some room to spare, so that it does not grow again at once


class Routing(NamedTuple):
    """Everything that a dispatch and its combine have to agree on, for one call. Tensors only, so that compiled
    programs and activation checkpoints can hold it.

    Attributes:
        home, table: see :class:`fsdp_symm.experts.exchange.Prepared`.
        counts, source, slots, total, dropped: see :class:`fsdp_symm.experts.routing.Arrangement`.
    """

    home: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor
    source: torch.Tensor
    slots: torch.Tensor
    total: torch.Tensor
    dropped: torch.Tensor


_contexts: weakref.WeakValueDictionary[str, EpContext] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def context_of(key: str) -> EpContext:
    """The context behind a key that an operator carries.

    Raises:
        SymmMemError: it was closed.
    """
    context = _contexts.get(key)
    if context is None or context.closed:
        raise SymmMemError(
            problem(
                f"expert parallelism: {key} is closed",
                found="a dispatch, a combine or a backward pass that still uses it",
                expected="calls before ep_finalize() or close()",
                fix="finish the step, backward pass included, before closing",
            )
        )
    return context


class EpContext:
    """What all buffers of one expert group share. Construction is collective over the group.

    Args:
        group: the ranks that share the experts.
        config: sizes and policies, equal on all ranks.
        transport: ``"copy_engine"``: padded rows over this package's wire, nothing read on the host;
            ``"copy_engine_exact"``: the same wire, exact rows; ``"all_to_all"``: exact rows over the process group's
            collectives; ``"local"``: nothing travels, every rank has all tokens.

    Raises:
        SymmMemConfigError: a size that does not fit the group, an unknown transport, or ranks that were configured
            differently (raised on all ranks).
        SymmMemTimeoutError: a rank did not come.
        SymmMemMemoryError: symmetric memory could not be had (raised on all ranks).
    """

    def __init__(self, group: dist.ProcessGroup, config: EpConfig, transport: str) -> None:
        if transport not in TRANSPORTS:
            refuse(
                "expert parallelism: unknown transport",
                found=repr(transport),
                expected=list(TRANSPORTS),
                fix="copy_engine needs symmetric memory, all_to_all works with any group",
            )
        self.group = group
        self.config = config
        self.transport = transport
        self.num_local = config.local_experts(group)
        self.first_expert = self.num_local * group.rank()
        self.closed = False
        names = [field.name for field in fields(config) if field.name != "timeout_s"]  # which may differ
        mine = {"transport": transport} | {name: str(getattr(config, name)) for name in names}
        agree(group, "expert parallelism", mine, timeout_s=config.timeout_s)
        self.exchange: Exchange = _make_exchange(group, config, transport)
        self.key = f"expert context {next(_numbers)}"
        _contexts[self.key] = self

    def __repr__(self) -> str:
        ranks = list(compat.group_ranks(self.group)) if compat.group_is_alive(self.group) else "a destroyed group"
        return f"EpContext({self.transport}, ranks={ranks}, {self.config})"

    # --- shapes that are known beforehand, for compilers ---

    @property
    def padded_rows(self) -> int | None:
        """N where every call has the same, else ``None``."""
        room = None if self.exchange.exact or self.config.overflow == "grow" else self.exchange.room()
        return None if room is None else room * self.group.size()

    # --- the call that comes first ---

    def prepare(self, ids: torch.Tensor, alignment: int, capacity: int | None) -> Routing:
        """Exchange expert ids, apply the overflow policy, and lay out the rows that will come.

        Raises:
            SymmMemError: an expert id out of range, or no room under ``"raise"``; on every rank.
        """
        if not compat.group_is_alive(self.group):
            raise SymmMemError(
                problem(
                    "expert parallelism: the process group of this context was destroyed",
                    found=repr(self),
                    expected="ep_finalize() or close() before destroy_process_group()",
                    fix="bootstrap again with the new group",
                )
            )
        self._check_token_count(ids.shape[0])
        prepared = self.exchange.prepare(ids)
        if self.config.overflow != "drop":
            facts = _Facts(prepared.table.tolist(), self)
            facts.refuse_invalid()
            room = self.exchange.room()
            if room is not None and facts.rows_needed > room:
                if self.config.overflow == "raise":
                    facts.raise_rows(room)
                self.exchange.resize(-(-facts.rows_needed // _ROOM_STEP) * _ROOM_STEP)
                prepared = self.exchange.prepare(ids)
            if room is not None and self.config.overflow == "grow" and not self.exchange.exact:
                prepared = _without_spare_room(prepared, facts.rows_needed)
            capacity = facts.capacity(alignment, capacity)
        laid = routing.arrange(
            prepared.ids,
            first_expert=self.first_expert,
            num_local=self.num_local,
            alignment=alignment,
            capacity=capacity,
            wanted=self._wanted(prepared.table, prepared.ids.device),
        )
        return Routing(prepared.home, prepared.table, *laid)

    def _wanted(self, table: torch.Tensor, device: torch.device) -> torch.Tensor:
        """For every rank its routes to each of this rank's experts; one sum over the ranks where the table is on the
        host."""
        first = table.shape[1] - 1 - self.config.num_experts + self.first_expert
        wanted = table[:, first : first + self.num_local]
        return wanted if wanted.device == device else wanted.sum(0, keepdim=True).to(device)

    def _check_token_count(self, num_tokens: int) -> None:
        """Under ``"drop"`` nobody reads the table, so the one who brings too many tokens has to speak up.

        Raises:
            SymmMemConfigError: more tokens than ``max_tokens_per_rank``.
        """
        limit = self.config.max_tokens_per_rank
        if self.config.overflow != "drop" or limit is None or num_tokens <= limit:
            return
        text = problem(
            "ep_prepare: more tokens than the buffers hold",
            found=f"{num_tokens} tokens on rank {dist.get_rank()}",
            expected=f"at most max_tokens_per_rank = {limit}",
            fix="raise max_tokens_per_rank, or use overflow='grow'",
        )
        self.exchange.fail(text)
        raise SymmMemConfigError(text)

    def layout(self, num_rows: int, table: torch.Tensor) -> Layout:
        """The layout of an earlier :meth:`prepare`, also when the buffers have grown since."""
        return self.exchange.layout(num_rows, table)

    def close(self) -> None:
        """Give memory back. Collective over the group; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.exchange.close()

    def abandon(self, reason: str) -> None:
        """Give memory back without waiting for anybody; peers that wait for this rank raise, quoting ``reason``."""
        if not self.closed:
            self.exchange.fail(reason)
            self.close()


def _without_spare_room(prepared: Prepared, rows: int) -> Prepared:
    """Padded rows cut down to ``rows`` for each pair of ranks.

    Shapes then follow from the batch alone: a recomputation finds those of its forward, though buffers may have grown
    in between. What no rank needs does not travel either.
    """
    home, table, ids = prepared
    ranks, width = home.shape[1], ids.shape[1]
    room = ids.shape[0] // ranks
    spare = room - rows
    if spare == 0:
        return prepared
    # Rows for rank r move up by r times what is spare; -1 would go below -1, or stay.
    shift = torch.arange(0, ranks * spare, spare, device=home.device)
    cut = ids.view(ranks, room, width)[:, :rows].reshape(ranks * rows, width)
    return Prepared((home - shift).clamp_(min=-1), table, cut)


class _Facts:
    """The table on the host: what every rank knows about every rank, so that all take the same decision."""

    def __init__(self, table: list[list[int]], context: EpContext) -> None:
        self._context = context
        self._ranks = compat.group_ranks(context.group)
        width = len(table[0]) - 1 - context.config.num_experts  # R, or 1 when nothing travels
        self._rows = [row[:width] for row in table]
        self._experts = [row[width:-1] for row in table]
        self._invalid = [row[-1] for row in table]

    def refuse_invalid(self) -> None:
        """Raises: SymmMemError: an expert id of E or more, on any rank."""
        bad = {r: n for r, n in zip(self._ranks, self._invalid, strict=False) if n}
        if bad:
            raise SymmMemError(
                problem(
                    "ep_prepare: expert ids out of range",
                    found="; ".join(f"{n} ids on rank {r}" for r, n in bad.items()),
                    expected=f"ids below {self._context.config.num_experts}, or negative for masked routes",
                    fix="check the router, or num_experts",
                )
            )

    @property
    def rows_needed(self) -> int:
        """The most rows that any rank has for another."""
        return max(max(row) for row in self._rows)

    def raise_rows(self, room: int) -> None:
        """Raises: SymmMemError: naming the rank with the most rows."""
        sender = max(range(len(self._rows)), key=lambda s: max(self._rows[s]))
        raise SymmMemError(
            problem(
                "ep_prepare: more rows than one rank may send to another",
                found=f"rank {self._ranks[sender]} has {self.rows_needed} rows for one rank",
                expected=f"at most {room} (rows_per_peer, or else max_tokens_per_rank)",
                fix="raise the bound, or choose overflow='grow' or 'drop'",
            )
        )

    def capacity(self, alignment: int, capacity: int | None) -> int:
        """M for this rank, exact where no capacity is set.

        Raises:
            SymmMemError: some rank's capacity is too small and the policy is ``"raise"``.
        """
        local = self._context.num_local
        routes = [sum(counts) for counts in zip(*self._experts, strict=True)]  # to each expert

        def needed(first: int) -> int:
            return sum(-(-n // alignment) * alignment for n in routes[first : first + local])

        mine = needed(self._context.first_expert)
        if capacity is None:
            return mine
        if self._context.config.overflow != "raise":
            return max(capacity, mine)
        needs = [needed(first) for first in range(0, self._context.config.num_experts, local)]
        rank = max(range(len(needs)), key=needs.__getitem__)
        if needs[rank] > capacity:
            raise SymmMemError(
                problem(
                    "ep_prepare: a rank receives more rows than recv_capacity_per_rank",
                    found=f"{needs[rank]} rows for the experts of rank {self._ranks[rank]}",
                    expected=f"at most {capacity}",
                    fix="raise recv_capacity_per_rank, leave it out, or choose overflow='grow' or 'drop'",
                )
            )
        return capacity


def _make_exchange(group: dist.ProcessGroup, config: EpConfig, transport: str) -> Exchange:
    from fsdp_symm.experts.all_reduce import LocalExchange
    from fsdp_symm.experts.all_to_all import CollectiveExchange

    makers: dict[str, Callable[[], Exchange]] = {
        "local": lambda: LocalExchange(group, config),
        "all_to_all": lambda: CollectiveExchange(group, config),
    }
    if transport in makers:
        return makers[transport]()
    from fsdp_symm.experts.copy_engine import WireExchange

    return WireExchange(group, config, exact=transport == "copy_engine_exact")


_shared: list[EpContext] = []


def shared_context(group: dist.ProcessGroup, config: EpConfig, transport: str) -> EpContext:
    """The context of a group, configuration and transport; made on first use, then shared by all layers that ask for
    the same. Collective over the group when it is made."""
    _shared[:] = [c for c in _shared if not c.closed and compat.group_is_alive(c.group)]
    for context in _shared:
        if (
            compat.group_name(context.group) == compat.group_name(group)
            and context.config == config
            and context.transport == transport
        ):
            return context
    return _make_shared(group, config, transport)


@torch.compiler.disable(
    recursive=True,
    reason="buffers of experts are made with all ranks, outside of compiled code: call the module once without "
    "torch.compile, also after ep_finalize()",
)
def _make_shared(group: dist.ProcessGroup, config: EpConfig, transport: str) -> EpContext:
    context = EpContext(group, config, transport)
    _shared.append(context)
    return context


def open_contexts() -> list[EpContext]:
    """The shared contexts that are in use, in the order of creation."""
    return [c for c in _shared if not c.closed]


def abandon_shared(reason: str) -> None:
    """Give every shared context's memory back without waiting, for a rank that fails and will not go on."""
    while _shared:
        _shared.pop(0).abandon(reason)


def close_shared() -> None:
    """Close every shared context, in the order of creation; one failure does not keep the others. Collective over their
    groups."""
    contexts = [c for c in _shared if compat.group_is_alive(c.group)]
    _shared.clear()
    with contextlib.ExitStack() as stack:
        for context in reversed(contexts):
            stack.callback(context.close)
