"""The switch changes no number: losses, gradients and parameters equal plain FSDP2's over every option, bit for bit.

With two ranks in a shard group every order of summation is the same one, so gradients must be equal in every bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_symm import set_symm_mem_for_comm
from tests.harness import Ranks
from tests.models import DEVICE, WAYS, Options, build, grads, materialize, poison, train_step

STEPS = 10


def _assert_equal(mine: list[Any], plain: list[Any], what: str) -> None:
    for index, (a, b) in enumerate(zip(mine, plain, strict=True)):
        same = (a is None and b is None) or torch.equal(a, b)
        assert same, f"{what} {index}: {None if a is None or b is None else (a - b).abs().max()}"


def _compare(options: Options, exact: bool, way: dict[str, Any]) -> dict[str, Any]:
    plain_options = Options(**{**options.__dict__, "force_sum": True} if options.divide_factor else options.__dict__)
    plain, model = build(plain_options), build(options)
    handle = set_symm_mem_for_comm(model, strict=True, **way, **options.switch)
    if options.meta:
        materialize(plain), materialize(model)
    poison(handle.arenas)
    start_bytes = handle.stats().arena_bytes
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.05) for m in (plain, model)]
    losses = []
    for step in range(STEPS):
        expected = train_step(plain, optimizers[0], step, plain_options)
        found = train_step(model, optimizers[1], step, options)
        losses.append(found)
        if exact:
            assert found == expected, f"step {step}: {found!r} != {expected!r}"
            _assert_equal(grads(model), grads(plain), f"step {step} gradient")
        else:
            assert found == pytest.approx(expected, rel=1e-5)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=bool(step % 2))
    if exact:
        _assert_equal([p.to_local() for p in model.parameters()], [p.to_local() for p in plain.parameters()], "param")
    assert losses[-1] < losses[0]
    stats = handle.stats()
    assert stats.arena_bytes == start_bytes
    handle.close()
    return {"calls": stats.calls, "report": handle.report.rows, "losses": losses}


CASES = {
    "fp32": Options(),
    "bf16_params_fp32_reduce": Options(param_dtype="bfloat16", reduce_dtype="float32"),
    "bf16_both": Options(param_dtype="bfloat16", reduce_dtype="bfloat16"),
    "fp16_reduce": Options(param_dtype="float16", reduce_dtype="float16"),
    "uneven_shards": Options(hidden=17),
    "fewer_rows_than_ranks": Options(hidden=1),
    "shard_dim_1": Options(shard_dim=1),
    "reshard_true": Options(reshard=True),
    "reshard_false": Options(reshard=False),
    "accumulate_without_sync": Options(micro_batches=3, sync_last_only=True),
    "accumulate_without_sync_bf16": Options(
        micro_batches=3, sync_last_only=True, param_dtype="bfloat16", reduce_dtype="float32"
    ),
    "accumulate_with_sync": Options(micro_batches=2),
    "explicit_prefetch_2": Options(blocks=5, prefetch=2),
    "explicit_prefetch_3_of_4": Options(blocks=4, prefetch=3),
    "unshard_async_from_idle": Options(unshard_async=True, switch={"slots": 5}),
    "two_input_buffers": Options(input_buffers=2),
    "three_input_buffers": Options(blocks=5, input_buffers=3),
    "separate_reduce_scatter_group": Options(separate_group=True),
    "frozen": Options(frozen=True),
    "unused": Options(unused=True),
    "unused_reduced": Options(unused=True, reduce_unused=True),
    "cpu_offload": Options(cpu_offload=True),
    "extension_uint8": Options(extension=True, hidden=20),
    "activation_checkpointing": Options(checkpointing=True),
    "parameterless_root": Options(parameterless_root=True),
    "shared_block": Options(shared_block=True),
    "premul_sum": Options(divide_factor=1.0),
    "premul_sum_power_of_two": Options(divide_factor=4.0),
    "meta_device": Options(meta=True),
    "one_block": Options(blocks=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_bit_equal(ranks2: Ranks, name: str, way: str) -> None:
    switch, gathers, reduces = WAYS[way]
    for answer in ranks2.run(_compare, CASES[name], True, switch):
        assert set(answer["calls"]["all_gather"]) == {gathers}, answer["calls"]
        assert set(answer["calls"]["reduce_scatter"]) == {reduces}, answer["calls"]


def _with_filled_memory(options: Options, way: dict[str, Any]) -> dict[str, Any]:
    """Under deterministic algorithms torch fills new memory with NaN, on the stream that allocates it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _compare(options, True, way)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bf16_params_fp32_reduce", "reshard_false", "shard_dim_1"])
def test_memory_that_torch_fills_with_nan_ends_up_right(ranks2: Ranks, name: str, way: str) -> None:
    ranks2.run(_with_filled_memory, CASES[name], WAYS[way][0])


CASES_4 = {
    "hsdp": Options(hsdp=True),
    "hsdp_bf16": Options(hsdp=True, param_dtype="bfloat16", reduce_dtype="float32"),
    "hsdp_all_reduce_last": Options(hsdp=True, micro_batches=2, all_reduce_last_only=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES_4)
def test_hsdp_on_four_ranks_is_bit_equal(ranks4: Ranks, name: str, way: str) -> None:
    switch, gathers, reduces = WAYS[way]
    for answer in ranks4.run(_compare, CASES_4[name], True, switch):
        assert set(answer["calls"]["all_gather"]) == {gathers}
        assert set(answer["calls"]["reduce_scatter"]) == {reduces}
        all_reduce = [row for row in answer["report"] if row.role == "all_reduce"]
        assert len(all_reduce) == 1
        assert all_reduce[0].engine == "plain"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [Options(reshard=2), Options(), Options(hidden=17)], ids=["reshard_2", "dp4", "odd"]
)
def test_four_ranks_equal_within_summation_order(ranks4: Ranks, options: Options, way: str) -> None:
    answers = ranks4.run(_compare, options, False, WAYS[way][0])
    served = {(row.role, row.ranks) for row in answers[0]["report"] if row.slots}
    assert ("all_gather", (0, 1, 2, 3)) in served
    if options.reshard == 2:
        assert ("all_gather", (0, 1)) in served, "the post-forward group has an arena of its own"


def _one_rank() -> dict[str, Any]:
    return _compare(Options(), True, {})


def test_world_size_one_moves_nothing() -> None:
    from tests.harness import fresh_ranks

    with fresh_ranks(1) as ranks:
        (answer,) = ranks.run(_one_rank)
    assert {row.engine for row in answer["report"]} == {"none"}
    assert {row.reason for row in answer["report"]} == {"one rank: nothing moves"}


@pytest.mark.skipif(DEVICE != "cpu", reason="about gloo")
def test_gloo_alone_cannot_do_premul_sum(ranks2: Ranks) -> None:
    """The reference of the premul cases is force-sum, since gloo refuses; this keeps that reason true."""
    failures = ranks2.failures(_plain_premul)
    assert all("PREMUL_SUM" in failure.text for failure in failures)


def _plain_premul() -> None:
    model = build(Options(divide_factor=1.0))
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
