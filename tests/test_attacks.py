"""Regressions: programs and failures that broke an earlier version."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter, compat, set_symm_mem_for_comm
from fsdp_symm.errors import SymmMemError, SymmMemMemoryError, SymmMemPeerError, SymmMemTimeoutError
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import Ring
from tests.harness import Ranks
from tests.models import DEVICE, GATHERS, Block, Options, batch, build, grads, train_step

CPU = torch.device("cpu")


def _arena(slots: int = 2, timeout_s: float = 10) -> SymmMemArena:
    rings = [Ring("all_gather", slots, 4096), Ring("reduce_scatter", slots, 4096)]
    return SymmMemArena(dist.group.WORLD, rings, timeout_s=timeout_s)


def _gather(comm: SymmMemAllGather, value: float) -> torch.Tensor:
    rank = dist.get_rank()
    out = comm.allocate((8,), dtype=torch.float32, device=CPU)
    out[4 * rank : 4 * rank + 4] = value
    comm(out, out[4 * rank : 4 * rank + 4], dist.group.WORLD)
    return out


def _slot_taken_without_a_call() -> str:
    arena = _arena()
    comm = SymmMemAllGather(arena, module="m")
    for step in range(4):
        _gather(comm, float(step))
    if dist.get_rank() == 1:
        comm.allocate((8,), dtype=torch.float32, device=CPU)  # an exception came between allocate() and the call
    with pytest.raises(SymmMemPeerError) as caught:
        for step in range(4, 7):
            _gather(comm, float(step))
    arena.abandon("test over")
    return str(caught.value)


def test_ranks_that_are_one_slot_apart_never_read_old_data(ranks2: Ranks) -> None:
    for text in ranks2.run(_slot_taken_without_a_call):
        assert "different collectives" in text
        assert "slot 0" in text or "slot 1" in text
        assert "call 5" in text


def _long_names() -> str:
    rank, group = dist.get_rank(), dist.group.WORLD
    arena = _arena()
    reduce = SymmMemReduceScatter(arena, module="a.very.long.name." * 40)
    numel = 8 * (rank + 1)
    source = reduce.allocate((numel,), dtype=torch.float32, device=CPU).fill_(1.0)
    target = reduce.allocate((numel // 2,), dtype=torch.float32, device=CPU)
    with pytest.raises(SymmMemPeerError) as caught:
        reduce(target, source, group, dist.ReduceOp.SUM)
    arena.abandon("test over")
    return str(caught.value)


def test_long_module_names_do_not_hide_a_difference(ranks2: Ranks) -> None:
    assert any("different collectives" in text for text in ranks2.run(_long_names))


def _several_roots(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(20, False) for _ in range(4)])
        if kind == "blocks_only":
            for block in model:
                fully_shard(block)
            return model
        halves = nn.Sequential(nn.Sequential(*model[:2]), nn.Sequential(*model[2:]))
        for half in halves:
            for block in half:
                fully_shard(block)
            fully_shard(half)
        return halves

    plain, model = make(), make()
    with set_symm_mem_for_comm(model, strict=True) as handle:
        for step in range(4):
            for m in (plain, model):
                m(batch(step)).square().mean().backward()
            for a, b in zip(grads(model), grads(plain), strict=True):
                assert a is not None
                assert torch.equal(a, b)
        assert len(handle.arenas) == (4 if kind == "blocks_only" else 2)


@pytest.mark.parametrize("kind", ["blocks_only", "two_halves"])
def test_several_roots_over_one_group(ranks2: Ranks, kind: str) -> None:
    ranks2.run(_several_roots, kind)


def _shared_bytes() -> int:
    """Resident shared memory of this process (proc(5), ``RssShmem``)."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem:")]
    return int(line.split()[1]) * 1024


def _close_returns_memory() -> tuple[int, int]:
    before = _shared_bytes()
    arena = SymmMemArena(dist.group.WORLD, [Ring("all_gather", 2, 16 * 2**20)], timeout_s=20)
    during = _shared_bytes()
    arena.close()
    return during - before, _shared_bytes() - before


