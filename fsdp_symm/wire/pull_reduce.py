"""Reduce-scatter by copy engines: peers' chunks are pulled in pieces and summed locally, in rank order.

Pulls run on a stream of their own into two staging buffers; the sum of one piece runs while the next one is pulled. The
sum is the same for every piece size and on every run: ``x_0 + x_1 + ... + x_(W-1)`` by rank, in fp32 (fp64 for fp64),
scaled and rounded once at the end, exactly as :func:`fsdp_symm.wire.reduce.reduce_chunks` does on CPU ranks.

Legend: W ranks, C elements of a rank's chunk, P elements of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.cuda_driver import Copies
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.stream_flags import StreamFlags
from fsdp_symm.wire.device_sum import sum_pieces

# Bytes of one rank's piece: large enough to keep a copy engine busy, small enough that the first sum starts early.
# Measured in profiles/reduce_scatter.csv.
PIECE_BYTES = 8 << 20
_BUFFERS = 2


@dataclass
class _Staging:
    """One staging buffer ``[W - 1, P]``, rows by rank without the own one, and the events that guard it."""

    memory: torch.Tensor
    filled: torch.cuda.Event
    summed: torch.cuda.Event
    used: bool = False


class PullReduce:
    """Runs the reduce-scatters of one arena."""

    def __init__(self, segment: DeviceSegment, flags: StreamFlags, peers: tuple[int, ...]) -> None:
        self._segment = segment
        self._flags = flags
        self._peers = peers
        self._pulls = torch.cuda.Stream(segment.device)
        self._published = torch.cuda.Event()
        self._staging: list[_Staging] = []
        self._copies: dict[tuple[int, int, int], list[Copies]] = {}

    def run(self, output: torch.Tensor, input_: torch.Tensor, op: object, lease: Lease, epoch: int) -> None:
        """Reduce into ``output [C]`` from every rank's slot ``[W * C]``, ordered by the current stream."""
        segment, lane = self._segment, lease.role
        current, pulls = torch.cuda.current_stream(segment.device), self._pulls
        numel, width = output.numel(), output.element_size()
        pieces = self._pieces(numel * width)
        copies = self._copies_of(lease, numel * width, pieces)
        self._published.record(current)
        pulls.wait_event(self._published)
        self._flags.number(lane, epoch, pulls.cuda_stream)
        self._flags.signal("ready", lane, pulls.cuda_stream)
        self._flags.wait("ready", lane, epoch, pulls.cuda_stream)
        own = input_.view(-1).narrow(0, segment.rank * numel, numel)
        for index, ((start, nbytes), batch) in enumerate(zip(pieces, copies, strict=True)):
            staging = self._staging[index % _BUFFERS]
            if staging.used:
                pulls.wait_event(staging.summed)
            segment.driver.copy(batch, pulls.cuda_stream)
            staging.filled.record(pulls)
            current.wait_event(staging.filled)
            at, count = start // width, nbytes // width
            rows = staging.memory.view(-1)[: (len(self._peers) - 1) * nbytes].view(output.dtype).view(-1, count)
            sum_pieces(output.view(-1).narrow(0, at, count), own.narrow(0, at, count), rows, segment.rank, op)
            staging.summed.record(current)
            staging.used = True
        self._flags.signal("done", lane, pulls.cuda_stream)

    def _pieces(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """(start, bytes) of each piece of a chunk; allocates staging for the largest so far."""
        self._ensure_staging(min(chunk_bytes, PIECE_BYTES))
        return [(at, min(PIECE_BYTES, chunk_bytes - at)) for at in range(0, chunk_bytes, PIECE_BYTES)]

    def _ensure_staging(self, piece_bytes: int) -> None:
        nbytes = (len(self._peers) - 1) * piece_bytes
        if self._staging and self._staging[0].memory.numel() >= nbytes:
            return
        if self._staging:
            torch.cuda.synchronize(self._segment.device)  # a larger layer than any before: rare, and only at first
        self._staging = [
            _Staging(
                torch.empty(nbytes, dtype=torch.uint8, device=self._segment.device),
                torch.cuda.Event(),
                torch.cuda.Event(),
            )
            for _ in range(_BUFFERS)
        ]
        self._copies.clear()

    def _copies_of(self, lease: Lease, chunk_bytes: int, pieces: list[tuple[int, int]]) -> list[Copies]:
        key = (lease.offset, chunk_bytes, self._staging[0].memory.data_ptr())
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = [
                self._piece_copies(index, start, nbytes, lease.offset, chunk_bytes)
                for index, (start, nbytes) in enumerate(pieces)
            ]
        return found

    def _piece_copies(self, index: int, start: int, nbytes: int, slot: int, chunk_bytes: int) -> Copies:
        """One piece from every peer, peers in rotated order; row r is the r-th rank's but for our own."""
        rank, world_size = self._segment.rank, len(self._peers)
        base = self._staging[index % _BUFFERS].memory.data_ptr()
        flat = []
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            row = peer - (peer > rank)
            flat.append((base + row * nbytes, self._peers[peer] + slot + rank * chunk_bytes + start, nbytes))
        return Copies(flat)
