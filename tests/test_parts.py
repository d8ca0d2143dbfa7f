"""Reduce-scatter inputs that are larger than a slot pass through it in parts."""

from __future__ import annotations

import dataclasses
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import SymmMemArena, SymmMemReduceScatter
from fsdp_symm.errors import SymmMemConfigError, SymmMemPeerError
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import MAX_PARTS, PART_ELEMENTS, Member, Ring, narrowed, part_elements
from tests.harness import Ranks

CPU = torch.device("cpu")
SLOT = 8192
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def _expected(input_: torch.Tensor, name: str) -> torch.Tensor:
    """Summed in rank order in fp32 (fp64 for fp64) from what every rank has."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    everybody = [torch.empty_like(input_) for _ in range(world_size)]
    dist.all_gather(everybody, input_)
    wide = torch.float64 if input_.dtype == torch.float64 else torch.float32
    chunks = [x.view(world_size, -1)[rank].to(wide) for x in everybody]
    total = chunks[0]
    for chunk in chunks[1:]:
        total = torch.maximum(total, chunk) if name == "max" else total + chunk
    return (total / world_size if name == "avg" else total).to(input_.dtype)


def _random_calls(seed: int, calls: int, slots: int) -> int:
    """Calls of random sizes, types and ops through one ring, some in parts; how many of them were."""
    rng, world_size = random.Random(seed), dist.get_world_size()
    arena = SymmMemArena(dist.group.WORLD, [Ring("reduce_scatter", slots, SLOT)])
    comm = SymmMemReduceScatter(arena, module="m", strict=True)
    in_parts = 0
    for _ in range(calls):
        kind = rng.choice([torch.float32, torch.bfloat16, torch.float64])
        limit = SLOT // world_size // kind.itemsize  # of a chunk in one slot
        chunk = rng.choice(
            [1, limit - 1, limit, limit + 1, limit + PART_ELEMENTS, rng.randint(1, 2 * limit), 2 * limit]
        )
        name = rng.choice(list(OPS))
        torch.manual_seed(rng.randint(0, 2**30) + dist.get_rank())
        input_ = comm.allocate((world_size * chunk,), dtype=kind, device=CPU)
        input_.copy_(torch.randn(input_.numel()))
        expected = _expected(input_.clone(), name)  # gloo's thread lets go of a tensor only some time after the call
        output = comm.allocate((chunk,), dtype=kind, device=CPU).fill_(float("nan"))
        work = comm(output, input_, dist.group.WORLD, OPS[name], async_op=rng.random() < 0.3)
        if work is not None:
            work.wait()
        assert torch.equal(output, expected), f"seed {seed}: {chunk} x {kind}, {name}"
        in_parts += input_.nbytes > SLOT
        del input_
    handed_out = arena.stats().handed_out["reduce_scatter"]
    assert handed_out == calls, "the parts of a call share its slot"
    assert sum(comm.counters.calls["reduce_scatter"].values()) == calls, "a call is one call"
    arena.close()
    return in_parts


@pytest.mark.parametrize("slots", [1, 3])
def test_random_calls_in_parts(ranks2: Ranks, slots: int) -> None:
    seed = random.randrange(2**30)
    print("seed", seed)
    for in_parts in ranks2.run(_random_calls, seed, 80, slots):
        assert in_parts > 10


def _too_large(strict: bool) -> None:
    arena = SymmMemArena(dist.group.WORLD, [Ring("reduce_scatter", 1, SLOT)])
    comm = SymmMemReduceScatter(arena, module="m", strict=strict)
    size = dist.get_world_size() * (MAX_PARTS * SLOT // dist.get_world_size() // 4 + 1)
    try:
        text = "reduce_scatter of 'm' takes the plain path"
        expectation: Any = pytest.raises if strict else pytest.warns
        with expectation(SymmMemConfigError if strict else SymmMemFallbackWarning, match=text) as caught:
            comm.allocate((size,), dtype=torch.float32, device=CPU)
        said = str(caught.value) if strict else str(caught[0].message)
        assert f"{size * 4} bytes were asked for, {SLOT} are planned" in said
    finally:
        arena.close()


@pytest.mark.parametrize("strict", [False, True])
def test_what_takes_more_parts_is_not_planned(ranks2: Ranks, strict: bool) -> None:
    ranks2.run(_too_large, strict)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 1024])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 1000, 4099, 100_000])
def test_a_slot_for_narrow_gradients_takes_wide_ones_in_two_parts(ranks: int, chunk: int) -> None:
    """The size that the plan gives to a slot, and what passes through it, fit together for every size."""
    group: Any = SimpleNamespace(size=lambda: ranks)
    nbytes = ranks * chunk * 4
    item = Member(
        group, "reduce_scatter", "reduce_scatter", (group,), "host", (nbytes,), nbytes, "float32", torch.bfloat16
    )
    (small,) = narrowed(item).sizes
    assert ranks * chunk * 2 <= small <= ranks * chunk * 2 + ranks * 4 * PART_ELEMENTS
    part = part_elements(small, chunk, ranks, 4)
    assert part is not None
    assert part * MAX_PARTS >= chunk
    assert part % PART_ELEMENTS == 0
    assert ranks * part * 4 <= small
    assert narrowed(dataclasses.replace(item, narrow=None)).sizes == (nbytes,)


def _killed_between_parts() -> str:
    """Rank 1 fails after its first part; rank 0 waits for its second one."""
    arena = SymmMemArena(dist.group.WORLD, [Ring("reduce_scatter", 1, SLOT)], timeout_s=60)
    comm = SymmMemReduceScatter(arena, module="m", strict=True)
    chunk = 2 * SLOT // dist.get_world_size() // 4
    input_ = comm.allocate((dist.get_world_size() * chunk,), dtype=torch.float32, device=CPU).fill_(1.0)
    output = comm.allocate((chunk,), dtype=torch.float32, device=CPU)
    if dist.get_rank() == 1:
        arena.renew = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        comm(output, input_, dist.group.WORLD, dist.ReduceOp.SUM)
    except (KeyboardInterrupt, SymmMemPeerError) as error:
        assert time.monotonic() - start < 30
        again = comm.allocate((dist.get_world_size() * chunk,), dtype=torch.float32, device=CPU)
        with pytest.raises(SymmMemPeerError, match="has failed before"):  # it must not meet the peer's second part
            comm(output, again, dist.group.WORLD, dist.ReduceOp.SUM)
        return repr(error)
    finally:
        arena.abandon("test over")
    return "nothing was raised"


def test_a_rank_that_is_interrupted_between_two_parts_tells_its_peers(ranks2: Ranks) -> None:
    first, second = ranks2.run(_killed_between_parts)
    assert second == "KeyboardInterrupt()"
    assert "reduce_scatter" in first
    assert "rank 1 reported: KeyboardInterrupt()" in first


def _outstanding(first: str) -> None:
    """Two inputs at once: one in a slot, one that will pass in parts; and asynchronous calls."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    arena = SymmMemArena(dist.group.WORLD, [Ring("reduce_scatter", 2, SLOT)])
    comm = SymmMemReduceScatter(arena, module="m", strict=True)
    fitting = SLOT // world_size // 4
    for _ in range(6):
        inputs = {}
        for name, chunk in {"slot": fitting, "parts": 2 * fitting}.items():
            inputs[name] = comm.allocate((world_size * chunk,), dtype=torch.float32, device=CPU).fill_(rank + chunk)
            comm.allocate((chunk,), dtype=torch.float32, device=CPU)
        for name in (first, *(inputs.keys() - {first})):
            input_ = inputs.pop(name)
            output = torch.full((input_.numel() // world_size,), float("nan"))
            work = comm(output, input_, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)
            assert work is not None
            work.wait()
            chunk = output.numel()
            assert output.eq(world_size * chunk + sum(range(world_size))).all(), name
            del input_
    arena.close()


@pytest.mark.parametrize("first", ["slot", "parts"])
def test_inputs_may_be_outstanding_together(ranks2: Ranks, first: str) -> None:
    ranks2.run(_outstanding, first)


def _asynchronous() -> None:
    """Calls that nobody waits for, in a ring of one slot."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    arena = SymmMemArena(dist.group.WORLD, [Ring("reduce_scatter", 1, SLOT)])
    comm = SymmMemReduceScatter(arena, module="m", strict=True)
    chunk = 2 * SLOT // world_size // 4
    outputs, works = [], []
    for call in range(10):
        input_ = comm.allocate((world_size * chunk,), dtype=torch.float32, device=CPU).fill_(rank + call)
        outputs.append(comm.allocate((chunk,), dtype=torch.float32, device=CPU))
        works.append(comm(outputs[-1], input_, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True))
    for call, (output, work) in enumerate(zip(outputs, works, strict=True)):
        assert work is not None
        work.wait()
        assert output.eq(world_size * call + sum(range(world_size))).all()
    arena.close()


def test_asynchronous_calls_in_parts_share_one_slot(ranks2: Ranks) -> None:
    ranks2.run(_asynchronous)
