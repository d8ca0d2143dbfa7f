"""The switch itself: what it selects, reports, refuses, undoes, and how it meets other users of FSDP2's hooks."""

from __future__ import annotations

import gc
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from fsdp_symm import (
    SymmMemAllGather,
    SymmMemArena,
    SymmMemReduceScatter,
    set_symm_mem_for_comm,
)
from fsdp_symm.errors import SymmMemConfigError, SymmMemError
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import Ring
from tests.harness import Failure, Ranks, init_process_group
from tests.models import WIDTH, Options, batch, build, grads, poison, train_step


def _comms(model: nn.Module) -> list[Any]:
    from fsdp_symm import compat

    return [compat.get_comm(g, role) for g in compat.param_groups(model) for role in compat.ROLES]


def _step(model: Any) -> float:
    return train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())


# --- bad arguments -----------------------------------------------------------------------------------------

BAD_ARGUMENTS = {
    "backend": (
        {"backend": "nvshmem"},
        "bad argument backend\n  found: 'nvshmem'\n  expected: one of ['auto', 'cuda', 'host', 'nccl']",
    ),
    "nothing": ({"all_gather": False, "reduce_scatter": False}, "expected: all_gather or reduce_scatter to be on"),
    "all_gather": ({"all_gather": 1}, "bad argument all_gather\n  found: 1"),
    "strict": ({"strict": "yes"}, "bad argument strict\n  found: 'yes'"),
    "modules": ({"modules": 3}, "bad argument modules\n  found: 3"),
    "no_match": ({"modules": "layers.*"}, "modules matches no FSDP module\n  found: 'layers.*'"),
    "min_bytes": ({"min_bytes": -1}, "bad argument min_bytes\n  found: -1"),
    "min_bytes_bool": ({"min_bytes": True}, "bad argument min_bytes\n  found: True"),
    "slots": ({"slots": 0}, "bad argument slots\n  found: 0"),
    "timeout": ({"timeout_s": 0}, "bad argument timeout_s\n  found: 0"),
    "timeout_nan": ({"timeout_s": float("nan")}, "bad argument timeout_s\n  found: nan"),
    "timeout_huge": ({"timeout_s": 10**400}, "expected: seconds, from 0.01 to 1000000"),
    "slots_huge": ({"slots": 10**30}, "expected: None or an integer from 1 to 4096"),
    "dedicated": ({"dedicated_all_gather": "yes"}, "bad argument dedicated_all_gather\n  found: 'yes'"),
    "timeout_text": ({"timeout_s": "60"}, "bad argument timeout_s\n  found: '60'"),
}


def _bad_argument(arguments: dict[str, Any]) -> tuple[str, bool]:
    model = build(Options())
    before = _comms(model)
    with pytest.raises(SymmMemConfigError) as caught:
        set_symm_mem_for_comm(model, **arguments)
    return str(caught.value), all(a is b for a, b in zip(before, _comms(model), strict=True))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_named_and_changes_nothing(ranks2: Ranks, name: str) -> None:
    arguments, expected = BAD_ARGUMENTS[name]
    for text, unchanged in ranks2.run(_bad_argument, arguments):
        assert expected in text
        assert "fix:" in text
        assert unchanged


def test_without_a_process_group() -> None:
    with pytest.raises(SymmMemConfigError, match="there is no process group"):
        set_symm_mem_for_comm(nn.Linear(2, 2))


def _no_fsdp() -> None:
    set_symm_mem_for_comm(nn.Linear(2, 2))


def test_without_fully_shard(ranks2: Ranks) -> None:
    for failure in ranks2.failures(_no_fsdp):
        assert "the model has no FSDP2 module\n  found: Linear without fully_shard" in failure.text


# --- selection and report ----------------------------------------------------------------------------------


def _select(**arguments: Any) -> tuple[list[Any], str, dict[str, Any]]:
    model = build(Options())
    if arguments.get("modules") == "callable":
        arguments["modules"] = lambda fqn, module: fqn == "blocks.1" and isinstance(module, nn.Module)
    with set_symm_mem_for_comm(model, **arguments) as handle:
        _step(model)
        stats = handle.stats()
        return list(handle.report), str(handle), {"calls": stats.calls, "bytes": stats.bytes_moved}


