"""Where shards lie in a slot and in the unsharded tensors; pulls in rows fetch what single blocks would."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_symm import compat
from fsdp_symm.memory.unsharded import Room
from fsdp_symm.plan import SHARD_ALIGNMENT_BYTES
from fsdp_symm.shard_layout import ShardLayout, Shards
from fsdp_symm.wire.pulls import Block, PullPlan, in_rows

CPU = torch.device("cpu")
POISON = 0xA5


def _shards(numels: list[int], rows: list[int]) -> Shards:
    count = len(numels)
    return Shards(tuple(numels), (torch.bfloat16,) * count, (1,) * count, tuple(rows))


def _llama(width: int, hidden: int, world_size: int) -> Shards:
    full = [width * width, width * width // 4, width * width // 4, width * width, *[width * hidden] * 3, width, width]
    return _shards([n // world_size for n in full], [1] * 9)


def _pull(plan: PullPlan, slots: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """What a wire does with a plan."""
    plan.check_targets([t.nbytes for t in targets], "t")
    for block in plan.blocks:
        target = compat.raw_tensor(targets[block.target].data_ptr(), targets[block.target].nbytes, CPU)
        for row in range(block.rows):
            at, start = block.offset + row * block.pitch, block.source + row * block.nbytes
            target[at : at + block.nbytes] = slots[block.peer][start : start + block.nbytes]


@dataclass
class _Memory:
    """One block of memory from which tensors are cut in the layout's order, as an allocator does it."""

    block: torch.Tensor

    @property
    def room(self) -> Room:
        return Room(self.block.data_ptr(), self.block.nbytes)

    def cut(self, layout: ShardLayout, grain: int, alone: set[int]) -> list[torch.Tensor]:
        """The unsharded tensors; those in ``alone`` have memory of their own."""
        found: dict[int, torch.Tensor] = {}
        at = 0
        for allocation in layout.allocations:
            nbytes = layout.whole_nbytes[allocation.param]
            if allocation.param in alone:
                found[allocation.param] = torch.full((nbytes,), POISON, dtype=torch.uint8)
                continue
            found[allocation.param] = self.block[at : at + nbytes]
            at += -(-nbytes // grain) * grain
        return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_llama_block_is_fetched_in_four_blocks_a_peer(world_size: int) -> None:
    layout = ShardLayout.of(_llama(1024, 2048, world_size), 0, world_size, "layers.0")
    memory = _Memory(torch.empty(sum(layout.whole_nbytes) + 9 * 512, dtype=torch.uint8))
    plan, targets = layout.pull(memory.cut(layout, 512, set()), [memory.room])
    assert [t.data_ptr() for t in targets] == [memory.block.data_ptr()]
    assert {peer: sorted(b.rows for b in blocks) for peer, blocks in plan.by_peer.items()} == {
        peer: [2, 2, 2, 3] for peer in range(1, world_size)
    }
    plan, targets = layout.pull(memory.cut(layout, 512, {7, 8}), [memory.room])
    assert len(targets) == 3, "small tensors may lie elsewhere"
    assert len(plan.by_peer[1]) == 5
    plan, targets = layout.pull(memory.cut(layout, 512, set()), [])
    assert len(targets) == len(plan.by_peer[1]) == 9, "nothing is known of their memory"


def test_large_shards_are_fetched_one_by_one() -> None:
    layout = ShardLayout.of(_llama(2048, 8192, 2), 0, 2, "layers.0")  # shards of 4, 1 and 16 MiB
    memory = _Memory(torch.empty(sum(layout.whole_nbytes) + 9 * 512, dtype=torch.uint8))
    plan, _ = layout.pull(memory.cut(layout, 512, set()), [memory.room])
    assert sorted((b.nbytes >> 20, b.rows) for b in plan.blocks) == [(0, 2), (1, 2), *[(4, 1)] * 2, *[(16, 1)] * 3]


def test_a_plan_comes_again_for_the_same_places() -> None:
    layout = ShardLayout.of(_llama(512, 1024, 2), 1, 2, "m")
    first, second = (_Memory(torch.empty(sum(layout.whole_nbytes) + 9 * 512, dtype=torch.uint8)) for _ in range(2))
    plans = [layout.pull(m.cut(layout, 512, set()), [m.room])[0] for m in (first, second, first)]
    assert plans[0] is plans[1] is plans[2], "a wire keeps what it made of a plan"
    assert layout.pull(first.cut(layout, 512, {0}), [first.room])[0] is not plans[0]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, list[int], list[int], int, set[int]]:
    world_size = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.sampled_from([0, 1, 8, 64, 128, 192, 256, 384]), min_size=1, max_size=9))
    rows = [draw(st.sampled_from([1, 1, 1, 2, 4])) if size % 8 == 0 else 1 for size in sizes]
    grain = draw(st.sampled_from([2, 64, 512]))
    return world_size, sizes, rows, grain, set(draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3)))