def test_close_returns_the_memory(ranks2: Ranks) -> None:
    for during, after in ranks2.run(_close_returns_memory):
        assert during >= 2 * 32 * 2**20, "own pages and the peer's are mapped and filled"
        assert after < 2**20


def _inference() -> bool:
    plain, model = build(Options()), build(Options())
    with set_symm_mem_for_comm(model, strict=True, slots=4) as handle, torch.inference_mode():
        waiting = [block.unshard(async_op=True) for block in list(model.blocks)[:2]]
        for item in waiting:
            item.wait()
        same = torch.equal(model(batch(0)), plain(batch(0)))
        assert handle.stats().calls["all_gather"][GATHERS] == 4
    return same


def test_asynchronous_unshard_in_inference_mode(ranks2: Ranks) -> None:
    assert ranks2.run(_inference) == [True, True]


def _other_errors() -> tuple[str, float]:
    arena = _arena(timeout_s=20)
    comm = SymmMemAllGather(arena, module="m")
    start = time.monotonic()
    if dist.get_rank() == 1:
        arena.segment.sign = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    try:
        _gather(comm, 1.0)
    except (KeyboardInterrupt, SymmMemError) as error:
        text = repr(error)
    arena.abandon("test over")
    return text, time.monotonic() - start


def test_an_interrupt_inside_a_collective_is_told_to_the_peers(ranks2: Ranks) -> None:
    (text, took_s), (other, _) = ranks2.run(_other_errors)
    assert "rank 1 reported: KeyboardInterrupt" in text
    assert took_s < 15
    assert other.startswith("KeyboardInterrupt")


