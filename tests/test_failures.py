"""Ranks that die, hang, differ or fail: all others get an error that names them, in time, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from fsdp_symm import SymmMemAllGather, SymmMemArena, SymmMemReduceScatter, compat, set_symm_mem_for_comm
from fsdp_symm.errors import SymmMemError
from fsdp_symm.memory.shared_file import SHM_DIR_VARIABLE
from fsdp_symm.plan import Ring
from tests.harness import Failure, Ranks, fresh_ranks
from tests.models import Options, batch, build, train_step

CPU = torch.device("cpu")
SHM = Path("/dev/shm")


def _shm() -> set[str]:
    return {p.name for p in SHM.iterdir()}


# --- ranks that die or stop --------------------------------------------------------------------------------


def _die_in_backward(victim: int, how: str) -> None:
    model = build(Options(blocks=4))
    handle = set_symm_mem_for_comm(model, timeout_s=60 if how == "kill" else 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_step(model, optimizer, 0, Options())
    if dist.get_rank() == victim:
        if how == "kill":
            model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        else:
            model.blocks[1].register_full_backward_hook(lambda *_: compat.default_store().wait(["named"]))
    loss = model(batch(1)).square().mean()
    start = time.monotonic()
    try:
        loss.backward()
    finally:
        took_s = time.monotonic() - start
        for arena in handle.arenas:
            arena.abandon("test over")
        if how == "hang" and dist.get_rank() != victim:
            compat.default_store().set("named", "")
        assert took_s < 30, "a dead rank is not waited for"


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (4, 2)])
def test_a_killed_rank_is_named_by_all_others(world_size: int, victim: int) -> None:
    before = _shm()
    with fresh_ranks(world_size) as ranks:
        answers = ranks.results(_die_in_backward, victim, "kill", timeout_s=60)
    assert answers[victim] is None
    for rank, answer in enumerate(answers):
        if rank != victim:
            assert isinstance(answer, Failure), answer
            assert answer.kind == "SymmMemPeerError"
            assert f"ranks [{victim}] of group {list(range(world_size))} are gone" in answer.text
            assert "of 'blocks." in answer.text or "of '<root>'" in answer.text
            assert "epoch" in answer.text
    assert _shm() <= before


def test_a_stuck_rank_is_named_after_the_timeout() -> None:
    with fresh_ranks(2) as ranks:
        answers = ranks.results(_die_in_backward, 1, "hang", timeout_s=60)
    assert answers[0].kind == "SymmMemTimeoutError"
    assert "epoch" in answers[0].text
    assert "ranks [1] of group [0, 1] have not published their data" in answers[0].text
    assert "no signal within 3 s" in answers[0].text
    # the rank that comes back later hears what happened instead of waiting in turn
    assert answers[1].kind == "SymmMemPeerError"
    assert "rank 0 reported" in answers[1].text


def _raise_in_forward() -> None:
    model = build(Options())
    with set_symm_mem_for_comm(model, timeout_s=60):
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
        if dist.get_rank() == 1:
            raise KeyError("a user's own bug")
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), 1, Options())


def test_a_rank_that_raises_inside_the_handle_tells_the_others(ranks2: Ranks) -> None:
    start = time.monotonic()
    first, second = ranks2.failures(_raise_in_forward)
    assert time.monotonic() - start < 40, "not the 60 seconds of the timeout"
    assert second.kind == "KeyError"
    assert first.kind == "SymmMemPeerError"
    assert 'rank 1 reported: KeyError: "a user\'s own bug"' in first.text


def _stay() -> None:
    model = build(Options(blocks=2))
    set_symm_mem_for_comm(model)
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_stays_in_shared_memory_after_kill_9_of_all_ranks() -> None:
    before = _shm()
    with fresh_ranks(2) as ranks:
        assert ranks.results(_stay) == [None, None]
    assert _shm() <= before


def _only_rank_0_calls() -> None:
    model = build(Options())
    if dist.get_rank() == 0:
        set_symm_mem_for_comm(model, timeout_s=1.5)


def test_a_rank_that_does_not_call_the_switch_is_named(ranks2: Ranks) -> None:
    first, second = ranks2.results(_only_rank_0_calls)
    assert second is None
    assert first.kind == "SymmMemTimeoutError"
    assert "comparing the communication plan: ranks [1] of group [0, 1] did not arrive within 1.5 s" in first.text
    assert "found: ranks [0]" in first.text


def _close_alone() -> None:
    arena = SymmMemArena(dist.group.WORLD, [Ring("all_gather", 1, 4096)])
    arena.segment.timeout_s = 1.0  # only now: the ranks may meet late
    if dist.get_rank() == 0:
        arena.close()
    dist.barrier()


def test_close_on_one_rank_only_is_named(ranks2: Ranks) -> None:
    failure = ranks2.results(_close_alone)[0]
    assert failure.kind == "SymmMemTimeoutError"
    assert "ranks [1] have not called close()" in failure.text


# --- ranks that differ -------------------------------------------------------------------------------------


class MyAllGather(DefaultAllGather):
    """A comm that one rank alone has set."""


def _differing_plan(kind: str) -> None:
    mine = dist.get_rank() == 1
    arguments: dict[str, Any] = {}
    options = Options()
    if kind == "dtype" and mine:
        options = Options(param_dtype="bfloat16")
    elif kind == "frozen" and mine:
        options = Options(frozen=True)
    elif kind == "min_bytes":
        arguments["min_bytes"] = 100 if mine else 0
    elif kind == "strict":
        arguments["strict"] = mine
    elif kind == "nothing_left":
        arguments["min_bytes"] = 10**9 if mine else 0
    elif kind == "custom_comm" and mine:
        model = build(options)
        model.blocks[1].set_custom_all_gather(MyAllGather())
    elif kind == "callable":
        arguments["modules"] = (lambda n, m: n != "blocks.2") if mine else (lambda n, m: True)
    if kind != "custom_comm" or not mine:
        model = build(options)
    before = [g._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm for g in model.blocks]
    try:
        set_symm_mem_for_comm(model, timeout_s=20, **arguments)
    finally:
        after = [g._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm for g in model.blocks]
        assert all(a is b for a, b in zip(before, after, strict=True)), "nothing may change"


@pytest.mark.parametrize(
    ("kind", "first_difference"),
    [
        ("dtype", "bytes float32'; rank 1: 'unshard <root>"),
        ("frozen", "'reduce_scatter"),
        ("min_bytes", "min_bytes=0"),
        ("callable", "blocks.2"),
        ("strict", "strict=False"),
        ("nothing_left", "min_bytes=1000000000"),
        ("custom_comm", "unshard blocks.1"),
    ],
)
def test_a_differing_plan_fails_at_the_switch_with_the_first_difference(
    ranks2: Ranks, kind: str, first_difference: str
) -> None:
    for failure in ranks2.failures(_differing_plan, kind):
        assert failure.kind == "PlanMismatchError"
        assert "the ranks of group [0, 1] planned different communication" in failure.text
        assert first_difference in failure.text
        assert "rank 1: '" in failure.text


def _differing_calls(what: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    rings = [Ring("all_gather", 2, 4096), Ring("reduce_scatter", 2, 4096)]
    arena = SymmMemArena(group, rings, timeout_s=10)
    try:
        if what == "size":
            gather = SymmMemAllGather(arena, module="layer")
            numel = 8 if rank == 0 else 16
            out = gather.allocate((2 * numel,), dtype=torch.float32, device=CPU)
            gather(out, out.narrow(0, rank * numel, numel), group)
        elif what == "module":
            gather = SymmMemAllGather(arena, module=f"layers.{rank}")
            out = gather.allocate((16,), dtype=torch.float32, device=CPU)
            gather(out, out.narrow(0, rank * 8, 8), group)
        else:
            reduce = SymmMemReduceScatter(arena, module="layer")
            source = reduce.allocate((16,), dtype=torch.float32, device=CPU)
            target = reduce.allocate((8,), dtype=torch.float32, device=CPU)
            reduce(target, source.fill_(1), group, dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.AVG)
    finally:
        arena.abandon("test over")


@pytest.mark.parametrize(
    ("what", "quotes"),
    [
        ("size", ("all_gather of 'layer', 64 bytes float32", "all_gather of 'layer', 128 bytes float32")),
        ("module", ("all_gather of 'layers.0'", "all_gather of 'layers.1'")),
        ("op", ("float32, SUM", "float32, AVG")),
    ],
)
def test_different_collectives_are_quoted(ranks2: Ranks, what: str, quotes: tuple[str, str]) -> None:
    failures = ranks2.failures(_differing_calls, what)
    assert any("the ranks of one group issued different collectives" in f.text for f in failures)
    for failure in failures:
        assert failure.kind == "SymmMemPeerError"
        assert all(quote in failure.text for quote in quotes)


# --- memory that cannot be had -----------------------------------------------------------------------------


def _with_shm_dir(folder: str, only_rank: int | None) -> str:
    if only_rank is None or dist.get_rank() == only_rank:
        os.environ[SHM_DIR_VARIABLE] = folder
    try:
        with pytest.raises(SymmMemError) as caught:
            set_symm_mem_for_comm(build(Options()), timeout_s=20)
    finally:
        os.environ.pop(SHM_DIR_VARIABLE, None)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_missing_shared_memory_is_an_error_with_the_bytes(ranks2: Ranks, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    for text in ranks2.run(_with_shm_dir, missing, None):
        assert text.startswith("SymmMemMemoryError: rank 0: host symmetric memory:")
        assert f"bytes (0.0 MiB) in {missing} could not be had" in text
        assert "found: No such file or directory" in text
        assert "rank 1: host symmetric memory" in text


def test_missing_shared_memory_on_one_rank_is_heard_by_all(ranks2: Ranks, tmp_path: Path) -> None:
    for text in ranks2.run(_with_shm_dir, str(tmp_path / "none"), 1):
        assert text.startswith("SymmMemMemoryError: rank 1: host symmetric memory:")
        assert "rank 0" not in text


@contextlib.contextmanager
def _small_tmpfs(folder: Path, size: str) -> Any:
    folder.mkdir()
    code = os.system(f"mount -t tmpfs -o size={size} tmpfs {folder} 2>/dev/null")
    if code != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield
    finally:
        os.system(f"umount {folder}")


def test_full_shared_memory_is_an_error_with_the_bytes(ranks2: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with _small_tmpfs(folder, "8k"):
        for text in ranks2.run(_with_shm_dir, str(folder), None):
            assert text.startswith("SymmMemMemoryError: rank 0: host symmetric memory: 16384 bytes")
            assert "found: 8192 bytes free (No space left on device)" in text
            assert "--shm-size" in text


# --- misuse of the comms -----------------------------------------------------------------------------------


def _misfit(role: str) -> str:
    group = dist.group.WORLD
    arena = SymmMemArena(group, [Ring("all_gather", 1, 4096), Ring("reduce_scatter", 1, 4096)], timeout_s=10)
    with pytest.raises(SymmMemError) as caught:
        if role == "all_gather":
            SymmMemAllGather(arena, module="m")(torch.empty(9), torch.empty(4), group)
        elif role == "op":
            reduce = SymmMemReduceScatter(arena, module="m")
            source = reduce.allocate((8,), dtype=torch.float32, device=CPU)
            reduce(torch.empty(4), source, group, dist.ReduceOp.PRODUCT)
        else:
            SymmMemReduceScatter(arena, module="m")(torch.empty(4), torch.empty(9), group, dist.ReduceOp.SUM)
    arena.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (
            "all_gather",
            "all_gather of 'm': the tensors do not fit together\n  found: output 9 x torch.float32, input 4",
        ),
        ("reduce_scatter", "reduce_scatter of 'm': the tensors do not fit together\n  found: input 9"),
        ("op", "reduce-scatter: unsupported reduce op\n  found: PRODUCT"),
    ],
)
def test_misuse_is_an_error(ranks2: Ranks, role: str, text: str) -> None:
    for answer in ranks2.run(_misfit, role):
        assert text in answer


def _foreign_buffers(strict: bool) -> Any:
    group, rank = dist.group.WORLD, dist.get_rank()
    arena = SymmMemArena(group, [Ring("all_gather", 1, 4096)], timeout_s=10)
    gather = SymmMemAllGather(arena, module="m", strict=strict)
    gather.allocate((2,), dtype=torch.float32, device=CPU)
    out = torch.full((8,), float("nan"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            gather(out, torch.full((4,), float(rank)), group)
        except SymmMemError as error:
            arena.close()
            return str(error)
    arena.close()
    return out.tolist(), [str(w.message) for w in seen], gather.counters.calls["all_gather"]["plain"]


def test_a_buffer_from_elsewhere_takes_the_plain_path(ranks2: Ranks) -> None:
    for out, texts, calls in ranks2.run(_foreign_buffers, False):
        assert out == [0.0] * 4 + [1.0] * 4
        assert "the buffer was not allocated by this comm" in texts[0]
        assert calls == 1


def test_a_buffer_from_elsewhere_is_an_error_under_strict(ranks2: Ranks) -> None:
    for text in ranks2.run(_foreign_buffers, True):
        assert "all_gather of 'm' takes the plain path\n  found: the buffer was not allocated by this comm" in text
