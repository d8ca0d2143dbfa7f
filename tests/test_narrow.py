"""bf16 gradients summed in fp32 travel as bf16 (before torch 2.15): half of the bytes, the same numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_symm import SymmMemHandle, set_symm_mem_for_comm
from fsdp_symm.errors import SymmMemError
from tests.harness import Ranks
from tests.models import DEVICE, Options, batch, build, grads, train_step

MIXED = Options(param_dtype="bfloat16", reduce_dtype="float32")
SWITCH = {"reduce_scatter": "copy_engine"} if DEVICE == "cuda" else {}
NARROW = 2 if torch.__version__ < "2.15" else 4  # bytes of what travels: 2.15 makes some gradients wider


def _received(handle: SymmMemHandle) -> int:
    return sum(handle.stats().bytes_moved["reduce_scatter"].values())


def _bytes(options: Options) -> tuple[int, int]:
    """Bytes that a step's reduce-scatters fetch, and the elements of the gradients that this rank keeps."""
    model = build(options)
    with set_symm_mem_for_comm(model, strict=True, **SWITCH) as handle:
        train_step(model, torch.optim.SGD(model.parameters(), 0.0), 0, options)
        kept = sum(g.numel() for g in grads(model) if g is not None)
        return _received(handle), kept


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, NARROW),
        ({"param_dtype": "float16"}, NARROW),
        ({"reduce_dtype": "bfloat16"}, 2),  # asked for as it is
        ({"param_dtype": None}, 4),
        ({"micro_batches": 2, "sync_last_only": True}, 4),  # summed over micro-batches in fp32 before they travel
        ({"micro_batches": 2}, 2 * NARROW),  # reduced twice
    ],
)
def test_gradients_travel_in_their_own_type(ranks2: Ranks, changes: dict[str, Any], width: int) -> None:
    for received, kept in ranks2.run(_bytes, dataclasses.replace(MIXED, **changes)):
        assert width * kept <= received < width * kept * 1.2, "padding of uneven shards aside"


def _changing(options: Options) -> list[tuple[list[Any], list[Any]]]:
    """Steps with and without accumulation in turns: one model, both widths."""
    answers = []
    plain, model = build(options), build(options)
    with set_symm_mem_for_comm(model, strict=True, **SWITCH):
        for step in range(4):
            now = dataclasses.replace(options, micro_batches=1 + step % 2, sync_last_only=True)
            for m in (plain, model):
                m.zero_grad()
                train_step(m, torch.optim.SGD(m.parameters(), 0.1), step, now)
            answers.append(([g.tolist() for g in grads(plain)], [g.tolist() for g in grads(model)]))
    return answers


def test_widths_change_from_step_to_step(ranks2: Ranks) -> None:
    for answers in ranks2.run(_changing, MIXED):
        for plain, found in answers:
            assert found == plain


def _symmetric(options: Options) -> tuple[int, dict[str, int]]:
    """Bytes of the reduce-scatter slots, and who ran the reduce-scatters of a step."""
    plain, model = build(options), build(options)
    with set_symm_mem_for_comm(model, strict=True, **SWITCH) as handle:
        for m in (plain, model):
            train_step(m, torch.optim.SGD(m.parameters(), 0.1), 0, options)
        for a, b in zip(grads(plain), grads(model), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        (row,) = [r for r in handle.report.rows if r.role == "reduce_scatter"]
        assert all(arena.stats().in_use["reduce_scatter"] == 0 for arena in handle.arenas)
        return row.nbytes, handle.stats().calls["reduce_scatter"]


@pytest.mark.parametrize("buffers", [1, 2])
def test_slots_are_as_small_as_what_travels_and_wider_gradients_pass_in_parts(ranks2: Ranks, buffers: int) -> None:
    wide = dataclasses.replace(MIXED, hidden=512, input_buffers=buffers)
    full, _ = ranks2.run(_symmetric, dataclasses.replace(wide, param_dtype=None))[0]
    engine = "copy_engine" if DEVICE == "cuda" else "host"
    for changes in ({}, {"micro_batches": 2, "sync_last_only": True}):
        for half, calls in ranks2.run(_symmetric, dataclasses.replace(wide, **changes)):
            assert full * NARROW / 4 <= half < full * NARROW / 4 + buffers * 4096 + 1
            assert set(calls) == {engine}, "nothing falls back"


def _planned(options: Options) -> set[bool]:
    """Whether the plan of the reduce-scatters says that gradients may travel in a narrower type."""
    from fsdp_symm import fsdp

    plans: list[Any] = []
    full = fsdp.judge_all
    fsdp.judge_all = lambda found, **settings: full((plans.extend(found), found)[1], **settings)
    try:
        set_symm_mem_for_comm(build(options), strict=True, **SWITCH).close()
    finally:
        fsdp.judge_all = full
    return {need.narrow for plan in plans for need in plan.needs if need.lane == "reduce_scatter"}


@pytest.mark.parametrize(
    ("changes", "narrow"),
    [({}, NARROW == 2), ({"param_dtype": None}, False), ({"reduce_dtype": "bfloat16"}, False)],
)
def test_the_plan_knows_what_may_travel_narrower(ranks2: Ranks, changes: dict[str, Any], narrow: bool) -> None:
    """Who reduces depends on it, where ranks share a GPU."""
    assert ranks2.run(_planned, dataclasses.replace(MIXED, **changes)) == [{narrow}] * 2


def _other_types() -> None:
    """Ranks whose gradients would travel in different types."""
    kind = torch.bfloat16 if dist.get_rank() else torch.float32
    model: Any = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32))
    set_symm_mem_for_comm(model, all_gather=False, strict=True, **SWITCH)