def _interrupted_at(meeting: int, peer_has_read: bool) -> int:
    """Rank 0 is interrupted while it waits for its peer, at the given meeting, and tries again at once."""
    from fsdp_symm import rendezvous

    rank, store = dist.get_rank(), compat.default_store()
    real = rendezvous._Seat.collect
    count = 0

    def collect(seat: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 0 and count == meeting:
            if peer_has_read:
                store.wait(["read"])
            raise KeyboardInterrupt
        if rank == 1 and count == meeting and not peer_has_read:
            store.wait(["withdrawn"])
        found = real(seat, *arguments)
        if rank == 1 and count == meeting:
            store.set("read", "")
        return found

    rendezvous._Seat.collect = collect  # type: ignore[method-assign]
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            _arena()
        store.set("withdrawn", "")
    arena = _arena()
    rendezvous._Seat.collect = real  # type: ignore[method-assign]
    assert _gather(SymmMemAllGather(arena, module="m"), 1.0 + rank).tolist() == [1.0] * 4 + [2.0] * 4
    arena.close()
    return count


@pytest.mark.parametrize(
    ("meeting", "peer_has_read", "meetings"),
    [(1, False, (3, 2)), (1, True, (4, 3)), (2, False, (4, 3))],
    ids=["before the peer has come", "after the peer has read of a file that is gone", "while the peer waits"],
)
def test_memory_can_be_set_up_again_after_an_interrupt(
    ranks2: Ranks, meeting: int, peer_has_read: bool, meetings: tuple[int, int]
) -> None:
    assert tuple(ranks2.run(_interrupted_at, meeting, peer_has_read)) == meetings


def _restless() -> str:
    """No meeting of the ranks is the last one, as if one had begun again each time."""
    from fsdp_symm.memory import host

    meetings, host._MEETINGS = host._MEETINGS, 1  # the first only shows what all have
    try:
        with pytest.raises(SymmMemMemoryError) as caught:
            _arena()
    finally:
        host._MEETINGS = meetings
    return str(caught.value)


def test_ranks_that_keep_starting_over_are_told_so(ranks2: Ranks) -> None:
    for text in ranks2.run(_restless):
        assert "the ranks of group [0, 1] keep starting over" in text
        assert "found: 1 meetings, in each of which a rank had begun again" in text
        assert "expected: every rank to stay until all have mapped the others' memory" in text
        assert "fix: look for what interrupts those ranks" in text


def _interrupted_while_writing(write: int, seen: bool) -> tuple[list[str], int]:
    """A signal arrives right behind rank 0's words to rank 1, before or after that has seen them; it tries again."""
    from fsdp_symm import rendezvous

    store, errors = compat.default_store(), []
    write_, collect, count = rendezvous._Seat._write, rendezvous._Seat.collect, 0

    def signalled(seat: Any, *arguments: Any) -> None:
        nonlocal count
        count += 1
        write_(seat, *arguments)
        if count == write:
            if seen:
                store.wait(["seen"])
            raise KeyboardInterrupt

    def watched(seat: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == write and not seen:
            store.wait(["left"])
        answer = collect(seat, *arguments)
        if count == write and seen:
            store.set("seen", "")
            store.wait(["left"])
        return answer

    if dist.get_rank() == 0:
        rendezvous._Seat._write = signalled  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            _arena()
        rendezvous._Seat._write = write_  # type: ignore[method-assign]
        store.set("left", "")
    else:
        rendezvous._Seat.collect = watched  # type: ignore[method-assign]
    for _ in range(3):
        try:
            _arena(timeout_s=3.0).close()
        except SymmMemTimeoutError as error:
            errors.append(str(error))
    rendezvous._Seat.collect = collect  # type: ignore[method-assign]
    return errors, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("write", [1, 2])
def test_a_signal_while_a_rank_takes_its_place_loses_no_count(ranks2: Ranks, write: int) -> None:
    first, before, after = (ranks2.run(_interrupted_while_writing, write, False) for _ in range(3))
    assert [errors for errors, _ in first + before + after] == [[]] * 6
    left = f"{before}, then {after}"  # the first in a process opens what stays open
    assert all(now <= then for (_, now), (_, then) in zip(after, before, strict=True)), left


def test_a_signal_behind_the_last_word_costs_one_attempt(ranks2: Ranks) -> None:
    """Rank 1 has what it waited for, and no word can tell it in time that rank 0 has not: both say so, and go on."""
    (waiting, *more), (closing, *others) = (errors for errors, _ in ranks2.run(_interrupted_while_writing, 2, True))
    assert (more, others) == ([], [])
    assert "mapping the ranks' segments: ranks [1] of group [0, 1] did not arrive within 3 s" in waiting
    assert "ranks [0] have not called close()" in closing


def _gave_up() -> tuple[str, float]:
    """Rank 0 gives up right after rank 1 has seen that it came."""
    from fsdp_symm import rendezvous

    rank, store, real = dist.get_rank(), compat.default_store(), rendezvous._Seat.collect

    def collect(seat: Any, *arguments: Any) -> Any:
        store.wait(["seen"])
        raise KeyboardInterrupt

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, keys: list[str], *arguments: Any) -> None:
            store.wait(keys, *arguments)
            store.set("seen", "")
            store.wait(["gone"])

    start = time.monotonic()
    try:
        if rank == 0:
            rendezvous._Seat.collect = collect  # type: ignore[method-assign]
            _arena(timeout_s=2)
        rendezvous._Seat.collect = lambda seat, _, deadline: real(seat, Watched(), deadline)  # type: ignore
        _arena(timeout_s=2)
    except (KeyboardInterrupt, SymmMemError) as error:
        return str(error), time.monotonic() - start
    finally:
        rendezvous._Seat.collect = real  # type: ignore[method-assign]
        if rank == 0:
            store.set("gone", "")
    return "nothing was raised", 0.0


def test_a_rank_that_gave_up_is_named_with_its_reason_in_time(ranks2: Ranks) -> None:
    _, (text, took_s) = ranks2.run(_gave_up)
    assert "ranks [0] of group [0, 1] did not arrive within 2 s" in text
    assert "found: ranks [1]; rank 0 gave up (KeyboardInterrupt)" in text
    assert took_s < 20


def _handles_without_close() -> int:
    before = len(os.listdir("/proc/self/fd"))
    for step in range(4):
        model = build(Options())
        handle = set_symm_mem_for_comm(model)
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), step, Options())
        del model, handle
        gc.collect()
    return max(len(os.listdir("/proc/self/fd")) - before, 0)  # others may have been closed meanwhile