def _select_job(arguments: dict[str, Any]) -> Any:
    return _select(**arguments)


def test_report_of_a_whole_model(ranks2: Ranks) -> None:
    rows, table, moved = ranks2.run(_select_job, {})[0]
    gather, reduce = rows
    assert (gather.role, gather.ranks, gather.slots, gather.engine) == ("all_gather", (0, 1), 2, "host")
    assert gather.modules == ("<root>", "blocks.0", "blocks.1", "blocks.2")
    assert (reduce.role, reduce.slots) == ("reduce_scatter", 1)
    block_numel = 2 * (WIDTH * 20 // 2 + 20 // 2 + 20 * WIDTH // 2 + WIDTH // 2 + 1)
    assert reduce.nbytes >= block_numel * 4
    assert gather.nbytes == 2 * 4096, "two slots of one page hold a rank's own shards"
    assert gather.reason.endswith("placed directly")
    for word in ("group", "ranks", "role", "slots", "bytes", "engine", "reason", "all_gather", "0,1", "host"):
        assert word in table
    # 3 blocks are gathered in forward and in backward, the root stays unsharded between
    assert moved["calls"] == {"all_gather": {"host": 7}, "reduce_scatter": {"host": 4}}
    root_numel = 2 * (3 * WIDTH + 3)
    assert moved["bytes"]["reduce_scatter"]["host"] == (3 * block_numel + root_numel) * 4 // 2


@pytest.mark.parametrize(
    ("arguments", "served", "reason"),
    [
        ({"modules": "blocks.*"}, {"blocks.0", "blocks.1", "blocks.2"}, "not selected by modules"),
        ({"modules": "callable"}, {"blocks.1"}, "not selected by modules"),
        ({"min_bytes": 1000}, {"blocks.0", "blocks.1", "blocks.2"}, "bytes < min_bytes=1000"),
        ({"min_bytes": 10**9}, set(), "bytes < min_bytes=1000000000"),
    ],
)
def test_selection(ranks2: Ranks, arguments: dict[str, Any], served: set[str], reason: str) -> None:
    rows, _, _ = ranks2.run(_select_job, arguments)[0]
    for role in ("all_gather", "reduce_scatter"):
        assert {m for r in rows if r.role == role and r.engine == "host" for m in r.modules} == served
        left = [r for r in rows if r.role == role and r.engine == "plain"]
        assert left
        assert all(reason in r.reason for r in left)


def test_one_role_only(ranks2: Ranks) -> None:
    rows, _, moved = ranks2.run(_select_job, {"reduce_scatter": False})[0]
    assert {(r.role, r.engine, r.reason) for r in rows if r.engine == "plain"} == {
        ("reduce_scatter", "plain", "reduce_scatter=False")
    }
    assert moved["calls"]["reduce_scatter"] == {}


def _frozen_all() -> list[Any]:
    model = build(Options())
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    with set_symm_mem_for_comm(model, strict=True) as handle:
        return list(handle.report)


def test_frozen_modules_have_no_reduce_scatter(ranks2: Ranks) -> None:
    rows = ranks2.run(_frozen_all)[0]
    frozen = next(r for r in rows if r.reason == "no trainable parameters")
    assert (frozen.engine, frozen.role, frozen.modules) == (
        "none",
        "reduce_scatter",
        ("<root>", "blocks.0", "blocks.2"),
    )


def _replicated() -> tuple[list[Any], list[Any]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicate(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    with set_symm_mem_for_comm(model, strict=True) as handle:
        return list(handle.report), [type(c).__name__ for c in _comms(model)]


def test_replicated_modules_are_skipped_with_the_reason(ranks2: Ranks) -> None:
    rows, comms = ranks2.run(_replicated)[0]
    skipped = [r for r in rows if r.reason == "replicated, not sharded"]
    assert {r.modules for r in skipped} == {("0",)}
    assert comms[:2] == ["DefaultAllGather", "DefaultReduceScatter"]
    assert comms[2:] == ["DefaultAllGather", "SymmMemReduceScatter"], "direct placement leaves the all-gather comm"


def _two_param_groups() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    infos = {name: FSDPMeshInfo(mesh=mesh[name], shard_mesh_dim=0) for name in ("a", "b")}

    def make() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])
        for block in model:
            second = set(block[2].parameters())
            fully_shard(
                block,
                mesh=mesh["a"],
                shard_placement_fn=lambda p, second=second: ShardPlacementResult(
                    Shard(0), infos["b"] if p in second else infos["a"]
                ),
            )
        return fully_shard(model, mesh=mesh["a"])

    plain, model = make(), make()
    handle = set_symm_mem_for_comm(model, strict=True)
    poison(handle.arenas)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 7 + dist.get_rank()))
        for m in (plain, model):
            m(x).square().mean().backward()
        for a, b in zip(grads(model), grads(plain), strict=True):
            assert a is not None
            assert torch.equal(a, b)
    rows, calls = list(handle.report), handle.stats().calls
    handle.close()
    return rows, calls


