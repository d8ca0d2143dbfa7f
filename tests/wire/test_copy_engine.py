"""The copy-engine wire on simulated GPUs: what it enqueues, in which order, and that replays do the same again."""

from __future__ import annotations

import ctypes
import gc
import random
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemError
from fsdp_symm.memory.stream_flags import control_nbytes, first_words
from fsdp_symm.plan import Lane
from fsdp_symm.wire import copy_engine, pull_reduce, replays
from fsdp_symm.wire.pulls import Block, PullPlan
from fsdp_symm.wire.reduce import reduce_chunks
from fsdp_symm.wire.replays import Enqueueing, Replays
from tests.wire.simulated import NUM_SLOTS, FakeStream, Rank, SimulatedSegment, install, run

SLOT = 4096


@pytest.mark.parametrize(
    ("shares_gpu", "batched_blocks", "graphed"), [(False, 0, True), (False, 2, False), (True, 0, False)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_pulls_are_right_when_slots_come_again_and_calls_are_replayed(
    monkeypatch: Any, world_size: int, shares_gpu: bool, batched_blocks: int, graphed: bool
) -> None:
    """Graphs are for many blocks, and never for ranks that share a GPU: the driver would give small copies of a graph
    to kernels."""
    install(monkeypatch)
    monkeypatch.setattr(copy_engine, "_BATCHED_BLOCKS", batched_blocks)

    def program(segment: SimulatedSegment) -> None:
        rank = segment.rank
        ranks, rng = Rank(segment, "unshard", 2, SLOT), random.Random(rank)
        peers = [p for p in range(world_size) if p != rank]
        plans = [
            PullPlan([Block(p, 0, 0, p * n, n) for p in peers], rank=rank, world_size=world_size) for n in (64, 1024)
        ]
        rows = [Block(p, 128, 0, p * 16, 16, rows=8, pitch=world_size * 16) for p in peers]
        plans.append(PullPlan(rows, rank=rank, world_size=world_size))
        targets = {n: torch.empty(n * world_size, dtype=torch.uint8) for n in (64, 1024, 128)}
        for call in range(200):
            kind = (call * 7) % 3
            nbytes = (64, 1024, 128)[kind]
            target = targets[nbytes].fill_(0xA5)
            slot, lease = ranks.acquire(SLOT)
            slot.fill_((31 * call + rank) % 251)
            ranks.wire.pull(lease, ranks.calls, plans[kind], [target], what="t", async_op=False)
            view = target.view(8, world_size, 16) if kind == 2 else target.view(1, world_size, nbytes)
            for peer in range(world_size):
                expected = 0xA5 if peer == rank else (31 * call + peer) % 251
                assert view[:, peer].eq(expected).all(), f"call {call}, from rank {peer}"
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.002)
        if graphed:
            assert segment.driver.launches > 190, "nearly every call is one replay"
        else:
            assert segment.driver.launches == 0
            assert len(segment.driver.distinct) < 40, "C arrays are made once a call that comes again"

    run(world_size, 2 * SLOT, program, shares_gpu=shares_gpu)


@pytest.mark.parametrize("lane", ["unshard", "dispatch"])
def test_a_slot_is_written_again_only_after_its_last_call_whatever_the_stream(monkeypatch: Any, lane: Lane) -> None:
    """The *done* words that its next user waits for are good only once the last call has taken the old ones back."""
    install(monkeypatch)

    def program(segment: SimulatedSegment) -> None:
        rank = segment.rank
        ranks = Rank(segment, lane, 2, SLOT)
        plan = PullPlan([Block(1 - rank, 0, 0, 0, 64)], rank=rank, world_size=2)
        ends = []
        for _ in range(6):
            _, lease = ranks.acquire(64)
            if len(ends) >= 2:
                waited: Any = compat.current_stream(segment.device)
                assert waited.waited_for[-1] is ends[-2], "the last call on this slot"
            ends.append(
                ranks.wire.pull(
                    lease, ranks.calls, plan, [torch.empty(64, dtype=torch.uint8)], what="t", async_op=False
                )
            )
        assert all(end is not None for end in ends)

    run(2, 2 * SLOT, program)


def test_reduce_scatters_on_two_streams_share_their_buffers_in_turn(monkeypatch: Any) -> None:
    """Staging buffers and the output's word belong to the arena, whatever slot and stream a call is on."""
    install(monkeypatch)

    def program(segment: SimulatedSegment) -> None:
        ranks, streams = Rank(segment, "reduce_scatter", 2, SLOT), [FakeStream(), FakeStream()]
        monkeypatch.setattr(ranks.wire, "_enter", lambda lease, epoch: streams[ranks.calls % 2])
        ends: list[Any] = []
        for _ in range(4):
            slot, lease = ranks.acquire(64)
            output = torch.empty(8, dtype=torch.float32)
            before = len(streams[ranks.calls % 2].waited_for)
            source = slot.view(torch.float32)
            ranks.wire.reduce_scatter(output, source, dist.ReduceOp.SUM, lease, ranks.calls, module="m", async_op=False)
            waited = streams[ranks.calls % 2].waited_for[before:]
            assert ends[-1:] == waited[: len(ends[-1:])], "the end of the call before"
            ends.append(ranks.wire._reduce._last[1])

    run(2, 2 * SLOT, program)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_a_captured_pull_can_be_replayed_between_other_calls(monkeypatch: Any, world_size: int, warm_up: int) -> None:
    install(monkeypatch)

    def program(segment: SimulatedSegment) -> None:
        rank, rng = segment.rank, random.Random(segment.rank)
        ranks = Rank(segment, "dispatch", 2, SLOT)
        peers = [p for p in range(world_size) if p != rank]
        plan = PullPlan([Block(p, 0, 0, p * 256, 256) for p in peers], rank=rank, world_size=world_size)
        source = torch.zeros(256, dtype=torch.uint8)  # static, as a graph's inputs are
        targets = [torch.empty(256 * world_size, dtype=torch.uint8) for _ in range(3)]

        def call(target: torch.Tensor) -> None:
            slot, lease = ranks.acquire(256)
            to, size = slot.data_ptr(), slot.nbytes
            segment.driver.do(lambda: ctypes.memmove(to, source.data_ptr(), size))
            ranks.wire.pull(lease, ranks.calls, plan, [target], what="t", async_op=False)

        def check(value: int, found: list[torch.Tensor]) -> None:
            for target in found:
                assert target.view(world_size, 256)[peers].eq(torch.tensor([[value + p] for p in peers])).all()

        for step in range(warm_up):
            source.fill_(step + rank)
            call(targets[0])
            check(step, targets[:1])
        graph = segment.driver.user_capture(lambda: [call(t) for t in targets])  # three calls on two slots
        for replay in range(60):
            value = 10 + 2 * replay
            source.fill_(value + rank)
            for target in targets:
                target.fill_(0xEE)
            segment.driver.launch(graph, 0)
            check(value, targets)
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.002)
            if replay % 3 == 0:  # an eager call in between, on every rank
                source.fill_(value + 1 + rank)
                call(targets[0])
                check(value + 1, targets[:1])

    run(world_size, 2 * SLOT, program)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("piece_bytes", [64, 256, 1 << 20])