def test_handles_that_nobody_closes_leave_no_descriptor(ranks2: Ranks) -> None:
    assert ranks2.run(_handles_without_close) == [0, 0]


def _interrupted_reservation() -> int:
    before = len(os.listdir("/proc/self/fd"))
    real = os.posix_fallocate

    def signalled(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    os.posix_fallocate = signalled
    try:
        with pytest.raises(KeyboardInterrupt):
            _arena()
    finally:
        os.posix_fallocate = real
    return max(len(os.listdir("/proc/self/fd")) - before, 0)  # others may have been closed meanwhile


def test_an_interrupt_while_pages_are_reserved_leaves_nothing(ranks2: Ranks) -> None:
    assert ranks2.run(_interrupted_reservation) == [0, 0]


def _interrupted_installation() -> str:
    """Rank 1 is interrupted when half of its model has been switched; rank 0 has switched all of its own."""
    from fsdp_symm import compat_unshard

    plain, model = build(Options()), build(Options())
    real, count = compat_unshard.install, 0

    def install(*arguments: Any) -> None:
        nonlocal count
        count += 1
        real(*arguments)
        if count == 2:
            raise KeyboardInterrupt

    if dist.get_rank() == 1:
        compat_unshard.install = install  # type: ignore[assignment]
    try:
        handle = set_symm_mem_for_comm(model, strict=True, timeout_s=60)
        model(batch(0))
        text = "nothing was raised"
    except KeyboardInterrupt as error:
        text = repr(error)
    except SymmMemPeerError as error:
        text = str(error)
        handle.abandon("a peer failed")
    finally:
        compat_unshard.install = real
    dist.barrier()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    losses = [train_step(m, o, 0, Options()) for m, o in zip((plain, model), optimizers, strict=True)]
    with set_symm_mem_for_comm(model, strict=True) as again:
        losses += [train_step(m, o, 1, Options()) for m, o in zip((plain, model), optimizers, strict=True)]
        assert set(again.stats().calls["all_gather"]) == {GATHERS}
    assert losses[0::2] == losses[1::2]
    return text


def test_an_interrupt_while_comms_are_put_in_takes_all_of_them_out(ranks2: Ranks) -> None:
    first, second = ranks2.run(_interrupted_installation)
    assert second == "KeyboardInterrupt()"
    assert "rank 1 reported: the switch failed: KeyboardInterrupt()" in first


def _interrupted_agreement() -> bool:
    """Two roots over one group compare two plans; rank 0 is interrupted meanwhile, and calls the switch again."""
    from fsdp_symm import rendezvous

    model = nn.ModuleList([build(Options()), build(Options())])
    if dist.get_rank() == 0:
        real = rendezvous._Seat.collect
        rendezvous._Seat.collect = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            set_symm_mem_for_comm(model, strict=True, timeout_s=20)
        rendezvous._Seat.collect = real  # type: ignore[method-assign]
    for _ in range(2):
        with set_symm_mem_for_comm(model, strict=True, timeout_s=20) as handle:
            assert len(handle.arenas) == 2
    return True


def test_a_switch_over_two_roots_is_met_again_after_an_interrupt(ranks2: Ranks) -> None:
    assert ranks2.run(_interrupted_agreement) == [True, True]


def _interrupted_between_arenas() -> tuple[str, int, bool]:
    """Two roots, so two arenas; rank 1 is interrupted at the second one."""
    model = nn.ModuleList([build(Options()), build(Options())])
    before = len(os.listdir("/proc/self/fd"))
    from fsdp_symm import allocation

    real, count = allocation.SymmMemArena, 0

    def make(*arguments: Any, **named: Any) -> SymmMemArena:
        nonlocal count
        count += 1
        if count == 2 and dist.get_rank() == 1:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    allocation.SymmMemArena = make  # type: ignore[assignment,misc]
    try:
        set_symm_mem_for_comm(model, strict=True, timeout_s=3)
        text = "nothing was raised"
    except (KeyboardInterrupt, SymmMemError) as error:
        text = repr(error)
    finally:
        allocation.SymmMemArena = real  # type: ignore[misc]
    opened = max(len(os.listdir("/proc/self/fd")) - before, 0)  # others may have been closed meanwhile
    with set_symm_mem_for_comm(model, strict=True) as handle:
        return text, opened, handle.enabled


def test_an_interrupt_between_two_arenas_leaves_nothing(ranks2: Ranks) -> None:
    (first, *rest), (second, *others) = ranks2.run(_interrupted_between_arenas)
    assert second == "KeyboardInterrupt()"
    assert "ranks [1] of group [0, 1] did not arrive within 3 s" in first
    assert rest == others == [0, True]


def _reversed_prefetch(depth: int) -> dict[str, int]:
    def make() -> Any:
        model = build(Options(blocks=6))
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth][::-1])
            block.set_modules_to_backward_prefetch(blocks[max(i - depth, 0) : i])
        return model

    plain, model = make(), make()
    with set_symm_mem_for_comm(model, strict=True, all_gather="staged") as handle:
        for step in range(3):
            losses = [train_step(m, torch.optim.SGD(m.parameters(), 0.1), step, Options()) for m in (plain, model)]
            assert losses[0] == losses[1]
        return dict(handle.arenas[0].stats().slots)