@settings(max_examples=200, deadline=None)
@given(_cases())
def test_every_byte_arrives_wherever_tensors_lie(case: tuple[int, list[int], list[int], int, set[int]]) -> None:
    world_size, sizes, rows, grain, alone = case
    shards = _shards(sizes, rows)
    rank = random.Random(repr(case)).randrange(world_size)
    layout = ShardLayout.of(shards, rank, world_size, "m")
    for start, nbytes in zip(layout.offsets, shards.nbytes, strict=True):
        assert start % SHARD_ALIGNMENT_BYTES == 0
        assert start + nbytes <= layout.nbytes
    slots = [torch.randint(256, (layout.nbytes + 1,), dtype=torch.uint8) for _ in range(world_size)]
    memory = _Memory(torch.full((sum(layout.whole_nbytes) + len(sizes) * grain + 1,), POISON, dtype=torch.uint8))
    tensors = memory.cut(layout, grain, alone)
    before = memory.block.clone()

    plan, targets = layout.pull(tensors, [memory.room])
    _pull(plan, slots, targets)

    for index, (tensor, nbytes, cut) in enumerate(zip(tensors, shards.nbytes, rows, strict=True)):
        view = tensor.view(cut, world_size, nbytes // cut) if nbytes else tensor.view(0)
        for peer in range(world_size if nbytes else 0):
            at = layout.offsets[index]
            expected = slots[peer][at : at + nbytes].view(cut, -1)
            assert torch.equal(view[:, peer], torch.full_like(expected, POISON) if peer == rank else expected)
    touched = torch.zeros(memory.block.nbytes, dtype=torch.bool)
    for tensor in tensors:
        start = tensor.data_ptr() - memory.block.data_ptr()
        if tensor.nbytes and 0 <= start < memory.block.nbytes:
            touched[start : start + tensor.nbytes] = True
    assert torch.equal(memory.block[~touched], before[~touched]), "nothing between the tensors is written"


def test_only_even_distances_become_rows() -> None:
    def block(source: int, offset: int, nbytes: int = 256, peer: int = 1, target: int = 0) -> Block:
        return Block(peer, source, target, offset, nbytes)

    assert in_rows([block(0, 0), block(256, 1024), block(512, 2048)]) == [Block(1, 0, 0, 0, 256, 3, 1024)]
    apart = [
        [block(0, 0), block(256, 1024), block(512, 2049)],  # uneven: the third is alone
        [block(0, 1024), block(256, 0)],  # backwards
        [block(0, 0), block(257, 1024)],  # a gap in the slot
        [block(0, 0), block(256, 1024, peer=2)],
        [block(0, 0), block(256, 1024, target=1)],
        [block(0, 0), block(256, 100)],  # they overlap
        [block(0, 0), block(256, 2**31)],  # farther than a copy engine's pitch
        [block(0, 0), block(256, 1024, nbytes=128)],
    ]
    assert [len(in_rows(blocks)) for blocks in apart] == [2] * len(apart)
    cut = Block(1, 0, 0, 0, 256, 2, 512)
    assert in_rows([cut, block(512, 1024)]) == [block(512, 1024), cut], "what is cut into rows stays as it is"
