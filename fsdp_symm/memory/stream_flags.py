"""Flags in device memory by which the streams of different ranks wait for each other, without a host or an SM.

For every slot and peer a rank owns two 32-bit words that the peer sets to 1 and the rank itself takes back to 0:
*ready*, "my slot holds data for you", and *done*, "I have read yours". A slot's next data is written only after every
peer's *done*, so no word is ever set twice in a row. The protocol has no numbers in it, so a whole call, waits
included, can be captured as a graph and replayed; NCCL's copy-engine collectives do the same inside CUDA graphs
(v2.30.7 src/ce_coll.cc). Remote words are written by four-byte copies out of a constant word, and waited for by stream
memory operations.

Layout of the control block, in words of four bytes (S slots, W ranks)::

    0            ready words  [S, W]   0 at first
    S * W        done words   [S, W]   1 at first: nobody reads a slot that was never used
    2 * S * W    stages       [S]      for a watchdog: what this rank's last call on the slot has reached
    + S          one          [1]      the constant 1
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch

from fsdp_symm.memory.cuda_driver import Copies, CudaDriver, MemOps

Kind = Literal["ready", "done"]
KINDS: tuple[Kind, ...] = ("ready", "done")
STARTED, FETCHING = 1, 2  # stages: waiting for the peers' data, or past it
_WORD_BYTES = 4


def control_nbytes(world_size: int, num_slots: int) -> int:
    """Bytes of the control block."""
    return _WORD_BYTES * (num_slots * (len(KINDS) * world_size + 1) + 1)


def first_words(world_size: int, num_slots: int) -> torch.Tensor:
    """``int32``, what the control block holds before the first call."""
    words = torch.zeros(control_nbytes(world_size, num_slots) // _WORD_BYTES, dtype=torch.int32)
    words[num_slots * world_size : 2 * num_slots * world_size] = 1
    words[-1] = 1
    return words


class StreamFlags:
    """This rank's flags and those of its peers.

    Args:
        driver: of this machine.
        controls: address of every rank's control block in this process, by group rank.
        rank: this rank's number in the group.
        num_slots: S.
    """

    def __init__(self, driver: CudaDriver, controls: Sequence[int], rank: int, num_slots: int) -> None:
        self._driver = driver
        self._rank = rank
        self._world_size = len(controls)
        self._num_slots = num_slots
        self._controls = tuple(controls)
        self._peers = [(rank + step) % len(controls) for step in range(1, len(controls))]
        # A slot's operations never change: they are made once.
        self._start = functools.cache(self._make_start)
        self._take = functools.cache(self._make_take)
        self._readers = functools.cache(lambda slot: MemOps(waits=self._own("done", slot)))
        self._signal = functools.cache(self._make_signal)

    # --- one call: await_readers, publish, await_data, finish; on one stream, or captured as it is ---

    def publish(self, slot: int, stream: int, *, capturing: bool) -> None:
        """Tell every peer that the slot holds data. After :meth:`await_readers`, in the order of streams."""
        self._driver.mem_ops(self._start(slot), stream)
        self._driver.copy(self._signal("ready", slot), stream, capturing=capturing)

    def await_data(self, slot: int, stream: int) -> None:
        """Hold the stream until every peer has published, and take the words back."""
        self._driver.mem_ops(self._take(slot), stream)

    def finish(self, slot: int, stream: int, *, capturing: bool) -> None:
        """Tell every peer that its slot was read."""
        self._driver.copy(self._signal("done", slot), stream, capturing=capturing)

    def await_readers(self, slot: int, stream: int) -> None:
        """Hold the stream until every peer has read what this slot held last."""
        self._driver.mem_ops(self._readers(slot), stream)

    # --- where the words are ---

    def index(self, kind: Kind, slot: int, peer: int) -> int:
        """Number of the word, in the owner's control block, that ``peer`` sets."""
        return (KINDS.index(kind) * self._num_slots + slot) * self._world_size + peer

    def stage_index(self, slot: int) -> int:
        """Number of the word that holds the slot's stage."""
        return len(KINDS) * self._num_slots * self._world_size + slot

    def _address(self, owner: int, index: int) -> int:
        return self._controls[owner] + _WORD_BYTES * index

    def _own(self, kind: Kind, slot: int) -> list[tuple[int, int]]:
        return [(self._address(self._rank, self.index(kind, slot, peer)), 1) for peer in self._peers]

    def _make_start(self, slot: int) -> MemOps:
        done = [(address, 0) for address, _ in self._own("done", slot)]
        return MemOps(writes=[*done, (self._address(self._rank, self.stage_index(slot)), STARTED)])

    def _make_take(self, slot: int) -> MemOps:
        ready = self._own("ready", slot)
        stage = (self._address(self._rank, self.stage_index(slot)), FETCHING)
        return MemOps(waits=ready, writes=[*((address, 0) for address, _ in ready), stage])

    def _make_signal(self, kind: Kind, slot: int) -> Copies:
        one = self._address(self._rank, len(KINDS) * self._num_slots * self._world_size + self._num_slots)
        mine = self.index(kind, slot, self._rank)
        return Copies([(self._address(peer, mine), one, _WORD_BYTES) for peer in self._peers])