@pytest.mark.parametrize(("depth", "slots"), [(2, 4), (3, 5)])
def test_prefetch_lists_out_of_execution_order(ranks2: Ranks, depth: int, slots: int) -> None:
    found = ranks2.run(_reversed_prefetch, depth)[0]["all_gather"]
    assert found == slots, "the plan replays the lists"


def _resharded_while_pending() -> None:
    plain, model = build(Options(blocks=3)), build(Options(blocks=3))
    with set_symm_mem_for_comm(model, strict=True, slots=5):
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
        for step in range(4):
            losses = []
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                waiting = [m.blocks[i].unshard(async_op=True) for i in (0, 2)]
                m.blocks[0].reshard()  # before anybody waited: FSDP2 keeps the pending unshard
                if step % 2:
                    waiting[0].wait()
                    m.blocks[0].reshard()
                losses.append(train_step(m, optimizer, step, Options()))
                optimizer.zero_grad()
            assert losses[0] == losses[1], f"step {step}"


def test_resharding_while_an_unshard_is_pending(ranks2: Ranks) -> None:
    ranks2.run(_resharded_while_pending)


def _out_of_memory() -> None:
    from fsdp_symm import compat_unshard

    model = build(Options(blocks=2))
    set_symm_mem_for_comm(model, strict=True, timeout_s=60)
    if dist.get_rank() == 1:
        full = compat_unshard.allocate_outputs

        def fail(*arguments: Any) -> Any:
            raise MemoryError("no room for a layer")

        compat_unshard.allocate_outputs = fail
        try:
            model(batch(0))
        finally:
            compat_unshard.allocate_outputs = full
    model(batch(0))


def test_a_rank_without_memory_for_a_layer_is_quoted_by_its_peers(ranks2: Ranks) -> None:
    first, second = ranks2.failures(_out_of_memory)
    assert second.kind == "MemoryError"
    assert first.kind == "SymmMemPeerError"
    assert "rank 1 reported: MemoryError('no room for a layer')" in first.text


