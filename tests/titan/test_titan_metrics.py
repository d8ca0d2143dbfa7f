"""Cumulative stats become per-step scalars."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_symm.titan import cpu

cpu.prepare()

from fsdp_symm.titan.metrics import Totals, scalars  # noqa: E402


@dataclass(frozen=True)
class Stats:
    arena_bytes: int
    wait_s: float
    bytes_moved: dict[str, dict[str, int]] = field(default_factory=dict)


def test_differences_are_divided_by_the_steps_between() -> None:
    before = Totals.of([Stats(100, 1.0, {"all_gather": {"host": 10}})])
    now = Totals.of([Stats(100, 2.5, {"all_gather": {"host": 40, "plain": 6}, "reduce_scatter": {"host": 9}})])
    assert scalars(before, now, 3) == {
        "fsdp_symm/arena_bytes": 100,
        "fsdp_symm/wait_s_per_step": 0.5,
        "fsdp_symm/bytes_per_step/all_gather/host": 10.0,
        "fsdp_symm/bytes_per_step/all_gather/plain": 2.0,
        "fsdp_symm/bytes_per_step/reduce_scatter/host": 3.0,
    }


def test_model_parts_are_summed() -> None:
    part = Stats(100, 1.0, {"all_gather": {"host": 10}})
    assert Totals.of([part, part]) == Totals(200, 2.0, {("all_gather", "host"): 20})