@pytest.mark.skipif(NARROW == 4, reason="from torch 2.15 on all of them travel in the type of the sum")
def test_ranks_whose_gradients_differ_in_type_are_refused(ranks2: Ranks) -> None:
    for failure in ranks2.failures(_other_types):
        assert failure.kind == "PlanMismatchError"
        assert "float32'" in failure.text
        assert "float32 of bfloat16'" in failure.text


def _norms() -> list[list[Any]]:
    """Gradients of plain FSDP2 and of ours, of operators whose backward may give a wider type than the parameter's."""
    answers = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for switched in (False, True):
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(DEVICE)
        fully_shard(model, mp_policy=policy)
        handle = set_symm_mem_for_comm(model, strict=True, **SWITCH) if switched else None
        for micro_batch in range(3):
            model.set_requires_gradient_sync(micro_batch != 1)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank() + 9 * micro_batch))
            model(x.to(DEVICE, torch.bfloat16)).float().square().mean().backward()
        answers.append([p.grad.to_local().tolist() for p in model.parameters()])
        if handle is not None:
            handle.close()
    return answers


def test_gradients_of_norms_keep_their_digits(ranks2: Ranks) -> None:
    for plain, found in ranks2.run(_norms):
        assert found == plain


class Sometimes(nn.Module):
    """A layer that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return x + self.linear(x) if use else x * 1.0


def _sometimes(way: str) -> list[list[Any]]:
    """Gradients of plain FSDP2 and of ours, where rank 1 does not use the layer in one backward pass."""
    answers = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mine = dist.get_rank() == 0
    for switched in (False, True):
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
        model.append(Sometimes().to(DEVICE))
        fully_shard(model[1], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        handle = set_symm_mem_for_comm(model, strict=True, **SWITCH) if switched else None
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)

        def backward(use: bool, model: Any = model, x: torch.Tensor = x) -> None:
            model.unshard()
            model[1](model[0](x.to(torch.bfloat16)), use).float().square().mean().backward()

        model[1].set_reduce_scatter_unused_params(way == "unused")
        if way == "accumulated":
            model.set_requires_gradient_sync(False)
            backward(mine)
            model.set_requires_gradient_sync(True)
            backward(True)
        else:
            backward(mine)
        answers.append([p.grad.to_local().tolist() for p in model[1].parameters()])
        if handle is not None:
            handle.close()
    return answers


@pytest.mark.parametrize("way", ["unused", "accumulated"])
def test_ranks_agree_on_the_type_whatever_their_own_gradients_are(ranks2: Ranks, way: str) -> None:
    for plain, found in ranks2.run(_sometimes, way):
        assert found == plain


def test_gradients_of_a_wider_type_than_their_parameters_are_refused() -> None:
    """No program is known that makes them: played with stand-ins for FSDP2's objects."""
    from fsdp_symm.compat_reduce import GradientTypes

    gradient = torch.zeros(2)
    parameter = SimpleNamespace(
        sharded_param=SimpleNamespace(requires_grad=True), _sharded_local_tensor=torch.zeros(2),
        param_dtype=torch.bfloat16, orig_dtype=torch.float32, all_gather_outputs=[],
        _unsharded_param=SimpleNamespace(grad=gradient),
    )  # fmt: skip
    native = SimpleNamespace(
        fsdp_params=[parameter], modules=[None], reduce_grads=True, post_backward=lambda: "reduced"
    )
    types = GradientTypes(SimpleNamespace(native=native, label="layers.3"))  # type: ignore[arg-type]
    types.install()
    with pytest.raises(SymmMemError) as error:
        native.post_backward()
    text = str(error.value)
    assert "reduce_scatter of 'layers.3': gradients of a wider type than their parameters" in text
    assert "found: {torch.float32}" in text
    assert "expected: {torch.bfloat16}" in text
    assert "reduce_scatter=False leaves this group's reductions to FSDP2" in text
    parameter._unsharded_param.grad = gradient.to(torch.float16)
    assert native.post_backward() == "reduced", "as wide: FSDP2 reduces in a type of its own"
    parameter._unsharded_param.grad = gradient.to(torch.bfloat16)
    assert (native.post_backward(), types.dtype) == ("reduced", torch.bfloat16)