def test_reduce_scatters_sum_in_rank_order_into_whatever_output(
    monkeypatch: Any, world_size: int, piece_bytes: int
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(pull_reduce, "PIECE_BYTES", piece_bytes)

    def program(segment: SimulatedSegment) -> None:
        rank, numel = segment.rank, 150
        ranks = Rank(segment, "reduce_scatter", 1, SLOT)
        kept = []
        for call in range(12):
            dtype = (torch.float32, torch.bfloat16)[call % 2]
            wide = torch.float32 if call % 4 == 3 else dtype  # an fp32 sum of what travels as bf16
            generator = torch.Generator().manual_seed(call)
            whole = torch.randn(world_size, world_size, numel, generator=generator).to(dtype)
            slot, lease = ranks.acquire(world_size * numel * dtype.itemsize)
            source = slot.view(dtype)
            source.copy_(whole[rank].flatten())
            output = torch.full((numel,), float("nan"), dtype=wide)
            kept.append(output)  # gradients live on: every call has another address
            ranks.wire.reduce_scatter(output, source, dist.ReduceOp.SUM, lease, ranks.calls, module="m", async_op=False)
            expected = torch.empty_like(output)
            reduce_chunks(expected, [whole[r][rank] for r in range(world_size)], dist.ReduceOp.SUM)
            assert torch.equal(output, expected), f"call {call}"

    run(world_size, SLOT, program)


def test_buffers_that_a_captured_reduce_scatter_names_stay(monkeypatch: Any) -> None:
    install(monkeypatch)
    monkeypatch.setattr(pull_reduce, "PIECE_BYTES", 1 << 20)

    def program(segment: SimulatedSegment) -> None:
        ranks = Rank(segment, "reduce_scatter", 1, SLOT)
        output = torch.empty(64)

        def call(numel: int) -> None:
            slot, lease = ranks.acquire(2 * 4 * numel)
            source, values = slot.view(torch.float32), torch.arange(2 * numel, dtype=torch.float32)
            segment.driver.do(lambda: source.copy_(values))
            out = output[:numel]
            ranks.wire.reduce_scatter(out, source, dist.ReduceOp.SUM, lease, ranks.calls, module="m", async_op=False)

        with pytest.raises(SymmMemError, match=r"run the step once before torch\.cuda\.graph"):
            segment.driver.user_capture(lambda: call(16))
        call(16)
        graph = segment.driver.user_capture(lambda: call(16))
        kept = weakref.ref(ranks.wire._reduce._staging[0].untyped_storage())
        call(64)  # larger pieces: other buffers
        gc.collect()
        assert kept() is not None, "replays still write there"
        output.fill_(-1)
        segment.driver.launch(graph, 0)
        expected = 2.0 * (torch.arange(16) + 16 * segment.rank)
        assert torch.equal(output[:16], expected)

    run(2, SLOT, program)


def test_an_all_gather_leaves_its_own_chunk_alone(monkeypatch: Any) -> None:
    install(monkeypatch)

    def program(segment: SimulatedSegment) -> None:
        ranks = Rank(segment, "all_gather", 2, SLOT)
        for call in range(6):
            slot, lease = ranks.acquire(3 * 256)
            slot.fill_(0xEE)
            slot[256 * segment.rank : 256 * (segment.rank + 1)] = 10 * call + segment.rank
            ranks.wire.all_gather(slot, lease, ranks.calls, module="m", async_op=False)
            assert slot.view(3, 256).eq(torch.tensor([[10 * call + r] for r in range(3)])).all()

    run(3, 2 * SLOT, program)


def test_targets_without_room_are_refused_before_any_peer_hears_of_the_call(monkeypatch: Any) -> None:
    install(monkeypatch)

    def program(segment: SimulatedSegment) -> None:
        ranks, peer = Rank(segment, "unshard", 2, SLOT), 1 - segment.rank
        plan = PullPlan([Block(peer, 0, 0, 0, 64)], rank=segment.rank, world_size=2)
        _, lease = ranks.acquire(64)
        for _ in range(2):  # a refused call is not a known one
            with pytest.raises(SymmMemError, match="t: a target has no room"):
                ranks.wire.pull(lease, 1, plan, [torch.empty(63, dtype=torch.uint8)], what="t", async_op=False)
        control = segment.peers[segment.rank] + 2 * SLOT
        words = compat.raw_tensor(control, control_nbytes(2, NUM_SLOTS), segment.device).view(torch.int32)
        assert torch.equal(words, first_words(2, NUM_SLOTS))

    run(2, 2 * SLOT, program)


def test_closing_frees_every_graph(monkeypatch: Any) -> None:
    install(monkeypatch)
    monkeypatch.setattr(copy_engine, "_BATCHED_BLOCKS", 0)

    def program(segment: SimulatedSegment) -> None:
        ranks, peer = Rank(segment, "unshard", 2, SLOT), 1 - segment.rank
        plan = PullPlan([Block(peer, 0, 0, 0, 64)], rank=segment.rank, world_size=2)
        target = torch.empty(64, dtype=torch.uint8)
        for _ in range(8):
            _, lease = ranks.acquire(64)
            ranks.wire.pull(lease, ranks.calls, plan, [target], what="t", async_op=False)
        assert len(segment.driver.living) == 2, "one for each slot"
        ranks.wire.close()
        assert segment.driver.living == []

    run(2, 2 * SLOT, program)


class CountingDriver:
    """Counts what a replay costs."""

    def __init__(self) -> None:
        self.captured, self.launched, self.forgotten = 0, 0, []

    def capture(self, stream: int, enqueue: Any) -> int:
        enqueue()
        self.captured += 1
        return self.captured

    def launch(self, graph: int, stream: int) -> None:
        self.launched += 1

    def forget(self, graph: int) -> None:
        self.forgotten.append(graph)


def test_a_call_is_captured_when_it_comes_again_and_never_when_it_does_not(monkeypatch: Any) -> None:
    install(monkeypatch)
    monkeypatch.setattr(replays, "_MAX_SEEN", 8)
    monkeypatch.setattr(replays, "_MAX_GRAPHS", 2)
    driver: Any = CountingDriver()
    stream: Any = FakeStream()
    cache, enqueued = Replays(driver, torch.device("cpu")), []
    for once in range(100):
        cache.run(("once", once), enqueued.append, stream, graphed=True)
    assert (driver.captured, len(enqueued)) == (0, 100)
    assert enqueued[0] == Enqueueing(stream, stream.cuda_stream, False)
    for _ in range(5):
        cache.run("again", enqueued.append, stream, graphed=True)
    assert (driver.captured, driver.launched) == (1, 4)
    assert enqueued[-1].capturing
    assert enqueued[-1].stream is not stream, "captured on a stream of its own"
    for key in ("b", "b", "c", "c"):
        cache.run(key, enqueued.append, stream, graphed=True)
    assert driver.forgotten == [1, 2], "a full cache starts anew"
    for _ in range(3):
        cache.run("never", enqueued.append, stream, graphed=False)
    assert (driver.captured, enqueued[-1].capturing) == (3, False)
    cache.close()
    assert driver.forgotten == [1, 2, 3]
