"""What our own wire does on GPUs, as far as a machine without one can tell: the kernel's arithmetic in triton's
interpreter, the driver's structures, the watchdog's texts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_symm.errors import SymmMemUnavailableError
from fsdp_symm.memory.cuda_driver import Copies, MemOps, cuda_driver
from fsdp_symm.memory.stream_flags import StreamFlags, control_nbytes, first_words

pytest.importorskip("triton")

SUMS = """
import torch, torch.distributed as dist
from fsdp_symm.wire.device_sum import PieceSum
from fsdp_symm.wire.reduce import reduce_chunks
generator = torch.Generator().manual_seed(5)
# Not bfloat16: the interpreter truncates where GPUs round.
types = [(d, d) for d in (torch.float32, torch.float16, torch.float64)] + [(torch.float16, torch.float32)]
for dtype, wide in types:
    for world_size in (2, 3, 4):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.3)):
            for numel, first in ((1, 0), (5000, 3), (70000, 0)):
                rank = world_size // 2
                chunks = torch.randn(world_size, numel, generator=generator, dtype=torch.float64).to(dtype)
                expected = torch.empty(numel, dtype=wide)
                reduce_chunks(expected, list(chunks), op)
                output = torch.full((first + numel + 2,), float("nan"), dtype=wide)
                rows = torch.stack([c for r, c in enumerate(chunks) if r != rank])
                word = torch.tensor([output.data_ptr()])
                width = dtype.itemsize
                PieceSum.of(op, dtype, wide, rank, world_size).launch(
                    word, chunks[rank].data_ptr(), rows.data_ptr(), first * width, numel * width, False
                )
                assert torch.equal(output[first : first + numel], expected), (dtype, world_size, op, numel)
                assert output[:first].isnan().all() and output[first + numel :].isnan().all()
print("done")
"""


def test_the_sum_kernel_adds_in_rank_order_and_writes_nothing_else() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr


COPIES = """
import random, torch
from fsdp_symm.wire.device_copy import TwoPlaces, castable
chance = random.Random(7)
pairs = [(torch.float32, torch.float16), (torch.float64, torch.float32), (torch.uint8, torch.uint8),
         (torch.bfloat16, torch.bfloat16), (torch.int64, torch.int64), (torch.float16, torch.float32)]
assert all(castable(*pair) for pair in pairs) and not castable(torch.int32, torch.float32)
for round in range(6):
    sources, firsts, seconds, frames = [], [], [], []
    for index in range(chance.choice([1, 3, 7])):
        source_dtype, target_dtype = chance.choice(pairs)
        numel = chance.choice([0, 1, 4095, 4096, 4097, 9000])
        source = torch.randint(0, 100, (numel,), dtype=torch.int64).to(source_dtype)
        outs = []
        for _ in range(2):
            before = chance.choice([0, 1, 8])
            frame = torch.full((before + numel + 5,), 111, dtype=target_dtype)
            frames.append((frame, before, source.to(target_dtype)))
            outs.append(frame[before : before + numel])
        sources.append(source), firsts.append(outs[0]), seconds.append(outs[1])
    copies = TwoPlaces(sources, firsts, seconds)
    copies.launch()
    for frame, before, expected in frames:
        inside = frame[before : before + expected.numel()]
        assert torch.equal(inside, expected), (frame.dtype, expected.numel())
        assert (frame == 111).sum() - (inside == 111).sum() == frame.numel() - inside.numel()
