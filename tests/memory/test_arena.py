"""Arenas by themselves: slots in call order, liveness that sees views, write-after-read, asynchronous work."""

from __future__ import annotations

import gc
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter
from fsdp_symm.errors import SlotShortageError, SymmMemConfigError, SymmMemError, SymmMemPeerError, SymmMemTimeoutError
from fsdp_symm.plan import Ring
from tests.harness import Ranks
from tests.models import poison

CPU = torch.device("cpu")
SLOT = 4096


def _arena(slots: int = 2, timeout_s: float = 20) -> SymmMemArena:
    rings = [Ring("all_gather", slots, SLOT), Ring("reduce_scatter", slots, SLOT)]
    return SymmMemArena(dist.group.WORLD, rings, timeout_s=timeout_s)


def _gather(arena: SymmMemArena, comm: SymmMemAllGather, value: float, numel: int = 64) -> torch.Tensor:
    rank = dist.get_rank()
    out = comm.allocate((dist.get_world_size() * numel,), dtype=torch.float32, device=CPU)
    out.narrow(0, rank * numel, numel).fill_(value + rank)
    comm(out, out.narrow(0, rank * numel, numel), dist.group.WORLD)
    return out


def _slots_in_call_order() -> list[int]:
    arena = _arena(slots=3)
    offsets = []
    for _ in range(7):
        tensor = arena.acquire("all_gather", 100, owner="m")
        lease = arena.lease_of(tensor)
        assert lease is not None
        offsets.append(lease.offset // SLOT)
        del tensor
    stats = arena.stats()
    assert stats.handed_out == {"all_gather": 7, "reduce_scatter": 0}
    assert stats.in_use == {"all_gather": 0, "reduce_scatter": 0}
    assert stats.slots == {"all_gather": 3, "reduce_scatter": 3}
    assert stats.nbytes == arena.nbytes > 6 * SLOT
    arena.close()
    return offsets


def test_slots_are_handed_out_in_call_order(ranks2: Ranks) -> None:
    assert ranks2.run(_slots_in_call_order) == [[0, 1, 2, 0, 1, 2, 0]] * 2


def _a_tensor_that_could_not_be_made() -> list[float]:
    """Rank 0 fails between a slot and its tensor, and tries again at once."""
    arena = _arena()
    comm, real = SymmMemAllGather(arena), arena.segment.lease

    def fails(*_: Any) -> Any:
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        arena.segment.lease = fails  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            arena.acquire("all_gather", 64, owner="m")
        arena.segment.lease = real  # type: ignore[method-assign]
    found = [_gather(arena, comm, 10.0 * step).sum().item() for step in range(3)]
    arena.close()
    return found


def test_a_tensor_that_could_not_be_made_does_not_move_the_ring_on(ranks2: Ranks) -> None:
    assert ranks2.run(_a_tensor_that_could_not_be_made) == [[64.0 * (20 * step + 1) for step in range(3)]] * 2


def _shortage(holder: str) -> str:
    """What may keep a slot: the tensor, a view of it, its storage; a dead cycle may not."""
    arena = _arena(slots=1)
    tensor = arena.acquire("all_gather", 64, owner="first")
    held: Any = {
        "tensor": lambda t: t,
        "view": lambda t: t[8:16].view(torch.float32),
        "storage": torch.Tensor.untyped_storage,
        "detached": torch.Tensor.detach,
        "cycle": lambda t: None,
    }[holder](tensor)
    if holder == "cycle":
        cycle: list[Any] = [tensor]
        cycle.append(cycle)
        gc.disable()
        del cycle
    del tensor
    try:
        arena.acquire("all_gather", 64, owner="second")
    except SlotShortageError as error:
        return str(error)
    finally:
        gc.enable()
        arena.abandon("test over")
        del held
    return ""


@pytest.mark.parametrize("holder", ["tensor", "view", "storage", "detached"])
def test_a_slot_in_use_is_never_handed_out(ranks2: Ranks, holder: str) -> None:
    for text in ranks2.run(_shortage, holder):
        assert "all_gather of 'second': the ring of 1 slots (ranks [0, 1]) is too short" in text
        assert "slot 0: 'first' (call 0)" in text
        assert "at least 2 slots of 4096 bytes" in text


def test_garbage_does_not_count_as_use(ranks2: Ranks) -> None:
    assert ranks2.run(_shortage, "cycle") == ["", ""]


def _shortage_on_one_rank() -> str:
    arena = _arena(slots=1, timeout_s=20)
    comm = SymmMemAllGather(arena, module="m")
    out = _gather(arena, comm, 1.0)
    if dist.get_rank() == 0:
        del out
    with pytest.raises((SlotShortageError, SymmMemPeerError)) as caught:
        _gather(arena, comm, 2.0)
    with pytest.raises(SymmMemPeerError, match=r"failed before|rank \d reported"):
        _gather(arena, comm, 3.0)  # and it stays failed
    arena.abandon("test over")
    return str(caught.value)


def test_a_shortage_on_one_rank_is_the_same_error_on_all(ranks2: Ranks) -> None:
    for text in ranks2.run(_shortage_on_one_rank):
        assert "all_gather of 'm': the ring of 1 slots (ranks [0, 1]) is too short" in text


def _write_after_read(seed: int, steps: int) -> int:
    """Tiny gathers without any barrier while ranks run at random speeds: a slot overwritten early shows."""
    arena = _arena(slots=2)
    poison((arena,))
    gather, reduce = SymmMemAllGather(arena, module="g"), SymmMemReduceScatter(arena, module="r")
    shared, own = random.Random(seed), random.Random(seed * 31 + dist.get_rank())
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        numel = shared.randint(1, SLOT // 4 // world_size)
        if shared.random() < 0.5:
            out = _gather(arena, gather, float(step), numel)
            for peer in range(world_size):
                assert torch.equal(out[peer * numel : (peer + 1) * numel], torch.full((numel,), float(step + peer)))
        else:
            source = reduce.allocate((world_size * numel,), dtype=torch.float32, device=CPU)
            target = reduce.allocate((numel,), dtype=torch.float32, device=CPU)
            target.fill_(float("nan"))
            source.copy_(torch.arange(world_size * numel, dtype=torch.float32)).mul_(rank + 1).add_(step)
            reduce(target, source, dist.group.WORLD, dist.ReduceOp.SUM)
            index = torch.arange(rank * numel, (rank + 1) * numel, dtype=torch.float32)
            scale = world_size * (world_size + 1) // 2
            assert torch.equal(target, index * scale + step * world_size)
        for _ in range(own.randint(0, 2000)):  # this rank's own pace
            pass
    arena.close()
    return steps


@pytest.mark.parametrize("seed", [1, 2])
def test_slots_are_not_overwritten_before_peers_have_read_them(ranks2: Ranks, seed: int) -> None:
    print(f"seed {seed}")
    assert ranks2.run(_write_after_read, seed, 1500) == [1500, 1500]


def test_write_after_read_on_four_ranks(ranks4: Ranks) -> None:
    assert ranks4.run(_write_after_read, 3, 300) == [300] * 4


def _async() -> None:
    arena = _arena(slots=4)
    comm, rank = SymmMemAllGather(arena, module="m"), dist.get_rank()
    works, outs = [], []
    for call in range(3):
        out = comm.allocate((128,), dtype=torch.float32, device=CPU)
        out.fill_(float("nan"))
        out.narrow(0, rank * 64, 64).fill_(10 * call + rank)
        works.append(comm(out, out.narrow(0, rank * 64, 64), dist.group.WORLD, async_op=True))
        outs.append(out)
    last = _gather(arena, comm, 100.0)  # synchronous, behind three queued ones
    assert all(isinstance(work, dist.Work) for work in works)
    assert all(work.wait() for work in works)
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    works[0].get_future().wait()
    for call, out in enumerate(outs):
        assert out.tolist() == [10.0 * call] * 64 + [10.0 * call + 1] * 64
    assert last[0] == 100.0
    del outs, out, last
    for _ in range(8):  # the work objects live on, their slots do not
        _gather(arena, comm, 1.0)
    arena.close()


def test_asynchronous_calls_keep_their_order(ranks2: Ranks) -> None:
    ranks2.run(_async)


def _async_failure() -> str:
    arena = _arena(slots=2, timeout_s=2)
    comm, rank = SymmMemAllGather(arena, module="m"), dist.get_rank()
    if rank == 1:
        dist.barrier()
        arena.abandon("test over")
        return ""
    out = comm.allocate((128,), dtype=torch.float32, device=CPU)
    work = comm(out, out.narrow(0, 0, 64), dist.group.WORLD, async_op=True)
    with pytest.raises(SymmMemTimeoutError, match=r"not done after 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    assert not work.is_completed()
    with pytest.raises(SymmMemTimeoutError) as caught:
        work.wait()
    assert isinstance(work.exception(), SymmMemTimeoutError)
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="have not published"):
        work.get_future().wait()
    dist.barrier()
    arena.abandon("test over")
    return str(caught.value)


def test_an_asynchronous_failure_comes_out_of_wait(ranks2: Ranks) -> None:
    text = ranks2.run(_async_failure)[0]
    assert "all_gather of 'm', 512 bytes float32, epoch 1: ranks [1]" in text


def _bad_arena(kind: str) -> str:
    rings = [Ring("all_gather", 1, SLOT)]
    with pytest.raises(SymmMemError) as caught:
        if kind == "backend":
            SymmMemArena(dist.group.WORLD, rings, backend="ucx")
        elif kind == "rings":
            SymmMemArena(dist.group.WORLD, rings * 2)
        else:
            arena = SymmMemArena(dist.group.WORLD, rings)
            if kind == "closed":
                arena.close()
            arena.acquire("reduce_scatter" if kind == "role" else "all_gather", SLOT + (kind == "size"), owner="m")
    assert isinstance(caught.value, SymmMemConfigError) == (kind in ("backend", "rings"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("backend", "unknown backend\n  found: 'ucx'\n  expected: ['cuda', 'host', 'nccl']"),
        ("rings", "the rings do not make an arena"),
        ("role", "reduce_scatter buffer of 'm': the arena has no reduce_scatter ring"),
        ("size", "all_gather buffer of 'm': 4097 bytes were asked for, 4096 are planned"),
        ("closed", "all_gather buffer of 'm': the arena is closed"),
    ],
)
def test_bad_arenas(ranks2: Ranks, kind: str, text: str) -> None:
    for answer in ranks2.run(_bad_arena, kind):
        assert text in answer


def _epochs_wrap() -> None:
    arena = _arena(slots=2)
    comm = SymmMemAllGather(arena, module="m")
    arena._epochs["all_gather"] = 2**32 - 3
    for word in ("ready", "done"):
        arena.segment.publish(word, "all_gather", 2**32 - 3)
    dist.barrier()
    for step in range(8):
        assert _gather(arena, comm, float(step))[64] == step + 1
    arena.close()


def test_epochs_survive_the_wrap_of_their_words(ranks2: Ranks) -> None:
    ranks2.run(_epochs_wrap)


def _who_is_behind() -> list[list[int]]:
    arena = SymmMemArena(dist.group.WORLD, [Ring("unshard", 1, 4096)])
    segment: Any = arena.segment
    rank, answers = dist.get_rank(), []
    for epoch in (1, 2**32 + 2):  # counters wrap
        if rank == 0:
            segment.note("unshard", epoch)
        dist.barrier()
        answers.append(segment.behind("unshard", epoch))
        dist.barrier()
        segment.note("unshard", epoch)
        dist.barrier()
        answers.append(segment.behind("unshard", epoch))
        dist.barrier()
    arena.close()
    return answers


def test_ranks_that_have_not_issued_a_call_are_known(ranks2: Ranks) -> None:
    assert ranks2.run(_who_is_behind) == [[[1], [], [1], []]] * 2
