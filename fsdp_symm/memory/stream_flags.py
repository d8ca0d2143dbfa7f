"""Flags in device memory by which the streams of different ranks wait for each other, without a host or an SM.

Each rank owns one 32-bit word for every lane, kind of signal and peer; that peer writes the number of its last call
there. Numbers only grow, so a wait asks for "at least". Remote words are written by four-byte copies out of a local
word, as NCCL's copy-engine collectives do (v2.30.7 src/ce_coll.cc), and waited for by stream memory operations.

Layout of the control block, in words of four bytes (L lanes, W ranks)::

    0            ready words  [L, W]   "my slot of call e holds data"
    L * W        done words   [L, W]   "I have read your slot of call e"
    2 * L * W    source words [L]      the number that is copied to the peers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fsdp_symm.memory.cuda_driver import Copies, CudaDriver, MemOps
from fsdp_symm.plan import LANES, Lane

Kind = Literal["ready", "done"]
KINDS: tuple[Kind, ...] = ("ready", "done")
_WORD_BYTES = 4


def control_nbytes(world_size: int) -> int:
    """Bytes of the control block."""
    return _WORD_BYTES * len(LANES) * (len(KINDS) * world_size + 1)


class StreamFlags:
    """This rank's flags and those of its peers.

    Args:
        driver: of this machine.
        controls: address of every rank's control block in this process, by group rank.
        rank: this rank's number in the group.
    """

    def __init__(self, driver: CudaDriver, controls: Sequence[int], rank: int) -> None:
        self._driver = driver
        self._rank = rank
        self._world_size = len(controls)
        self._controls = tuple(controls)
        self._peers = [(rank + step) % len(controls) for step in range(1, len(controls))]
        self._waits = {
            (kind, lane): MemOps(waits=[self._word(rank, kind, lane, peer) for peer in self._peers])
            for kind in KINDS
            for lane in LANES
        }
        self._numbers = {lane: MemOps(writes=[self._source(lane)]) for lane in LANES}
        self._signals = {(kind, lane): Copies(self._signal_copies(kind, lane)) for kind in KINDS for lane in LANES}
        self._graphs: dict[tuple[Kind, Lane], int] = {}
        self._building = torch.cuda.Stream()

    def index(self, kind: Kind, lane: Lane, peer: int) -> int:
        """Number of the word, in the owner's control block, that ``peer`` writes."""
        return (KINDS.index(kind) * len(LANES) + LANES.index(lane)) * self._world_size + peer

    def _word(self, owner: int, kind: Kind, lane: Lane, peer: int) -> int:
        return self._controls[owner] + _WORD_BYTES * self.index(kind, lane, peer)

    def _source(self, lane: Lane) -> int:
        words = len(KINDS) * len(LANES) * self._world_size + LANES.index(lane)
        return self._controls[self._rank] + _WORD_BYTES * words

    def _signal_copies(self, kind: Kind, lane: Lane) -> list[tuple[int, int, int]]:
        return [(self._word(p, kind, lane, self._rank), self._source(lane), _WORD_BYTES) for p in self._peers]

    def number(self, lane: Lane, epoch: int, stream: int) -> None:
        """Set the number that the next signals of the lane carry. The lane's calls must be in order on the stream."""
        ops = self._numbers[lane]
        ops.set(epoch)
        self._driver.mem_ops(ops, stream)

    def signal(self, kind: Kind, lane: Lane, stream: int, *, replay: bool = True) -> None:
        """Tell every peer the lane's number.

        Args:
            replay: as a graph, which is cheaper for the host; ``False`` inside a capture.
        """
        if not replay:
            self._driver.copy(self._signals[kind, lane], stream, capturing=not replay)
            return
        graph = self._graphs.get((kind, lane))
        if graph is None:
            building = self._building.cuda_stream
            graph = self._driver.capture(building, lambda: self.signal(kind, lane, building, replay=False))
            self._graphs[kind, lane] = graph
        self._driver.launch(graph, stream)

    def close(self) -> None:
        """Free the graphs, once none is running."""
        while self._graphs:
            self._driver.forget(self._graphs.popitem()[1])

    def wait(self, kind: Kind, lane: Lane, epoch: int, stream: int) -> None:
        """Hold the stream until every peer has signalled ``epoch`` or a later call."""
        ops = self._waits[kind, lane]
        ops.set(epoch)
        self._driver.mem_ops(ops, stream)
