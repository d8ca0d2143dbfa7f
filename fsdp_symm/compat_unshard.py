"""Private torch behind direct placement; the companion of :mod:`fsdp_symm.compat`, under the same rule.

A param group is taken over by changing its class: FSDP2 has no hook between "all-gather" and "copy-out" that every
supported release knows (2.15 alone has ``_all_gather_output_fn``). :class:`DirectParamGroup` overrides the four methods
that begin, end and undo an unshard; everything else stays FSDP2's own. Read in 2.13.0, 2.14.1 and 2.15.0, where these
four are the same but for the name of the call that frees a staged all-gather.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_symm import compat, compat_sizes
from fsdp_symm.compat import ParamGroup


class Unsharder(Protocol):
    """What a taken-over param group asks for; :class:`fsdp_symm.unshard.DirectUnshard` is the one there is."""

    def begin(self, streams: tuple[Any, Any], async_op: bool) -> tuple[Any, dist.Work | None] | None:
        """Start filling the unsharded parameters: the event or work that ends it, or ``None`` for the plain path."""
        ...

    @property
    def holds_memory(self) -> bool:
        """Whether the unsharded parameters' storages are allocated."""
        ...

    def resharded(self) -> None:
        """The unsharded parameters' storages were freed, by host order; kernels that read them may still run."""
        ...


class _DirectResult(AllGatherResult):
    """Marks an unshard that needs no copy-out."""

    __slots__ = ()


class DirectParamGroup(_groups.FSDPParamGroup):
    """FSDP2's param group with an unshard that goes straight into the parameters."""

    fsdp_symm_unsharder: Unsharder

    @_groups._disable_functorch_if_active
    def unshard(self, async_op: bool = False) -> None:
        """Start the unshard; nothing if one is pending, or the parameters are unsharded already."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return
        streams = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        if self._reshard_after_forward_event is not None:  # post-forward shards are made on the default stream
            for stream in streams:
                stream.wait_event(self._reshard_after_forward_event)
        with torch.profiler.record_function(self._with_fqn("FSDP::all_gather")):
            begun = self.fsdp_symm_unsharder.begin(streams, async_op)
        if begun is None:
            super().unshard(async_op)
            return
        self._reshard_after_forward_event = None
        self._all_gather_result = _DirectResult(self._all_gather_output, begun[0], begun[1], [], [], [])

    @_groups._disable_functorch_if_active
    def wait_for_unshard(self) -> None:
        """Order the current stream after the unshard, and put the unsharded parameters in place."""
        result = self._all_gather_result
        if not isinstance(result, _DirectResult):
            super().wait_for_unshard()
            return
        if self._training_state == TrainingState.FORWARD:
            _release_staged(self)
        self._all_gather_result = None  # also if it fails: a later unshard starts anew
        _await(self, result)
        for param in self.fsdp_params:
            param.init_unsharded_param()
        self._to_unsharded()

    def _to_sharded(self) -> None:
        result, sharded = self._all_gather_result, self.is_sharded
        if isinstance(result, _DirectResult):
            if sharded:
                return  # as FSDP2 does: the parameters are sharded already, and the pending unshard stays good
            _await(self, result)
            self._all_gather_result = None
        super()._to_sharded()
        if sharded and self.fsdp_symm_unsharder.holds_memory:
            self._free_storages()  # of an unshard that nobody waited for
        self.fsdp_symm_unsharder.resharded()

    def _to_sharded_post_forward(self) -> None:
        super()._to_sharded_post_forward()
        self.fsdp_symm_unsharder.resharded()

    def finalize_backward(self) -> None:
        """FSDP2's own, which drops an unshard that nobody waited for; its memory must be given back too."""
        abandoned = isinstance(self._all_gather_result, _DirectResult)
        super().finalize_backward()
        if abandoned:
            self._free_storages()
            self.fsdp_symm_unsharder.resharded()

    def _free_storages(self) -> None:
        for param in self.fsdp_params:
            param.free_unsharded_param()


def _await(native: Any, result: AllGatherResult) -> None:
    if result.all_gather_event is not None:
        native.device_handle.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


def _release_staged(native: Any) -> None:
    """Free the output of the last staged all-gather before this one, as FSDP2's own ``wait_for_unshard`` does."""
    context = native.comm_ctx
    release = getattr(context, "release_all_gather_state_for_comm_reuse", None)  # 2.15
    if release is not None:
        release()
    elif context.all_gather_state is not None:  # 2.13, 2.14
        native._wait_all_gather_streams_on_event(context.all_gather_state.event)
        context.all_gather_state = None


# --- taking a param group over -----------------------------------------------------------------------------


def install(group: ParamGroup, unsharder: Unsharder) -> None:
    """Let ``unsharder`` fill this group's parameters from now on."""
    group.native.fsdp_symm_unsharder = unsharder
    group.native.__class__ = DirectParamGroup


def uninstall(group: ParamGroup, unsharder: Unsharder) -> None:
    """Undo :func:`install`, unless somebody else has taken the group over since."""
    if getattr(group.native, "fsdp_symm_unsharder", None) is unsharder:
        group.native.__class__ = _groups.FSDPParamGroup
        del group.native.fsdp_symm_unsharder


def taken_over(group: ParamGroup) -> str | None:
    """Why this group's class must be left alone, or ``None`` for FSDP2's own."""
    kind = type(group.native)
    if kind is _groups.FSDPParamGroup:
        return None
    return "an earlier handle places its shards" if kind is DirectParamGroup else f"its class is {kind.__name__}"