def test_several_param_groups_a_module(ranks4: Ranks) -> None:
    rows, calls = ranks4.run(_two_param_groups)[0]
    assert {(r.role, r.ranks, r.slots) for r in rows} == {
        ("all_gather", (0, 2), 2),
        ("all_gather", (0, 1), 2),
        ("reduce_scatter", (0, 2), 2),
        ("reduce_scatter", (0, 1), 2),
    }
    assert {m for r in rows for m in r.modules} >= {"0[0]", "0[1]"}
    assert set(calls["all_gather"]) == {"host"}


def _nothing_switched() -> tuple[list[str], int]:
    model = build(Options())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with set_symm_mem_for_comm(model, min_bytes=10**9, strict=True) as handle:
            stats = handle.stats()
    return [str(w.message) for w in seen], stats.arena_bytes


def test_a_switch_that_moves_nothing_says_so(ranks2: Ranks) -> None:
    texts, arena_bytes = ranks2.run(_nothing_switched)[0]
    assert arena_bytes == 0
    assert any("nothing was switched\n  found: " in t and "bytes < min_bytes=1000000000" in t for t in texts)


# --- other users of FSDP2's hooks --------------------------------------------------------------------------


class MyAllGather(DefaultAllGather):
    """A user's comm that subclasses the default."""


def _custom_comm(strict: bool) -> Any:
    model = build(Options())
    mine = MyAllGather()
    model.blocks[1].set_custom_all_gather(mine)
    model.blocks[2].set_allocate_memory_from_process_group_for_comm(True)
    if strict:
        with pytest.raises(SymmMemConfigError) as caught:
            set_symm_mem_for_comm(model, strict=True)
        return str(caught.value), {type(c).__name__ for c in _comms(model)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        handle = set_symm_mem_for_comm(model)
    assert [w.category for w in seen] == [SymmMemFallbackWarning]
    assert mine in _comms(model)
    rows = list(handle.report)
    _step(model)
    handle.close()
    assert mine in _comms(model)
    return str(seen[0].message), rows


def test_custom_comm_is_left_alone_and_reported(ranks2: Ranks) -> None:
    text, rows = ranks2.run(_custom_comm, False)[0]
    assert "all_gather of 'blocks.1': the module has a custom all_gather comm (MyAllGather)" in text
    assert "all_gather of 'blocks.2': set_allocate_memory_from_process_group_for_comm is on for this module" in text
    left = [r for r in rows if r.engine == "plain"]
    assert {(r.role, r.modules) for r in left} == {
        ("all_gather", ("blocks.1",)),
        ("all_gather", ("blocks.2",)),
        ("reduce_scatter", ("blocks.2",)),
    }


def _native_switch() -> tuple[str, str]:
    model = build(Options())
    native = import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    model.blocks[1].set_custom_all_gather(
        object.__new__(native.SymmMemAllGather)
    )  # as torch's switch does, without GPUs
    with pytest.raises(SymmMemConfigError) as strictly:
        set_symm_mem_for_comm(model, strict=True)
    with pytest.warns(SymmMemFallbackWarning) as seen:
        set_symm_mem_for_comm(model).close()
    return str(strictly.value), str(seen[0].message)


def test_modules_with_torchs_own_switch_are_left_alone_and_reported(ranks2: Ranks) -> None:
    for texts in ranks2.run(_native_switch):
        for text in texts:
            assert "all_gather of 'blocks.1': torch's own set_symm_mem_for_comm is on for it" in text
            assert "enable_fsdp_symm_mem" in text
            assert "\n  fix: " in text


def test_custom_comm_under_strict_is_an_error_and_nothing_changes(ranks2: Ranks) -> None:
    text, kinds = ranks2.run(_custom_comm, True)[0]
    assert "some collectives stay on the plain path" in text
    assert "MyAllGather" in text
    assert "SymmMemAllGather" not in kinds


class CountingAllGather(SymmMemAllGather):
    """A user's subclass of ours."""

    count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)


