"""Direct placement: every peer's shards land in the unsharded parameters themselves.

FSDP2's own way gathers a whole layer into a staging buffer and copies it out into the parameters. Here a rank's
shards lie in a small slot of symmetric memory, and each peer pulls them to where they belong in its parameters: no
staging buffer, no copy-out, and symmetric memory only for shards, ``1 / W`` of a layer.

Legend: W ranks, n elements of one rank's shard of a parameter.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
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
from fsdp_symm.shard_layout import ShardLayout, Shards
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import PullPlan

# Kept for calls that come again, on GPUs: slots x places of the parameters.
_MAX_PLACINGS = 64


@dataclass(frozen=True)
class _Placing:
    """What an unshard into one slot and one place of the parameters does: the copy-in, and the pull."""

    copy_in: CopyIn
    plan: PullPlan
    targets: list[torch.Tensor]


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
        self._layouts: dict[tuple[str, bool], ShardLayout] = {}  # by process group and kind of shards
        self._place: Place | None = None  # where the unsharded parameters are now
        self._warned: set[str] = set()
        self._placings: dict[tuple[int, ...], _Placing] = {}  # by layout, slot and places of the parameters

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
                placing = self._placing(layout, slot, self._take(layout, streams[0]))
                placing.copy_in.run(inputs)
        on_gpu = arena.device.type != "cpu"
        with _on(streams[1]), self._range(arena, layout):
            if on_gpu and streams[1] != streams[0]:
                streams[1].wait_stream(streams[0])
            plan, targets = placing.plan, placing.targets
            done = wire_of(arena).pull(
                lease, arena.next_epoch(lease), plan, targets, what=layout.what, async_op=async_op
            )
            if isinstance(done, torch.cuda.Event):
                return done, None
            captured = on_gpu and done is None
            return streams[1].record_event() if captured else None, done

    def _layout(
        self, arena: SymmMemArena, inputs: list[torch.Tensor], dtypes: list[torch.dtype], counts: list[int]
    ) -> ShardLayout:
        key = (arena.group_name, compat_unshard.holds_post_forward_shards(self._group))
        numels = tuple(t.numel() for t in inputs)
        layout = self._layouts.get(key)
        if layout is None or layout.shards.numels != numels or layout.shards.dtypes != tuple(dtypes):
            per_param = compat_unshard.row_counts(self._group)
            rows = tuple(r for r, count in zip(per_param, counts, strict=True) for _ in range(count))
            shards = Shards(numels, tuple(dtypes), tuple(counts), rows)
            layout = ShardLayout.of(shards, arena.group.rank(), arena.group.size(), self._group.label)
            self._refuse_other_outputs(layout)
            self._forget_placings()
            self._layouts[key] = layout
        return layout

    def _refuse_other_outputs(self, layout: ShardLayout) -> None:
        """FSDP2 makes its unsharded tensors once; shards of another type or size since must not be written there.

        Raises:
            SymmMemConfigError: names both.
        """
        shards = layout.shards
        wanted = [(n * layout.world_size, d) for n, d in zip(shards.numels, shards.dtypes, strict=True)]
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

    def _take(self, layout: ShardLayout, stream: Any) -> list[torch.Tensor]:
        """The unsharded tensors, allocated, and free of readers on ``stream``."""
        if self._place is None:
            self._place = self._memory.take(long_lived=not compat_unshard.reshards_after_forward(self._group))
        self._place.order_after_readers(stream)
        with self._place.allocating():
            self._place.make_room(self._group.label, layout.whole_nbytes)
            return compat_unshard.allocate_outputs(self._group, layout.allocations, layout.world_size)

    def _placing(self, layout: ShardLayout, slot: int, targets: list[torch.Tensor]) -> _Placing:
        """How this rank's shards get into the slot at this address, and everybody's to their places."""
        key = (id(layout), slot, *[t.data_ptr() for t in targets])
        found = self._placings.get(key)
        if found is None:
            device = targets[0].device
            with torch.inference_mode(False):  # neither that mode nor version counters may be in the way later
                copy_in = CopyIn(layout.in_slot(slot, device), layout.in_place(targets))
                found = _Placing(copy_in, *layout.pull(targets, self._place.rooms if self._place else ()))
            if device.type != "cpu":  # there addresses hardly ever come again, and what is kept would pin the heap
                if len(self._placings) >= _MAX_PLACINGS:
                    self._forget_placings()
                self._placings[key] = found
        return found

    def _forget_placings(self) -> None:
        if self._group.device.type == "cuda" and self._placings:
            torch.cuda.synchronize(self._group.device)  # kernels may still read their tables; rare
        self._placings.clear()

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

    def _range(self, arena: SymmMemArena, layout: ShardLayout) -> contextlib.AbstractContextManager[object]:
        world_size = layout.world_size
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
