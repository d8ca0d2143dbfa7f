"""Direct placement: every peer's shards land in the unsharded parameters themselves.

FSDP2's own way gathers a whole layer into a staging buffer and copies it out into the parameters. Here a rank's
shards lie in a small slot of symmetric memory, and each peer pulls them to where they belong in its parameters: no
staging buffer, no copy-out, and symmetric memory only for shards, ``1 / W`` of a layer.

Legend: W ranks, n elements of one rank's shard of a parameter.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_symm import compat, compat_unshard
from fsdp_symm.compat import ParamGroup
from fsdp_symm.copy_in import CopyIn
from fsdp_symm.errors import SymmMemConfigError, problem
from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.memory.counters import Counters
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.memory.unsharded import Place, UnshardedMemory
from fsdp_symm.plan import packed_nbytes, shard_offsets
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import Block, PullPlan

# Copies kept for calls that come again, on GPUs: slots x places of the parameters.
_MAX_COPIES = 64


@dataclass(frozen=True)
class _Layout:
    """How the shards of one param group lie in a slot, and where they go.

    Attributes:
        numels, dtypes, counts: of the all-gather inputs, see :func:`fsdp_symm.compat_unshard.gather_inputs`.
        rows: for each input, into how many rows of the unsharded tensor a shard is cut.
        offsets: bytes from the slot's start, one an input.
        nbytes: bytes of the slot.
        gathered_nbytes: bytes of all unsharded tensors.
        plan: the blocks of all peers.
        what: the call, for its signature.
    """

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    counts: tuple[int, ...]
    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    gathered_nbytes: int
    plan: PullPlan
    what: str

    @staticmethod
    def of(
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        counts: Sequence[int],
        rows: Sequence[int],
        group: Any,
        module: str,
    ) -> _Layout:
        """Lay out the inputs of a module for a process group."""
        rank, world_size = group.rank(), group.size()
        nbytes = [n * d.itemsize for n, d in zip(numels, dtypes, strict=True)]
        offsets, total = shard_offsets(nbytes), packed_nbytes(nbytes)
        blocks = []
        for peer in (p for p in range(world_size) if p != rank):
            for index, (size, source, count) in enumerate(zip(nbytes, offsets, rows, strict=True)):
                width = size // count
                blocks.append(Block(peer, source, index, peer * width, width, count, world_size * width))
        plan = PullPlan(blocks, rank=rank, world_size=world_size)
        gathered = sum(nbytes) * world_size
        kinds = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        what = f"unshard of {module!r}, {total} bytes of shards {kinds}"
        return _Layout(
            tuple(numels), tuple(dtypes), tuple(counts), tuple(rows), tuple(offsets), total, gathered, plan, what
        )

    def in_slot(self, slot: int, device: torch.device) -> list[torch.Tensor]:
        """The shards' places in the slot at this address."""
        return [
            compat.raw_tensor(slot + at, n * dtype.itemsize, device).view(dtype)
            for at, n, dtype in zip(self.offsets, self.numels, self.dtypes, strict=True)
        ]

    def in_place(self, targets: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Where this rank's own shards belong in the unsharded tensors at these addresses: ``[n]``, and
        ``[rows, n / rows]`` where a shard is cut into several rows."""
        rank, world_size = self.plan.rank, self.plan.world_size
        views = []
        for target, n, dtype, rows in zip(targets, self.numels, self.dtypes, self.rows, strict=True):
            whole = compat.raw_tensor(target, n * dtype.itemsize * world_size, device).view(dtype)
            if rows == 1:
                views.append(whole.narrow(0, rank * n, n))
            else:
                views.append(whole.view(rows, world_size, n // rows)[:, rank])
        return views


class DirectUnshard:
    """Unshards one param group by direct placement.

    Args:
        group: the param group.
        choose: the arena of the coming all-gather, ``None`` without one.
        memory: where unsharded parameters live.
        counters: shared statistics.
        strict: raise instead of taking the plain path.
    """

    def __init__(
        self,
        group: ParamGroup,
        choose: Callable[[], SymmMemArena | None],
        memory: UnshardedMemory,
        *,
        counters: Counters,
        strict: bool,
    ) -> None:
        self._group = group
        self._choose = choose
        self._memory = memory
        self._counters = counters
        self._strict = strict
        self._comm = compat.get_comm(group, "all_gather")
        self._layouts: dict[tuple[str, bool], _Layout] = {}  # by process group and kind of shards
        self._place: Place | None = None  # where the unsharded parameters are now
        self._warned: set[str] = set()
        self._copies: dict[tuple[int, ...], CopyIn] = {}  # by layout, slot and places of the parameters

    # --- the unshard ---

    @torch.no_grad()
    def begin(self, streams: tuple[Any, Any], async_op: bool) -> tuple[Any, dist.Work | None] | None:
        """Start filling the parameters; see :class:`fsdp_symm.compat_unshard.Unsharder`.

        Raises:
            SymmMemConfigError: the call is not what was planned, under ``strict``.
            SymmMemTimeoutError, SymmMemPeerError: a rank did not arrive, died, or issued another call.
        """
        arena = self._choose()
        if arena is None or arena.closed:
            return self._plain("its process group has no arena")
        if compat.get_comm(self._group, "all_gather") is not self._comm:
            return self._plain("an all-gather comm was set after the switch")
        with _on(streams[0]):
            inputs, dtypes, counts = compat_unshard.gather_inputs(self._group)
            layout = self._layout(arena, inputs, dtypes, counts)
            if (reason := arena.why_not("unshard", layout.nbytes)) is not None:
                return self._plain(reason)
            if layout.nbytes == 0:
                return self._plain("it has no bytes")
            slot, lease = arena.reserve("unshard", layout.nbytes, owner=self._group.label)
            with arena.peers_told():
                targets = self._take(layout, streams[0])
                self._copy_in(layout, slot, targets, inputs)
        on_gpu = arena.device.type != "cpu"
        with _on(streams[1]), self._range(arena, layout):
            if on_gpu and streams[1] != streams[0]:
                streams[1].wait_stream(streams[0])
            done = wire_of(arena).pull(
                lease, arena.next_epoch(lease), layout.plan, targets, what=layout.what, async_op=async_op
            )
            if isinstance(done, torch.cuda.Event):
                return done, None
            captured = on_gpu and done is None
            return streams[1].record_event() if captured else None, done

    def _layout(
        self, arena: SymmMemArena, inputs: list[torch.Tensor], dtypes: list[torch.dtype], counts: list[int]
    ) -> _Layout:
        key = (arena.group_name, compat_unshard.holds_post_forward_shards(self._group))
        numels = tuple(t.numel() for t in inputs)
        layout = self._layouts.get(key)
        if layout is None or layout.numels != numels or layout.dtypes != tuple(dtypes):
            per_param = compat_unshard.row_counts(self._group)
            rows = [r for r, count in zip(per_param, counts, strict=True) for _ in range(count)]
            layout = _Layout.of(numels, dtypes, counts, rows, arena.group, self._group.label)
            self._refuse_other_outputs(layout)
            self._forget_copies()
            self._layouts[key] = layout
        return layout

    def _refuse_other_outputs(self, layout: _Layout) -> None:
        """FSDP2 makes its unsharded tensors once; shards of another type or size since must not be written there.

        Raises:
            SymmMemConfigError: names both.
        """
        world_size = layout.plan.world_size
        wanted = [(n * world_size, d) for n, d in zip(layout.numels, layout.dtypes, strict=True)]
        made = compat_unshard.made_outputs(self._group)
        if made and made != wanted:
            raise SymmMemConfigError(
                problem(
                    f"unshard of {self._group.label!r}: its parameters changed after they were first unsharded",
                    found=f"shards for {wanted}",
                    expected=f"shards for the unsharded tensors that FSDP2 has made: {made}",
                    fix="change types and sizes before the first forward; FSDP2 itself cannot follow later",
                )
            )

    def _take(self, layout: _Layout, stream: Any) -> list[torch.Tensor]:
        """The unsharded tensors, allocated, and free of readers on ``stream``."""
        if self._place is None:
            self._place = self._memory.take(long_lived=not compat_unshard.reshards_after_forward(self._group))
        self._place.order_after_readers(stream)
        with self._place.allocating(stream):
            world_size = layout.plan.world_size
            return compat_unshard.allocate_outputs(self._group, layout.numels, layout.dtypes, layout.counts, world_size)

    def _copy_in(self, layout: _Layout, slot: int, targets: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Cast and copy this rank's shards into the slot at this address, for the peers, and to their own place."""
        addresses = [t.data_ptr() for t in targets]
        key = (id(layout), slot, *addresses)
        copy_in = self._copies.get(key)
        if copy_in is None:
            device = targets[0].device
            with torch.inference_mode(False):  # neither that mode nor version counters may be in the way later
                copy_in = CopyIn(layout.in_slot(slot, device), layout.in_place(addresses, device))
            if device.type != "cpu":  # there addresses hardly ever come again, and what is kept would pin the heap
                if len(self._copies) >= _MAX_COPIES:
                    self._forget_copies()
                self._copies[key] = copy_in
        copy_in.run(inputs)

    def _forget_copies(self) -> None:
        if self._group.device.type == "cuda" and self._copies:
            torch.cuda.synchronize(self._group.device)  # kernels may still read their tables; rare
        self._copies.clear()

    @property
    def holds_memory(self) -> bool:
        """Whether the parameters have a place now."""
        return self._place is not None

    def resharded(self) -> None:
        """The parameters' storages are free again, once what runs now on the current stream has read them."""
        place, self._place = self._place, None
        if place is not None:
            self._memory.give(place)

    # --- the rest ---

    def _range(self, arena: SymmMemArena, layout: _Layout) -> contextlib.AbstractContextManager[object]:
        world_size = layout.plan.world_size
        nbytes, engine = layout.gathered_nbytes, wire_of(arena).pull_engine
        self._counters.add("all_gather", engine, nbytes * (world_size - 1) // world_size)
        return compat.annotate(
            "fsdp_symm::all_gather",
            module=self._group.label,
            bytes=nbytes,
            engine=engine,
            group=arena.group_name,
            group_size=world_size,
            op="",
        )

    def _plain(self, reason: str) -> None:
        text = problem(
            f"unshard of {self._group.label!r} takes the plain path",
            found=reason,
            expected="what was planned when set_symm_mem_for_comm was called",
            fix="call set_symm_mem_for_comm last: after parameters, groups, prefetch lists and buffers are set",
        )
        if self._strict:
            raise SymmMemConfigError(text)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, SymmMemFallbackWarning, stacklevel=3)
        self._counters.add("all_gather", "plain", 0)


def _on(stream: Any) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext()