def _subclass() -> Any:
    plain, model = build(Options()), build(Options())
    rings = (Ring("all_gather", 2, 8192), Ring("reduce_scatter", 1, 8192))
    arena = SymmMemArena(dist.group.WORLD, rings, timeout_s=20)
    poison((arena,))
    mine = CountingAllGather(arena, module="blocks.1", strict=True)
    model.blocks[1].set_custom_all_gather(mine)
    model.blocks[1].set_custom_reduce_scatter(SymmMemReduceScatter(arena, module="blocks.1", strict=True))
    assert _step(model) == _step(plain)
    for a, b in zip(grads(model), grads(plain), strict=True):
        assert a is not None
        assert torch.equal(a, b)
    with set_symm_mem_for_comm(model) as handle:
        rows = list(handle.report)
    arena.close()
    arena.close()
    return mine.count, rows, repr(arena)


def test_comms_can_be_subclassed_and_given_to_fsdp2(ranks2: Ranks) -> None:
    count, rows, text = ranks2.run(_subclass)[0]
    assert count == 2
    ours = [r for r in rows if r.modules == ("blocks.1",)]
    assert {r.reason for r in ours} == {"already on symmetric memory (an earlier handle or a custom comm)"}
    assert "closed" in text


# --- life cycle --------------------------------------------------------------------------------------------


def _life_cycle() -> None:
    plain, model = build(Options()), build(Options())
    before = _comms(model)
    first = set_symm_mem_for_comm(model)
    assert first.enabled
    assert not first.closed
    second = set_symm_mem_for_comm(model)  # twice: everything is taken already
    assert not second.enabled
    assert {r.engine for r in second.report} == {"kept"}
    assert all("already on symmetric memory" in r.reason for r in second.report)
    second.close()
    assert _step(model) == _step(plain)
    first.disable()
    first.disable()
    assert all(a is b for a, b in zip(before, _comms(model), strict=True))
    assert _step(model) == _step(plain)
    third = set_symm_mem_for_comm(model)  # after disable, with the first one's memory still held
    assert third.enabled
    assert third.stats().arena_bytes == first.stats().arena_bytes
    assert _step(model) == _step(plain)
    first.close()
    first.close()
    assert first.stats().arena_bytes == 0
    assert _step(model) == _step(plain)
    custom = MyAllGather()
    model.blocks[0].set_custom_all_gather(custom)  # someone replaced ours since
    third.close()
    assert custom in _comms(model)
    assert "closed" in repr(third)
    assert _step(model) == _step(plain)


def test_twice_after_disable_and_after_close(ranks2: Ranks) -> None:
    ranks2.run(_life_cycle)


def _rebuild(store: str) -> tuple[str, bool]:
    stale = build(Options())
    handle = set_symm_mem_for_comm(stale)
    _step(stale)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    handle.close()  # needs no process group
    init_process_group(rank, world_size, store)
    with pytest.raises(SymmMemConfigError) as caught:
        set_symm_mem_for_comm(stale)
    plain, model = build(Options()), build(Options())
    with set_symm_mem_for_comm(model, strict=True):
        same = _step(model) == _step(plain)
    return str(caught.value), same


def test_after_the_process_group_was_rebuilt(ranks2: Ranks, tmp_path: Any) -> None:
    for text, same in ranks2.run(_rebuild, str(tmp_path / "again")):
        assert "a process group of '<root>' was destroyed" in text
        assert same


