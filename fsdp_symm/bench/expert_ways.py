"""The implementations that the experts benchmark compares, behind one face: dispatch, combine, and what they hold.

``all_to_all`` is this package's exchange over the process group: exact splits, one row a (token, rank). torchtitan's
two dispatchers, where torchtitan is installed, send one row a (token, expert): its usual one by exact splits, and
MinimalAsyncEP by kernels over peer memory, on GPUs only.

Legend as in :mod:`fsdp_symm.bench.expert_cases`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fsdp_symm import compat_symm
from fsdp_symm.bench.expert_cases import DTYPE, Batch, Layer, Task, Traffic
from fsdp_symm.bench.launch import World
from fsdp_symm.experts import EpConfig, ops
from fsdp_symm.experts.context import EpContext, Routing

COPY_ENGINE, STATIC, EXACT, ALL_TO_ALL = "copy_engine", "copy_engine, static", "copy_engine_exact", "all_to_all"
GRAPH = "copy_engine, graph"  # the static one, captured and replayed
TITAN, MINIMAL = "torchtitan all-to-all", "torchtitan MinimalAsyncEP"
OURS = (COPY_ENGINE, STATIC, EXACT, ALL_TO_ALL)


class Implementation(ABC):
    """One implementation, made for one layer. Construction, use and :meth:`close` are collective.

    Attributes:
        name: the variant.
        waits: whether a dispatch waits for the device on the host; a combine never does.
        symmetric_bytes: symmetric memory that this rank holds for it.
    """

    name: str
    waits: bool
    symmetric_bytes: int = 0

    @abstractmethod
    def dispatch(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Rows ``[M, H]`` by local expert, ``counts [L]``, and what the combine needs. Differentiable."""

    @abstractmethod
    def combine(self, answers: torch.Tensor, state: Any) -> torch.Tensor:
        """``[M, H]`` -> ``[T, H]``, weighted. Differentiable."""

    @abstractmethod
    def moved_bytes(self, task: Task) -> int:
        """Bytes that a rank gets from its peers in one call, ids and counts included; the rank with the most."""

    @abstractmethod
    def close(self) -> None:
        """Give memory back."""


