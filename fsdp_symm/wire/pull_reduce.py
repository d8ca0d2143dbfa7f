"""Reduce-scatter by copy engines: peers' chunks are pulled in pieces and summed locally, in rank order.

Pulls run on a stream forked off the caller's into two staging buffers; the sum of one piece runs while the next one is
pulled. The sum is the same for every piece size and on every run: ``x_0 + x_1 + ... + x_(W-1)`` by rank, in fp32 (fp64
for fp64), scaled and rounded once at the end, exactly as :func:`fsdp_symm.wire.reduce.reduce_chunks` does on CPU ranks.
An output in fp32 takes inputs in bf16 or fp16 too, and equals what inputs cast to fp32 would give: half the bytes.

All of it is one replayed graph, but not where ranks share a GPU. Only the output's address changes from call to call,
since it becomes the parameters' gradients; the kernels read it from a word that the stream writes first.

Legend: W ranks, C elements of a rank's chunk, P elements of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError, problem
from fsdp_symm.memory.arena import Lease
from fsdp_symm.memory.cuda_driver import Copies, MemOps
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.stream_flags import StreamFlags
from fsdp_symm.wire.device_sum import PieceSum
from fsdp_symm.wire.replays import Enqueueing, Replays

_BUFFERS = 2
# A chunk is cut into a few pieces, so that the first sum starts early and only a short one is left at the end. Small
# pieces cost more than they bring: beside the model's kernels every sum first waits for free SMs. Measured on H200s.
_PIECES = 4
_MIN_PIECE_BYTES = 4 << 20
_BUFFER_BYTES = 32 << 20  # at most, of one staging buffer, which holds a piece of every peer
PIECE_BYTES: int | None = None  # for benchmarks and tests: pieces of this size, whatever the rule says


def piece_bytes(chunk_bytes: int, world_size: int) -> int:
    """Bytes of one rank's piece, a multiple of 4 KiB but for the last."""
    if PIECE_BYTES is not None:
        return min(chunk_bytes, PIECE_BYTES)
    wanted = max(_MIN_PIECE_BYTES, -(-chunk_bytes // _PIECES))
    most = _BUFFER_BYTES // max(world_size - 1, 1)
    return min(chunk_bytes, -(-min(wanted, most) // 4096) * 4096)


class _Piece(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of a chunk, which go to the staging buffer at ``rows``."""

    start: int
    nbytes: int
    rows: int


@dataclass(frozen=True)
class _Job:
    """All that a graph depends on.

    Attributes:
        input: address of this rank's slot tensor ``[W * C]``.
        slot, offset: the slot's number, and where it lies in every rank's memory.
        chunk_bytes, piece_bytes: of one rank, as they travel.
        arithmetic: of the sum.
        aligned: whether the output starts on 16 bytes.
        buffers: addresses of the staging buffers; rows by rank without the own one.
    """

    input: int
    slot: int
    offset: int
    chunk_bytes: int
    piece_bytes: int
    arithmetic: PieceSum
    aligned: bool
    buffers: tuple[int, ...]

    @property
    def pieces(self) -> list[_Piece]:
        """In order."""
        return [
            _Piece(start, min(self.piece_bytes, self.chunk_bytes - start), self.buffers[index % _BUFFERS])
            for index, start in enumerate(range(0, self.chunk_bytes, self.piece_bytes))
        ]


class PullReduce:
    """Runs the reduce-scatters of one arena."""

    def __init__(self, segment: DeviceSegment, flags: StreamFlags, peers: tuple[int, ...], replays: Replays) -> None:
        self._segment = segment
        self._flags = flags
        self._peers = peers
        self._replays = replays
        self._pulls = torch.cuda.Stream(segment.device, priority=-1)  # as FSDP2's streams of collectives
        self._output = torch.zeros(1, dtype=torch.int64, device=segment.device)  # where the kernels write
        self._output_word = MemOps(pointer=self._output.data_ptr())
        self._staging: list[torch.Tensor] = []
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None  # where the last call ran, and its end
        self._captured = False  # whether a graph of the user's names the buffers
        self._named: list[torch.Tensor] = []  # buffers that were replaced, but such a graph names them

    def run(
        self, output: torch.Tensor, input_: torch.Tensor, op: object, lease: Lease, stream: torch.cuda.Stream
    ) -> None:
        """Reduce into ``output [C]`` from every rank's slot ``[W * C]``, ordered by ``stream``."""
        chunk = input_.nbytes // len(self._peers)
        piece = piece_bytes(chunk, len(self._peers))
        buffers = self._buffers_for(piece)
        if self._last is not None and self._last[0] != stream and not compat.is_capturing():
            stream.wait_event(self._last[1])  # it may still use the buffers and the output's word
        self._output_word.set_pointer(output.data_ptr())
        self._segment.driver.mem_ops(self._output_word, stream.cuda_stream)
        arithmetic = PieceSum.of(op, input_.dtype, output.dtype, self._segment.rank, len(self._peers))
        aligned = output.data_ptr() % 16 == 0
        job = _Job(input_.data_ptr(), lease.index, lease.offset, chunk, piece, arithmetic, aligned, buffers)
        graphed = not self._segment.shares_gpu
        self._replays.run(job, lambda where: self._pull_and_sum(job, where), stream, graphed=graphed)

    def ended(self, stream: torch.cuda.Stream, end: torch.cuda.Event | None) -> None:
        """Note where the last call ran and the event that ends it, ``None`` for one that was captured."""
        if end is not None:
            self._last = stream, end

    def _buffers_for(self, piece_bytes: int) -> tuple[int, ...]:
        """Addresses of staging buffers ``[W - 1, piece_bytes]``: those there are, unless a piece is larger."""
        nbytes = (len(self._peers) - 1) * piece_bytes
        capturing = compat.is_capturing()
        if not self._staging or self._staging[0].numel() < nbytes:
            if capturing:
                raise SymmMemError(
                    problem(
                        "reduce-scatter by copy engines inside a CUDA graph",
                        found="no staging buffers yet, or smaller ones",
                        expected="buffers that were made before the capture",
                        fix="run the step once before torch.cuda.graph",
                    )
                )
            torch.cuda.synchronize(self._segment.device)  # the old buffers may still be in use; rare, and at first only
            self._replays.close()
            if self._captured:
                self._named += self._staging
            self._staging = [
                torch.empty(nbytes, dtype=torch.uint8, device=self._segment.device) for _ in range(_BUFFERS)
            ]
            self._captured = False
        self._captured |= capturing
        return tuple(buffer.data_ptr() for buffer in self._staging)

    def _pull_and_sum(self, job: _Job, where: Enqueueing) -> None:
        """The protocol (:mod:`fsdp_symm.wire.copy_engine`), with all pieces pulled on a stream forked off and joined
        again, and summed on the call's."""
        stream, pulls = where.stream, self._pulls
        self._flags.publish(job.slot, where.handle, capturing=where.capturing)
        self._flags.await_data(job.slot, where.handle)
        pulls.wait_event(stream.record_event())
        own = job.input + self._segment.rank * job.chunk_bytes
        copies = self._replays.kept_copies(job, lambda _: [self._copies(job, piece) for piece in job.pieces], where)
        summed: list[Any] = []
        with torch.cuda.stream(stream):
            for index, (piece, from_peers) in enumerate(zip(job.pieces, copies, strict=True)):
                if index >= _BUFFERS:
                    pulls.wait_event(summed[index - _BUFFERS])
                self._segment.driver.copy(from_peers, pulls.cuda_stream, capturing=where.capturing)
                stream.wait_event(pulls.record_event())
                start = piece.start
                job.arithmetic.launch(self._output, own + start, piece.rows, start, piece.nbytes, job.aligned)
                summed.append(stream.record_event())
        self._flags.finish(job.slot, pulls.cuda_stream, capturing=where.capturing)
        stream.wait_event(pulls.record_event())

    def _copies(self, job: _Job, piece: _Piece) -> Copies:
        """One piece from every peer, peers in rotated order; row r is the r-th rank's but for our own."""
        rank, world_size = self._segment.rank, len(self._peers)
        source = job.offset + rank * job.chunk_bytes + piece.start
        flat = []
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            row = peer - (peer > rank)
            flat.append((piece.rows + row * piece.nbytes, self._peers[peer] + source, piece.nbytes))
        return Copies(flat)