def _gradients_survive() -> None:
    model = build(Options())
    handle = set_symm_mem_for_comm(model)
    _step(model)
    kept = grads(model)
    live = [p.grad.to_local() for p in model.parameters()]
    dist.barrier()  # peers have read the slots that are now overwritten behind the protocol's back
    poison(handle.arenas)
    handle.close()
    del handle
    gc.collect()
    for a, b in zip(kept, live, strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_gradients_do_not_live_in_symmetric_memory(ranks2: Ranks) -> None:
    ranks2.run(_gradients_survive)


def _checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    states: dict[bool, Any] = {}
    for on in (False, True):
        torch.manual_seed(5)
        model = build(Options(param_dtype="bfloat16", reduce_dtype="float32"))
        handle = set_symm_mem_for_comm(model) if on else None
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train_step(model, optimizer, 0, Options())
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{on}")
        other = build(Options(param_dtype="bfloat16", reduce_dtype="float32"))
        flipped = None if on else set_symm_mem_for_comm(other)
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=f"{folder}/{on}")
        other.load_state_dict(loaded["model"])
        states[on] = [p.to_local().clone() for p in other.parameters()]
        assert other(batch(1)).equal(model(batch(1)))
        for h in (handle, flipped):
            if h is not None:
                h.close()
    for a, b in zip(states[False], states[True], strict=True):
        assert torch.equal(a, b)


def test_checkpoints_load_with_the_switch_flipped(ranks2: Ranks, tmp_path: Any) -> None:
    ranks2.run(_checkpoint, str(tmp_path))


# --- what changes after the switch -------------------------------------------------------------------------


