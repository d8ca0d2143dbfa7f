"""bf16 gradients summed in fp32 travel as bf16: half of the bytes, the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import SymmMemHandle, set_symm_mem_for_comm
from tests.harness import Ranks
from tests.models import DEVICE, Options, build, grads, train_step

MIXED = Options(param_dtype="bfloat16", reduce_dtype="float32")
SWITCH = {"reduce_scatter": "copy_engine"} if DEVICE == "cuda" else {}


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
        ({}, 2),
        ({"param_dtype": "float16"}, 2),
        ({"reduce_dtype": "bfloat16"}, 2),  # asked for as it is
        ({"param_dtype": None}, 4),
        ({"micro_batches": 2, "sync_last_only": True}, 4),  # summed over micro-batches in fp32 before they travel
        ({"micro_batches": 2}, 2 * 2),  # reduced twice
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
