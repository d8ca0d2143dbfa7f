"""The copy that begins an unshard: a rank's shards are cast into the slot, for the peers, and to their own places.

On a GPU one kernel does both, reading every shard once. It is made when a call comes for the second time, since its
table of addresses costs a transfer; until then, and on the CPU, torch's fused copy does the same.

Legend: n elements of one rank's shard of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fsdp_symm import compat

if TYPE_CHECKING:
    from fsdp_symm.wire.device_copy import TwoPlaces


class CopyIn:
    """The copy of one param group into one slot and one place of its parameters.

    Args:
        shards: ``[n]`` each, where the slot holds them.
        own: where they belong in the unsharded parameters: ``[n]``, or ``[rows, n / rows]`` where a shard is cut.
    """

    def __init__(self, shards: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        self._shards, self._own = list(shards), list(own)
        self._sources: list[tuple[int, torch.dtype]] = []  # of the last call
        self._kernel: TwoPlaces | None = None
        self._rest: list[int] = []  # what the kernel leaves out

    def run(self, inputs: Sequence[torch.Tensor]) -> None:
        """Cast and copy ``inputs [n]``, ordered by the current stream."""
        device = self._shards[0].device
        if any(t.device != device for t in inputs):
            self._from_elsewhere(inputs)
            return
        if device.type != "cuda":
            self._fused(inputs, range(len(inputs)))
            return
        sources = [(t.data_ptr(), t.dtype) for t in inputs]
        if sources != self._sources:
            if self._kernel is not None:
                torch.cuda.synchronize(device)  # it may still read its table; rare: shards have moved
            self._sources, self._kernel = sources, None
            self._fused(inputs, range(len(inputs)))
            return
        if self._kernel is None:
            self._kernel, self._rest = self._make_kernel(inputs)
        self._kernel.launch()
        if self._rest:
            self._fused(inputs, self._rest)

    def _make_kernel(self, inputs: Sequence[torch.Tensor]) -> tuple[TwoPlaces, list[int]]:
        """The kernel, and the shards that it does not know: cut into rows, or of types that it cannot cast."""
        from fsdp_symm.wire.device_copy import TwoPlaces, castable  # needs triton, which CUDA builds of torch bring

        known, rest = [], []
        for index, (source, shard, own) in enumerate(zip(inputs, self._shards, self._own, strict=True)):
            (known if own.dim() == 1 and castable(source.dtype, shard.dtype) else rest).append(index)
        chosen = [[tensors[i] for i in known] for tensors in (inputs, self._shards, self._own)]
        return TwoPlaces(*chosen), rest

    def _fused(self, inputs: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        targets = [self._shards[i] for i in indices] + [self._own[i] for i in indices]
        sources = [inputs[i] for i in indices] + [inputs[i].view(self._own[i].shape) for i in indices]
        compat.copy_many(targets, sources)

    def _from_elsewhere(self, inputs: Sequence[torch.Tensor]) -> None:
        """Bytes that come from the CPU come once."""
        for shard, place, tensor in zip(self._shards, self._own, inputs, strict=True):
            shard.copy_(tensor, non_blocking=True)
            place.copy_(shard.view(place.shape))