def unsupported(group: ParamGroup) -> str | None:
    """Why this group's shards cannot be placed directly, or ``None``."""
    if (reason := taken_over(group)) is not None:
        return reason
    for param in group.native.fsdp_params:
        if param.fsdp_placement.dim == 0:
            continue
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            return f"an all-gather extension sharded on dim {param.fsdp_placement.dim}"
        if compat.post_forward_group(group) is not None:
            return f"an integer reshard_after_forward of a parameter sharded on dim {param.fsdp_placement.dim}"
    return None


# --- sizes, inputs, outputs --------------------------------------------------------------------------------


def input_nbytes(group: ParamGroup, world_size: int) -> list[int]:
    """Bytes of each all-gather input of one rank, if the group's parameters are sharded over ``world_size`` ranks.

    Raises:
        compat_sizes.UnsizedExtensionError: an all-gather extension failed when it was asked.
    """
    factor = compat.shard_group(group).size()
    sizes = [n for param in group.native.fsdp_params for n in compat_sizes.param_input_nbytes(param)]
    return [n * factor // world_size for n in sizes]


def holds_post_forward_shards(group: ParamGroup) -> bool:
    """Whether the coming all-gather starts from the shards of an integer ``reshard_after_forward``."""
    return group.native.is_sharded_post_forward


def reshards_after_forward(group: ParamGroup) -> bool:
    """Whether the parameters are freed between forward and backward (``_reshard_after_forward``, 2.13-2.15)."""
    return bool(group.native._reshard_after_forward)


def gather_inputs(group: ParamGroup) -> tuple[list[torch.Tensor], list[torch.dtype], list[int]]:
    """The all-gather inputs of this rank, flat; the dtypes they travel in; how many belong to each parameter.

    A plain parameter's input is its shard as it is, also on the CPU under offloading: the copy into the slot casts and
    moves it. An extension's inputs are what its ``fsdp_pre_all_gather`` returns.
    """
    inputs: list[torch.Tensor] = []
    dtypes: list[torch.dtype] = []
    counts: list[int] = []
    for param in group.native.fsdp_params:
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            own = list(param.all_gather_inputs)
            kinds = [t.dtype for t in own]
        else:
            sharded = param.sharded_state == ShardedState.SHARDED
            shard = param._sharded_param_data if sharded else param._sharded_post_forward_param_data
            own, kinds = [shard], [param.param_dtype or shard.dtype]
        inputs += own
        dtypes += kinds
        counts.append(len(own))
    return inputs, dtypes, counts


def row_counts(group: ParamGroup) -> list[int]:
    """For each parameter, into how many rows of the unsharded tensor one rank's shard is cut: 1 for ``Shard(0)``."""
    return [math.prod(p.padded_sharded_param_size[: p.fsdp_placement.dim]) for p in group.native.fsdp_params]


def made_outputs(group: ParamGroup) -> list[tuple[int, torch.dtype]]:
    """Elements and type of the unsharded tensors that FSDP2 has made, empty before the first unshard.

    ``init_all_gather_outputs`` returns early from then on, whatever it is asked for (2.13-2.15).
    """
    made = [t for param in group.native.fsdp_params for t in param.all_gather_outputs]
    sizes = [math.prod(t.shape) for t in made]  # not the storage's: it is empty between the uses
    return [(n, t.dtype) for n, t in zip(sizes, made, strict=True)]


def allocate_outputs(
    group: ParamGroup, numels: Sequence[int], dtypes: Sequence[torch.dtype], counts: Sequence[int], world_size: int
) -> list[torch.Tensor]:
    """The unsharded tensors, flat, with their storages allocated; one for each input."""
    native, outputs, at = group.native, [], 0
    for param, count in zip(native.fsdp_params, counts, strict=True):
        param.init_all_gather_outputs(
            list(numels[at : at + count]), list(dtypes[at : at + count]), world_size, native.device
        )
        param.alloc_all_gather_outputs()
        outputs += param.all_gather_outputs
        at += count
    return outputs


# --- watching FSDP2's steps from outside -------------------------------------------------------------------

Step = Literal["unshard", "wait", "reduce"]
Wrap = Callable[[Step, Callable[..., Any], Callable[[], bool] | None], Callable[..., Any]]


@contextlib.contextmanager
def wrapped_steps(groups: Sequence[ParamGroup], wrap: Wrap) -> Iterator[None]:
    """Let ``wrap`` stand around FSDP2's own steps while the block runs, whoever moves the bytes.

    Args:
        groups: whose ``unshard`` and ``wait_for_unshard`` are wrapped; ``foreach_reduce`` is for all groups at once.
        wrap: gets the step, its call, and for the first two whether an unshard is pending; returns the new call.
    """
    natives = [group.native for group in groups]
    reduce = _groups.foreach_reduce
    for native in natives:
        pending = functools.partial(_is_pending, native)
        native.unshard = wrap("unshard", native.unshard, pending)
        native.wait_for_unshard = wrap("wait", native.wait_for_unshard, pending)
    _groups.foreach_reduce = wrap("reduce", reduce, None)
    try:
        yield
    finally:
        _groups.foreach_reduce = reduce
        for native in natives:
            del native.unshard, native.wait_for_unshard  # the class's own are behind them


def _is_pending(native: Any) -> bool:
    return native._all_gather_result is not None