def _switched_late(again: bool) -> list[list[Any]]:
    """The switch comes while gradients wait that were accumulated without a reduction."""
    answers = []
    for switched in (False, True):
        model = build(MIXED)
        if switched and again:  # a handle that has seen the accumulation is closed, and another one takes over
            first = set_symm_mem_for_comm(model, strict=True, **SWITCH)
        model.set_requires_gradient_sync(False)
        model(batch(0)).float().square().mean().backward()
        if switched and again:
            first.close()
        handle = set_symm_mem_for_comm(model, strict=True, **SWITCH) if switched else None
        model.set_requires_gradient_sync(True)
        model(batch(1)).float().square().mean().backward()
        answers.append([None if g is None else g.tolist() for g in grads(model)])
        if handle is not None:
            handle.close()
    return answers


@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_waited_for_the_switch_keep_their_digits(ranks2: Ranks, again: bool) -> None:
    for plain, found in ranks2.run(_switched_late, again):
        assert found == plain


def _unlinked() -> list[bool]:
    """A, then B on top of it; A goes first, then B."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    model = build(MIXED)
    first = set_symm_mem_for_comm(model, strict=True, **SWITCH)
    states = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    for group in states:
        group._reduce_scatter_comm = DefaultReduceScatter()
    second = set_symm_mem_for_comm(model, all_gather=False, strict=True, **SWITCH)
    first.close()
    second.close()
    return ["post_backward" in vars(group) for group in states]


def test_a_handle_below_another_leaves_nothing_behind(ranks2: Ranks) -> None:
    for answer in ranks2.run(_unlinked):
        assert answer
        assert not any(answer)


def _left_alone() -> list[bool]:
    """FSDP2's own methods are back after two handles, whichever closes first."""
    model = build(MIXED)
    groups = [
        g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in [m._get_fsdp_state()._fsdp_param_group]
    ]
    answers = []
    for order in ((0, 1), (1, 0)):
        first = set_symm_mem_for_comm(model, strict=True, **SWITCH)
        first.disable()
        handles = [first, set_symm_mem_for_comm(model, strict=True, **SWITCH)]
        for index in order:
            handles[index].close()
        answers.append(any("post_backward" in vars(group) for group in groups if group is not None))
    return answers


def test_nothing_is_left_behind(ranks2: Ranks) -> None:
    assert ranks2.run(_left_alone) == [[False, False]] * 2


def _by_hand() -> None:
    """Two handles on one model at once: the outer one goes first."""
    model = build(MIXED)
    outer = set_symm_mem_for_comm(model, modules="blocks.*")
    inner = set_symm_mem_for_comm(model)
    outer.close()
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, MIXED)
    inner.close()
    train_step(model, torch.optim.SGD(model.parameters(), 0.1), 1, MIXED)
    dist.barrier()


@pytest.mark.filterwarnings("ignore")
def test_handles_that_overlap(ranks2: Ranks) -> None:
    ranks2.run(_by_hand)