def _late_change(kind: str, strict: bool) -> Any:
    model = build(Options(blocks=5))
    way = "staged" if kind == "prefetch" else "auto"
    handle = set_symm_mem_for_comm(model, strict=strict, timeout_s=20, all_gather=way)
    blocks = list(model.blocks)
    if kind == "separate_group":
        model.set_separate_reduce_scatter_group(True)
    elif kind in ("prefetch", "prefetch_direct"):
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 4])
    elif kind == "buffers":
        model.set_reduce_scatter_max_input_buffers(3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            _step(model)
            _step(model)
        except SymmMemError as error:
            handle.disable()
            for arena in handle.arenas:
                arena.abandon("test over")
            return Failure(type(error).__name__, (), str(error), "")
    calls = handle.stats().calls
    handle.close()
    return [str(w.message) for w in seen if w.category is SymmMemFallbackWarning], calls


def test_a_group_made_later_takes_the_plain_path_and_says_so(ranks2: Ranks) -> None:
    texts, calls = ranks2.run(_late_change, "separate_group", False)[0]
    assert len(texts) == 6, "once a module"
    assert "its process group has no arena" in texts[0]
    assert calls["reduce_scatter"] == {"plain": 12}


def test_a_group_made_later_is_an_error_under_strict(ranks2: Ranks) -> None:
    for answer in ranks2.results(_late_change, "separate_group", True):
        assert answer.kind == "SymmMemConfigError"
        assert "takes the plain path\n  found: its process group has no arena" in answer.text


def test_longer_prefetch_set_later_is_a_named_shortage(ranks2: Ranks) -> None:
    for answer in ranks2.results(_late_change, "prefetch", False):
        assert answer.kind == "SlotShortageError"
        assert "all_gather of 'blocks.2': the ring of 2 slots (ranks [0, 1]) is too short" in answer.text
        assert "slot 0: 'blocks.0' (call" in answer.text or "slot 1: 'blocks.0' (call" in answer.text
        assert "set_modules_to_forward_prefetch" in answer.text


def test_longer_prefetch_set_later_needs_no_slots_under_direct_placement(ranks2: Ranks) -> None:
    texts, calls = ranks2.run(_late_change, "prefetch_direct", True)[0]
    assert texts == []
    assert calls["all_gather"] == {"host": 22}


def _gather_slots(prefetch: int, switch: dict[str, Any]) -> int:
    with set_symm_mem_for_comm(build(Options(blocks=5, prefetch=prefetch)), **switch) as handle:
        return next(row.slots for row in handle.report.rows if row.role == "all_gather")


def test_direct_placement_has_two_slots_whatever_is_prefetched(ranks2: Ranks) -> None:
    for prefetch in (0, 1, 3):
        assert ranks2.run(_gather_slots, prefetch, {}) == [2, 2]
    assert ranks2.run(_gather_slots, 3, {"slots": 5}) == [5, 5]
    assert ranks2.run(_gather_slots, 3, {"all_gather": "staged"}) == [4, 4], "outputs live until they are copied out"


def test_more_input_buffers_set_later_are_a_named_shortage(ranks2: Ranks) -> None:
    for answer in ranks2.results(_late_change, "buffers", False):
        assert answer.kind == "SlotShortageError"
        assert "the ring of 1 slots (ranks [0, 1]) is too short" in answer.text
        assert "set_reduce_scatter_max_input_buffers" in answer.text


def _unfreeze_later(frozen: tuple[str, ...]) -> Any:
    wide = Options(hidden=600)  # what is unfrozen is larger than the page that rounds the plan up
    model = build(wide)
    later = [p for block in model.blocks for name, p in block.named_parameters() if name in frozen]
    for parameter in later:
        parameter.requires_grad_(False)
    handle = set_symm_mem_for_comm(model)
    for parameter in later:
        parameter.requires_grad_(True)
    plain = build(wide)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert _step(model) == _step(plain)
    for a, b in zip(grads(model), grads(plain), strict=True):
        assert a is not None
        assert torch.equal(a, b)
    stats = handle.stats()
    in_use = handle.arenas[0].stats().in_use
    handle.close()
    return [str(w.message) for w in seen if w.category is SymmMemFallbackWarning], stats.calls, in_use


def test_parameters_unfrozen_later_take_the_plain_path(ranks2: Ranks) -> None:
    texts, calls, in_use = ranks2.run(_unfreeze_later, ("up.weight", "up.bias", "down.weight"))[0]
    assert calls["reduce_scatter"] == {"plain": 3, "host": 1}
    assert len(texts) == 3, "once a module"
    assert all("bytes were asked for" in text and "are planned" in text for text in texts)
    assert in_use["reduce_scatter"] == 0, "an output must never sit in a slot"


def test_a_few_parameters_unfrozen_later_pass_through_the_slots_in_parts(ranks2: Ranks) -> None:
    texts, calls, in_use = ranks2.run(_unfreeze_later, ("up.weight", "up.bias"))[0]
    assert calls["reduce_scatter"] == {"host": 4}
    assert texts == []
    assert in_use["reduce_scatter"] == 0


def _not_placed(all_gather: str, strict: bool) -> tuple[list[str], str, str]:
    """What is said of shards that cannot be placed directly: warnings, error, the table."""
    from fsdp_symm import compat_unshard

    full, error, table = compat_unshard.unsupported, "", ""
    compat_unshard.unsupported = lambda group: "a reason"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = set_symm_mem_for_comm(build(Options(blocks=1)), all_gather=all_gather, strict=strict)  # type: ignore[arg-type]
            table = str(handle)
            handle.close()
    except SymmMemConfigError as failure:
        error = str(failure)
    finally:
        compat_unshard.unsupported = full
    return [str(w.message) for w in caught if issubclass(w.category, SymmMemFallbackWarning)], error, table


def test_shards_that_cannot_be_placed_are_staged_in_words(ranks2: Ranks) -> None:
    for said, error, table in ranks2.run(_not_placed, "auto", True):
        assert (said, error) == ([], ""), "auto means direct where possible"
        assert "staged: a reason" in " ".join(table.split())
    for said, error, _ in ranks2.run(_not_placed, "direct", False):
        assert error == ""
        assert "some all-gathers are staged\n  found: '" in said[0]
        assert "a reason" in said[0]
        assert "fix: pass all_gather='auto' to accept a staging buffer there" in said[0]
    for _, error, _ in ranks2.run(_not_placed, "direct", True):
        assert "some all-gathers are staged" in error