class OurImplementation(Implementation):
    """This package's operators over one of its transports.

    ``copy_engine, static`` has the room that no routing can exceed, so nothing is read on the host and all shapes are
    static; the others make exactly the rows that a call needs, for one read of a table.
    """

    def __init__(self, name: str, world: World, layer: Layer) -> None:
        self.name = name
        self.waits = name != STATIC
        self._layer = layer
        capacity = world.size * layer.tokens * min(layer.topk, layer.num_experts // world.size)
        self._capacity = capacity if name == STATIC else None
        config = EpConfig(
            num_experts=layer.num_experts,
            num_topk=layer.topk,
            hidden_dim=layer.hidden,
            payload_dtype=DTYPE,
            max_tokens_per_rank=layer.tokens,
            recv_capacity_per_rank=self._capacity,
            overflow="drop" if name == STATIC else "grow",
        )
        self._transport = COPY_ENGINE if name == STATIC else name
        self._context = EpContext(world.plain if name == ALL_TO_ALL else world.group, config, self._transport)
        arena = getattr(self._context.exchange, "arena", None)
        self.symmetric_bytes = arena.nbytes if arena else 0
        padded = self._transport == COPY_ENGINE
        self._traffic = Traffic.padded(layer, world.size) if padded else Traffic.of(layer, world.size)

    def dispatch(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """See the class."""
        key = self._context.key
        routing = Routing(*ops.prepare(ids, key, 1, self._capacity))
        path = routing.home, routing.table, routing.source, routing.slots
        rows, row_weights = ops.dispatch(tokens, weights, *path, key)
        return rows, routing.counts, (path, row_weights)

    def combine(self, answers: torch.Tensor, state: Any) -> torch.Tensor:
        """See the class."""
        path, row_weights = state
        return ops.combine(answers, row_weights, None, *path, self._context.key)[0]

    def moved_bytes(self, task: Task) -> int:
        """See the class."""
        got, back = self._traffic.peers(self._traffic.rows)
        num_ranks = self._traffic.rows.shape[0]
        row, weights = self._layer.hidden * DTYPE.itemsize, self._layer.topk * 4
        facts = (num_ranks - 1) * (num_ranks + self._layer.num_experts + 1) * 8
        # ids are as wide as weights; over the wire they are padded, so that they can travel before the counts are known
        padded = torch.full_like(got, (num_ranks - 1) * self._layer.tokens)
        prepare = (got if self._transport == ALL_TO_ALL else padded) * weights + facts
        dispatch, combine = prepare + got * (row + weights), back * row
        if task == "dispatch":
            return int(dispatch.max())
        if task == "combine":
            return int(combine.max())
        # backward: the combine's is a dispatch without weights, the dispatch's a combine with theirs
        return int((dispatch + combine + got * row + back * (row + weights)).max())

    def close(self) -> None:
        """See the class."""
        self._context.close()


class _TitanImplementation(Implementation):
    """One of torchtitan's dispatchers, which send a row for each (token, expert)."""

    counts_from_all: ClassVar[bool]  # counts of all experts, or of the receiver's

    def __init__(self, world: World, layer: Layer) -> None:
        self._layer = layer
        self._traffic = Traffic.of(layer, world.size)
        self._dispatcher: Any = None

    def dispatch(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Also counts the tokens of each expert, as torchtitan's router does."""
        counts = torch.zeros(self._layer.num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        rows, local, metadata = self._dispatcher.dispatch(tokens, weights, ids, counts)
        return rows, local, (metadata, tokens)

    def combine(self, answers: torch.Tensor, state: Any) -> torch.Tensor:
        """See the class."""
        return self._dispatcher.combine(answers, *state)

    def moved_bytes(self, task: Task) -> int:
        """See the class."""
        got, back = self._traffic.peers(self._traffic.routes)
        num_ranks, row = self._traffic.rows.shape[0], self._layer.hidden * DTYPE.itemsize
        experts = self._layer.num_experts if self.counts_from_all else self._layer.num_experts // num_ranks
        counts = (num_ranks - 1) * experts * 8
        if task == "dispatch":
            return int((got * row + counts).max())
        if task == "combine":
            return int((back * row).max())
        return int((2 * (got + back) * row + counts).max())


def _mesh(group: dist.ProcessGroup, world: World) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("default")  # the mesh that we pass, instead of one that a trainer registered
    return DeviceMesh.from_group(group, world.device.type)


class TitanAllToAll(_TitanImplementation):
    """torchtitan's usual dispatcher: exact splits, two reads on the host."""

    name = TITAN
    waits = True
    counts_from_all = False

    def __init__(self, world: World, layer: Layer) -> None:
        super().__init__(world, layer)
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher as Dispatcher

        self._dispatcher = Dispatcher(Dispatcher.Config(num_experts=layer.num_experts, top_k=layer.topk))
        self._dispatcher.wire_meshes(ep_mesh=_mesh(world.plain, world))

    def close(self) -> None:
        """See the class: it holds nothing."""


class TitanMinimal(_TitanImplementation):
    """torchtitan's MinimalAsyncEP: static shapes, no read on the host. It has one buffer a process, for one layer's
    sizes, which is dropped by private names here (read in torchtitan 0.3.0) so that another size can follow."""

    name = MINIMAL
    waits = False
    counts_from_all = True

    def __init__(self, world: World, layer: Layer) -> None:
        super().__init__(world, layer)
        from torchtitan.models.common.token_dispatcher import MinimalAsyncEPTokenDispatcher as Dispatcher

        compat_symm.choose_symm_backend("CUDA", world.device)
        config = Dispatcher.Config(
            num_experts=layer.num_experts,
            top_k=layer.topk,
            hidden_dim=layer.hidden,
            num_max_tokens_per_rank=layer.tokens,
            dtype=DTYPE,
            device=world.device,
        )
        self._dispatcher = Dispatcher(config)
        self._dispatcher.wire_meshes(ep_mesh=_mesh(world.plain, world))
        local = layer.num_experts // world.size
        rows = world.size * layer.tokens * min(layer.topk, local)
        self.symmetric_bytes = 2 * rows * layer.hidden * DTYPE.itemsize + world.size * layer.num_experts * 8

    def close(self) -> None:
        """See the class."""
        from torchtitan.distributed.minimal_async_ep import api

        self._dispatcher = None
        api._buffer_state = api._buffer_key = None


def make_ours(world: World, layer: Layer) -> list[Implementation]:
    """This package's implementations, :data:`COPY_ENGINE` first."""
    return [OurImplementation(name, world, layer) for name in OURS]


def make_foreign(world: World, layer: Layer) -> list[Implementation]:
    """torchtitan's implementations that can be made here, the same on every rank. Why one is missing is said."""
    kinds: list[type[_TitanImplementation]] = [TitanAllToAll]
    if world.on_gpu:
        kinds.append(TitanMinimal)
    made: list[Implementation] = []
    for kind in kinds:
        one, reason = None, None
        try:
            one = kind(world, layer)
        except Exception as error:  # noqa: BLE001 - somebody else's code, and the run goes on without it
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if any(flag for (flag,) in world.all_values([float(one is None)])):
            world.say(f"bench experts: without {kind.name}: {reason or 'it failed on another rank'}")
            if one is not None:
                one.close()
        elif one is not None:
            made.append(one)
    return made


def run_step(
    implementation: Implementation, experts: Any, batch: Batch
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward and backward: the output, and the gradients of tokens and weights."""
    tokens, weights = batch.tokens.requires_grad_(), batch.weights.requires_grad_()
    rows, counts, state = implementation.dispatch(tokens, batch.ids, weights)
    out = implementation.combine(experts(rows, counts), state)
    return out.detach(), torch.autograd.grad(out, (tokens, weights), batch.grad)