print("done")
"""


def test_the_copy_kernel_fills_both_places_and_nothing_else() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COPIES], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_an_op_that_cannot_be_summed_is_refused() -> None:
    import torch.distributed as dist

    from fsdp_symm.errors import SymmMemError
    from fsdp_symm.wire.device_sum import PieceSum, summable

    assert not summable(dist.ReduceOp.MAX, torch.float32)
    assert not summable(dist.ReduceOp.SUM, torch.int32)
    with pytest.raises(SymmMemError, match=r"MAX of torch\.float32(.|\n)*reduce_scatter='nccl'"):
        PieceSum.of(dist.ReduceOp.MAX, torch.float32, torch.float32, 0, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(SymmMemUnavailableError, match=r"the CUDA driver could not be loaded(.|\n)*backend='host'"):
        cuda_driver()


def _ops(ops: MemOps) -> np.ndarray:
    import ctypes

    raw = ctypes.string_at(ops.address.value or 0, 48 * ops.count)
    return np.frombuffer(raw, np.uint8).reshape(ops.count, 48)


def test_memory_operations_lie_as_the_driver_reads_them() -> None:
    ops = MemOps(waits=[(0x1122334455667788, 7)], writes=[(0x10, 9)], pointer=0x20)
    ops.set_pointer(0xAABBCCDDEEFF0011)
    wait, write, pointer = _ops(ops)
    assert [int(row[:4].view(np.uint32)[0]) for row in (wait, write, pointer)] == [1, 2, 5]
    assert int(wait[8:16].view(np.uint64)[0]) == 0x1122334455667788
    assert int(wait[16:24].view(np.uint64)[0]) == 7
    assert int(write[16:24].view(np.uint64)[0]) == 9
    assert int(pointer[16:24].view(np.uint64)[0]) == 0xAABBCCDDEEFF0011
    assert not wait[24:].any(), "flag 0 waits for 'at least'"


@dataclass
class FakeDriver:
    """Carries out what a stream would, at once, on one flat memory."""

    memory: dict[int, int]
    stuck: list[int] = field(default_factory=list)

    def mem_ops(self, ops: MemOps, stream: int) -> None:
        for row in _ops(ops):
            kind, address = int(row[:4].view(np.uint32)[0]), int(row[8:16].view(np.uint64)[0])
            value = int(row[16:24].view(np.uint64)[0])
            if kind == 1 and self.memory.get(address, 0) < value:
                self.stuck.append(address)
            elif kind == 2:
                self.memory[address] = value

    def copy(self, copies: Copies, stream: int, *, capturing: bool = False) -> None:
        for target, source, _ in copies.flat:
            self.memory[target] = self.memory.get(source, 0)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_flag_has_a_word_of_its_own_and_reaches_its_peer(world_size: int) -> None:
    num_slots = 3
    controls = [0x10000 * (r + 1) for r in range(world_size)]
    first = first_words(world_size, num_slots).tolist()
    driver: Any = FakeDriver({control + 4 * i: word for control in controls for i, word in enumerate(first)})
    flags = [StreamFlags(driver, controls, rank, num_slots) for rank in range(world_size)]
    one = flags[0]
    words = {one.index(k, s, p) for k in ("ready", "done") for s in range(num_slots) for p in range(world_size)}
    words |= {one.stage_index(s) for s in range(num_slots)}
    assert words == set(range(len(first) - 1)), "and the last one is the constant"
    assert 4 * len(first) == control_nbytes(world_size, num_slots)

    def stuck(wait: Callable[[StreamFlags], object]) -> int:
        driver.stuck.clear()
        for own in flags:
            wait(own)
        return len(driver.stuck)

    everybody = world_size * (world_size - 1)
    for slot in (0, 2, 1, 2, 2):  # some come again
        assert stuck(lambda own, s=slot: own.await_readers(s, 0)) == 0
        assert stuck(lambda own, s=slot: own.await_data(s, 0)) == everybody, "nobody has published yet"
        for own in flags:
            own.publish(slot, 0, capturing=False)
        assert stuck(lambda own, s=slot: own.await_readers(s, 0)) == everybody, "nobody has read yet"
        assert stuck(lambda own, s=slot: own.await_data(s, 0)) == 0
        for own in flags:
            own.finish(slot, 0, capturing=False)


# --- the watchdog ------------------------------------------------------------------------------------------


@dataclass
class FakeNotices:
    report: str | None = None
    dead: tuple[int, ...] = ()

    def reported(self) -> str | None:
        return self.report

    def dead_ranks(self) -> list[int]:
        return list(self.dead)


@dataclass
class FakeSegment:
    """A segment of ranks 4 and 5, seen from rank 4."""

    words: torch.Tensor | None
    notices: FakeNotices
    ranks: tuple[int, ...] = (4, 5)
    rank: int = 0
    timeout_s: float = 30.0
    flags: Any = None
    absent: tuple[int, ...] | None = ()

    def not_issued(self, lane: str, epoch: int) -> list[int] | None:
        return None if self.absent is None else list(self.absent)

    def read_flags(self, patience_s: float) -> torch.Tensor | None:
        return self.words


@dataclass
class FakeFlags:
    def index(self, kind: str, slot: int, peer: int) -> int:
        return {"ready": 0, "done": 2}[kind] + peer

    def stage_index(self, slot: int) -> int:
        return 4


def _text(
    age_s: float, words: list[int] | None = None, absent: tuple[int, ...] | None = (), **notices: Any
) -> str | None:
    from fsdp_symm.wire.watchdog import Pending, _verdict

    tensor = None if words is None else torch.tensor(words, dtype=torch.int32)
    segment: Any = FakeSegment(tensor, FakeNotices(**notices), flags=FakeFlags(), absent=absent)
    event: Any = None
    return _verdict(Pending(segment, 0, "unshard", 9, "unshard of 'layers.3'", event, time.monotonic() - age_s))


def test_the_watchdog_waits_in_silence_while_a_call_may_still_end() -> None:
    assert _text(29.0, [0, 0, 0, 0, 1]) is None
    assert _text(1.0, dead=(5,)) is None, "a rank that has ended may have done its part"


def test_the_watchdog_names_the_call_the_ranks_and_what_they_owe() -> None:
    text = _text(31.0, [0, 0, 0, 0, 1]) or ""
    assert "unshard of 'layers.3', call 9 of group [4, 5]: ranks [5] have not published their data" in text
    assert "found: not ended on this rank's GPU within 30 s" in text
    for words in ([0, 1, 0, 0, 2], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0]):
        assert "ranks [5] have not read this rank's data" in (_text(31.0, words) or "")
    for words in ([0, 1, 0, 0, 1], [0, 0, 0, 1, 2]):
        assert "this rank's GPU is busy with something else" in (_text(31.0, words) or "")
    assert "not all ranks' GPUs have come, though all have issued it" in (_text(31.0) or "")
    assert "call 9 of group [4, 5]: ranks [5] have not issued this call" in (_text(31.0, absent=(5,)) or "")
    assert "not all ranks' GPUs have come\n" in (_text(31.0, absent=None) or ""), "over several hosts nobody knows"


def test_the_watchdog_quotes_failures_and_names_dead_ranks() -> None:
    assert "is stuck: rank 5 reported: out of memory" in (_text(0.1, report="rank 5 reported: out of memory") or "")
    assert "of group [4, 5]: ranks [5] are gone" in (_text(3.0, dead=(5,)) or "")


def _replayed(looks: list[list[int]], timeout_s: float = 0.0) -> tuple[str | None, int]:
    """The verdict of a second look at flags that show these words one after the other, and how many were shown."""
    from fsdp_symm.wire.watchdog import Replayed

    segment: Any = FakeSegment(None, FakeNotices(), flags=FakeFlags(), timeout_s=timeout_s)
    shown = iter(looks)
    segment.read_flags = lambda patience_s: torch.tensor(next(shown), dtype=torch.int32)
    watched = Replayed(segment)
    watched.calls[0] = "ep dispatch"
    assert watched.verdict() is None, "since now"
    time.sleep(0.001)
    text = watched.verdict()
    return text, len(looks) - len(list(shown))


def test_a_replay_that_waits_for_the_same_ranks_for_ever_is_reported() -> None:
    waits, goes_on, idle = [0, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 1, 2]
    text, _ = _replayed([waits] * 100)
    assert text is not None
    assert "ep dispatch, replayed by a CUDA graph: ranks [5] have not published their data" in text
    assert "every rank of group [4, 5] to replay the same graphs in the same order" in text
    assert _replayed([waits] * 100, timeout_s=60.0)[0] is None
    for other in (goes_on, idle):
        assert _replayed([*[waits] * 30, other, *[waits] * 60])[0] is None, "one look is enough to see progress"
        assert _replayed([other] * 10) == (None, 2), "nothing that seems stuck is looked at twice"