def _cast_after_the_first_forward(dtype: torch.dtype) -> None:
    model = build(Options())
    set_symm_mem_for_comm(model)
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
    model.to(dtype)
    model(batch(0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_cast_after_the_first_forward_are_refused(ranks2: Ranks, dtype: torch.dtype) -> None:
    """FSDP2 makes its unsharded tensors once: writing shards of another type there would be out of bounds or noise."""
    for failure in ranks2.failures(_cast_after_the_first_forward, dtype):
        assert failure.kind == "SymmMemConfigError"
        assert "its parameters changed after they were first unsharded" in failure.text
        assert str(dtype) in failure.text


def _types_that_differ() -> None:
    model = build(Options())
    set_symm_mem_for_comm(model, timeout_s=20)
    model.to(torch.float16 if dist.get_rank() else torch.bfloat16)
    model(batch(0).to(next(model.parameters()).dtype))


def test_types_that_differ_between_ranks_are_quoted(ranks2: Ranks) -> None:
    texts = [failure.text for failure in ranks2.failures(_types_that_differ)]
    assert any("of shards bfloat16" in text and "of shards float16" in text for text in texts), texts


def _many_pending() -> None:
    model = build(Options(blocks=6))
    with set_symm_mem_for_comm(model, strict=True):
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
        dist.barrier()
        if dist.get_rank() == 1:
            threading.Event().wait(0.5)
        for handle in [block.unshard(async_op=True) for block in model.blocks]:
            handle.wait()
        model(batch(1))


def test_any_number_of_unshards_may_be_pending_however_slow_a_peer_is(ranks2: Ranks) -> None:
    ranks2.run(_many_pending)


class MyAllGather(compat.AllGather):
    """Counts its calls, and gathers as FSDP2 does."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        MyAllGather.calls += 1
        return compat.plain_comm("all_gather")(output_tensor, input_tensor, group, async_op)


def _comm_set_later(strict: bool) -> Any:
    plain, model = build(Options()), build(Options())
    handle = set_symm_mem_for_comm(model, strict=strict)
    for block in model.blocks:
        block.set_custom_all_gather(MyAllGather())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        losses = [train_step(m, torch.optim.SGD(m.parameters(), 0.1), 0, Options()) for m in (plain, model)]
    handle.close()
    assert losses[0] == losses[1]
    return MyAllGather.calls, [str(w.message) for w in seen if w.category is SymmMemFallbackWarning]


def test_an_all_gather_set_after_the_switch_is_obeyed_and_reported(ranks2: Ranks) -> None:
    calls, texts = ranks2.run(_comm_set_later, False)[0]
    assert calls == 6, "three blocks, forward and backward"
    assert len(texts) == 3
    assert "found: an all-gather comm was set after the switch" in texts[0]
    for failure in ranks2.failures(_comm_set_later, True):
        assert "an all-gather comm was set after the switch" in failure.text


def _unfrozen(strict: bool) -> Any:
    model = build(Options())
    model.blocks[1].requires_grad_(False)
    handle = set_symm_mem_for_comm(model, strict=strict, min_bytes=0)
    model.blocks[1].requires_grad_(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
    calls = handle.stats().calls["reduce_scatter"]
    handle.close()
    return calls, [w.category for w in seen if w.category is SymmMemFallbackWarning]


def test_a_module_unfrozen_later_is_served_and_counted(ranks2: Ranks) -> None:
    calls, warned = ranks2.run(_unfrozen, True)[0]
    assert calls == {"host": 4} if DEVICE == "cpu" else {"nccl": 4}
    assert not warned


def _peer_closed() -> str:
    model = build(Options())
    handle = set_symm_mem_for_comm(model, timeout_s=60)
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
    dist.barrier()
    if dist.get_rank() == 1:
        for arena in handle.arenas:
            arena.segment._own.closed.publish(1)
        return ""
    start = time.monotonic()
    with pytest.raises(SymmMemPeerError) as caught:
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), 1, Options())
    assert time.monotonic() - start < 40, "not the 60 seconds of the timeout"
    handle.abandon("test over")
    return str(caught.value)


def test_a_rank_that_closed_alone_is_named_at_once(ranks2: Ranks) -> None:
    assert "ranks [1] of group [0, 1] have closed their symmetric memory" in ranks2.run(_peer_closed)[0]


def _rank_order() -> bool:
    """Values whose sum depends on the order: the result must be the rank-order sum in every bit."""
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    arena = SymmMemArena(group, [Ring("reduce_scatter", 2, 1 << 16)], timeout_s=20)
    reduce = SymmMemReduceScatter(arena, module="m")
    inputs = [
        torch.randn(world_size * 500, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(world_size)
    ]
    source = reduce.allocate((world_size * 500,), dtype=torch.float32, device=CPU).copy_(inputs[rank])
    target = reduce.allocate((500,), dtype=torch.float32, device=CPU)
    reduce(target, source, group, dist.ReduceOp.SUM)
    chunks = [x[rank * 500 : rank * 500 + 500] for x in inputs]
    in_order, own_first = chunks[0].clone(), chunks[rank].clone()
    for r in range(1, world_size):
        in_order += chunks[r]
    for r in range(world_size):
        if r != rank:
            own_first += chunks[r]
    arena.close()
    assert rank < 2 or not torch.equal(in_order, own_first), "the data must tell the orders apart"
    return torch.equal(target, in_order)


def test_sums_run_in_rank_order(ranks4: Ranks) -> None:
    assert ranks4.run(_rank_order) == [True] * 4


def _closes_while_looked_at() -> None:
    """Rank 1 delivers and closes between two looks of rank 0: it has done its part."""
    arena, rank, store = _arena(), dist.get_rank(), compat.default_store()
    segment: Any = arena.segment
    comm = SymmMemAllGather(arena, module="m")
    out = comm.allocate((8,), dtype=torch.float32, device=CPU)
    own = torch.full((4,), float(rank))
    if rank == 1:
        store.wait(["looked"])
        comm(out, own, dist.group.WORLD)
        closing = threading.Thread(target=arena.close)
        closing.start()
        while not segment._own.closed.reached(1):
            closing.join(0.01)
        store.set("closed", "1")
        closing.join()
        return
    look = segment._late

    def slow_look(*waiting: Any) -> list[int]:
        late = look(*waiting)
        store.set("looked", "1")
        store.wait(["closed"])
        return late

    segment._late = slow_look
    comm(out, own, dist.group.WORLD)
    assert out.tolist() == [0.0] * 4 + [1.0] * 4
    arena.close()


def test_a_peer_that_delivers_and_closes_at_once_is_no_failure(ranks2: Ranks) -> None:
    ranks2.run(_closes_while_looked_at)


def _separate_input() -> list[float]:
    arena, rank = _arena(), dist.get_rank()
    comm = SymmMemAllGather(arena, module="m")
    out = comm.allocate((8,), dtype=torch.float32, device=CPU).fill_(float("nan"))
    comm(out, torch.full((4,), float(rank)), dist.group.WORLD)
    result = out.tolist()
    arena.close()
    return result


def test_an_input_that_is_no_view_of_the_output(ranks2: Ranks) -> None:
    assert ranks2.run(_separate_input) == [[0.0] * 4 + [1.0] * 4] * 2


def _closed_handle() -> str:
    handle = set_symm_mem_for_comm(build(Options()))
    handle.close()
    with pytest.raises(SymmMemError) as caught, handle:
        pass
    return str(caught.value)


def test_a_closed_handle_cannot_be_entered(ranks2: Ranks) -> None:
    assert "found a closed handle" in ranks2.run(_closed_handle)[0]


def _fork() -> bool:
    model = build(Options())
    handle = set_symm_mem_for_comm(model, timeout_s=20)
    child = os.fork()
    if child == 0:
        handle.abandon("the child is done")
        os._exit(0)
    os.waitpid(child, 0)
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
    handle.close()
    return True


def test_a_forked_child_does_not_speak_for_its_parent(ranks2: Ranks) -> None:
    assert ranks2.run(_fork) == [True, True]
