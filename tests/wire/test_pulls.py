"""Pulls between CPU ranks: every block in its place and nothing else touched; what cannot be pulled is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import SymmMemArena
from fsdp_symm.errors import SymmMemError
from fsdp_symm.plan import Ring
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import Block, PullPlan
from tests.harness import Ranks

SLOT = 4096
POISON = 0xA5


def _content(rank: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(256, (SLOT,), dtype=torch.uint8, generator=generator)


def _random_blocks(rng: random.Random, world_size: int, rank: int) -> tuple[list[Block], list[int]]:
    """Blocks that do not overlap in their targets, packed and pitched, in random order."""
    blocks, sizes = [], []
    for target in range(rng.randint(1, 4)):
        end = 0
        for _ in range(rng.randint(0, 5)):
            nbytes, rows = rng.randint(1, 60), rng.choice([1, 1, 2, 7])
            pitch = nbytes + rng.randint(0, 9) if rows > 1 else 0
            peer = rng.choice([p for p in range(world_size) if p != rank])
            source = rng.randrange(SLOT - nbytes * rows)
            block = Block(peer, source, target, end + rng.randint(0, 5), nbytes, rows, pitch)
            blocks.append(block)
            end = block.end
        sizes.append(end + rng.randint(1, 9))
    rng.shuffle(blocks)
    return blocks, sizes


def _reference(blocks: list[Block], sizes: list[int], call: int) -> list[torch.Tensor]:
    targets = [torch.full((size,), POISON, dtype=torch.uint8) for size in sizes]
    for block in blocks:
        source = _content(block.peer, call)
        for row in range(block.rows):
            at = block.offset + row * block.pitch
            start = block.source + row * block.nbytes
            targets[block.target][at : at + block.nbytes] = source[start : start + block.nbytes]
    return targets


def _random_pulls(seed: int, calls: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(seed), random.Random(seed + rank + 1)
    arena = SymmMemArena(dist.group.WORLD, [Ring("dispatch", 2, SLOT), Ring("combine", 1, SLOT)], timeout_s=30)
    wire = wire_of(arena)
    for call in range(calls):
        lane = common.choice(["dispatch", "combine"])
        blocks, sizes = _random_blocks(own, world_size, rank)  # ranks may fetch different things
        slot, lease = arena.acquire_lease(lane, SLOT, owner="t")
        slot.copy_(_content(rank, call))
        targets = [torch.full((size,), POISON, dtype=torch.uint8) for size in sizes]
        plan = PullPlan(blocks, rank=rank, world_size=world_size)
        work = wire.pull(lease, arena.next_epoch(lease), plan, targets, what=f"call {call}", async_op=call % 3 == 0)
        if work is not None:
            work.wait()
        del slot
        for mine, expected in zip(targets, _reference(blocks, sizes, call), strict=True):
            assert torch.equal(mine, expected), f"seed {seed}, call {call}"
    arena.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_pulls_put_every_byte_in_its_place(request: pytest.FixtureRequest, world_size: int) -> None:
    print("seed 7")
    request.getfixturevalue(f"ranks{world_size}").run(_random_pulls, 7, 60)


def _version_counters() -> None:
    rank = dist.get_rank()
    arena = SymmMemArena(dist.group.WORLD, [Ring("unshard", 1, 64)], timeout_s=30)
    slot, lease = arena.acquire_lease("unshard", 64, owner="t")
    slot.fill_(rank + 1)
    weight = torch.zeros(64, dtype=torch.uint8)
    before = weight._version
    plan = PullPlan([Block(1 - rank, 0, 0, 0, 64)], rank=rank, world_size=2)
    wire_of(arena).pull(lease, arena.next_epoch(lease), plan, [weight], what="t", async_op=False)
    assert weight.eq(2 - rank).all()
    assert weight._version == before, "autograd must not take a refilled parameter for a changed one"
    arena.close()


def test_targets_keep_their_version_counters(ranks2: Ranks) -> None:
    ranks2.run(_version_counters)


def _differing_calls() -> None:
    rank = dist.get_rank()
    arena = SymmMemArena(dist.group.WORLD, [Ring("dispatch", 1, 64)], timeout_s=10)
    _, lease = arena.acquire_lease("dispatch", 64, owner="t")
    plan = PullPlan([Block(1 - rank, 0, 0, 0, 8)], rank=rank, world_size=2)
    target = torch.zeros(8, dtype=torch.uint8)
    try:
        wire_of(arena).pull(lease, arena.next_epoch(lease), plan, [target], what=f"tokens of {rank}", async_op=False)
    finally:
        arena.abandon("test over")


def test_ranks_that_pull_for_different_calls_are_both_quoted(ranks2: Ranks) -> None:
    texts = [failure.text for failure in ranks2.failures(_differing_calls)]
    assert any("tokens of 0" in text and "tokens of 1" in text for text in texts), texts


def _small_target() -> Any:
    rank = dist.get_rank()
    arena = SymmMemArena(dist.group.WORLD, [Ring("dispatch", 1, 64)], timeout_s=10)
    _, lease = arena.acquire_lease("dispatch", 64, owner="t")
    plan = PullPlan([Block(1 - rank, 0, 1, 4, 8)], rank=rank, world_size=2)
    texts = []
    for targets in ([torch.zeros(64, dtype=torch.uint8)], [torch.zeros(2), torch.zeros(11, dtype=torch.uint8)]):
        with pytest.raises(SymmMemError) as caught:
            wire_of(arena).pull(lease, 1, plan, targets, what="pull t", async_op=False)
        texts.append(str(caught.value))
    arena.close()
    return texts


def test_a_target_without_room_is_refused(ranks2: Ranks) -> None:
    missing, small = ranks2.run(_small_target)[0]
    assert "pull t: a target has no room\n  found: targets of [64] bytes" in missing
    assert "targets of [8, 11] bytes" in small
    assert "fix: pass the tensors that the plan was made for" in small


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (Block(1, -1, 0, 0, 4), "a block that cannot be copied"),
        (Block(1, 0, 0, 0, 4, rows=2, pitch=3), "a block that cannot be copied"),
        (Block(0, 0, 0, 0, 4), "group ranks [0] on rank 0 of 2"),
        (Block(2, 0, 0, 0, 4), "group ranks [2] on rank 0 of 2"),
    ],
)
def test_bad_blocks_are_refused(block: Block, found: str) -> None:
    with pytest.raises(SymmMemError) as caught:
        PullPlan([block], rank=0, world_size=2)
    assert found in str(caught.value)


def test_peers_are_read_in_rotated_order_and_empty_blocks_are_left_out() -> None:
    plan = PullPlan([Block(p, 0, 0, 8 * p, 8 if p != 3 else 0) for p in (0, 2, 3)], rank=1, world_size=4)
    assert [b.peer for b in plan.blocks] == [2, 0]
    assert plan.number != PullPlan([], rank=0, world_size=2).number
