"""How ways are timed alone and beside products, how a profile is split among them, and ranks that fail."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fsdp_symm.bench import launch
from fsdp_symm.bench.launch import World, run_ranks
from fsdp_symm.bench.timing import Beside, Clock, Timed, Way, covered, ratios, spread
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError

CPU = torch.device("cpu")


# --- timing ------------------------------------------------------------------------------------------------


def test_numbers() -> None:
    assert covered(1.0, 3.0, [(0.0, 1.5), (2.5, 9.0)]) == 1.0
    assert covered(1.0, 3.0, []) == 0.0
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == (2.0, 1.0, 3.0)
    assert spread("x", [3.0, 1.04, 2.0], 1) == {"x": 2.0, "x_min": 1.0, "x_max": 3.0}
    assert spread("x", [], 1) == {"x": "", "x_min": "", "x_max": ""}


class _TwoRanks(World):
    """This rank and a twin of it."""

    def meet(self) -> None:
        """Nobody to meet."""

    def all_values(self, values: list[float]) -> list[list[float]]:
        return [values, values]


class _Scripted(Clock):
    """Products and groups of calls at given times instead of on a device."""

    script: tuple[float, list[tuple[float, float]], list[tuple[float, float]]]

    def _queue_beside(self, way: Way, plan: Beside, head: int) -> Any:
        return self.script


def test_only_products_beside_calls_count() -> None:
    clock = _Scripted(_TwoRanks(0, 2, CPU, None, None))  # type: ignore[arg-type]
    timed = Timed(alone=[50.0], host=[10.0])
    # the second product is half alone and the third quite; the last group of calls has no product beside it
    products = [(100.0, 220.0), (220.0, 330.0), (400.0, 500.0)]
    clock.script = (100.0, products, [(90.0, 200.0), (200.0, 270.0), (510.0, 600.0)])
    way = Way("w", lambda: None, lambda: None, lambda: None)
    clock._beside(way, timed, [100.0, 96.0])
    assert timed.beside == 2  # one on each rank
    assert timed.slowdown == [pytest.approx(((120 / 100 + 120 / 96) / 2 - 1) * 100)]
    # of groups of so many calls: 110 and 70; the third is beside nothing
    assert timed.under == [90.0 / Beside.of(clock.product_us, 50.0).calls]

    clock.script = (0.0, [(0.0, 10.0)], [(50.0, 60.0)])
    clock._beside(way, timed, [100.0, 96.0])
    assert len(timed.slowdown) == len(timed.under) == 1


def test_products_and_calls_last_about_as_long() -> None:
    assert Beside.of(100.0, 30.0) == Beside(12, 12, 4)
    assert Beside.of(100.0, 1.0) == Beside(12, 12, 16)
    for call_us in (150.0, 900.0, 4000.0):
        plan = Beside.of(100.0, call_us)
        assert plan.calls == 1
        assert plan.products * 100.0 >= 3 * call_us  # some calls lie wholly beside products
        assert plan.groups * call_us >= 1.2 * plan.products * 100.0
    assert Beside.of(1.0, 1e6).products == 200


class _Logged(Clock):
    """Notes the order of products and calls."""

    def __init__(self) -> None:
        super().__init__(_TwoRanks(0, 2, CPU, None, None))  # type: ignore[arg-type]
        self.log: list[str] = []
        self._product.run = lambda: self.log.append("product")  # type: ignore[method-assign]


@pytest.mark.parametrize("waits", [False, True])
def test_calls_that_wait_come_behind_all_products(waits: bool) -> None:
    clock = _Logged()
    way = Way("w", lambda: clock.log.append("call"), lambda: None, lambda: None, waits)
    _, products, groups = clock._queue_beside(way, Beside(4, 2, 2), 0)
    assert (len(products), len(groups)) == (4, 2)
    two_calls = ["call"] * 2
    if waits:
        assert clock.log == ["product"] * 4 + two_calls * 2
    else:
        assert clock.log == [*two_calls, "product", "product"] * 2


def test_only_chosen_ways_run_beside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, beside = _Logged(), []
    queue = Clock._beside

    def noted(self: Clock, way: Way, *rest: Any) -> None:
        beside.append(way.name)
        queue(self, way, *rest)

    monkeypatch.setattr(Clock, "_beside", noted)
    ways = [Way(name, lambda: time.sleep(0.0005), lambda: None, lambda: None) for name in ("a", "b")]
    times = clock.time_all(ways, beside=["b"])
    assert times["a"].under == times["a"].slowdown == []
    assert set(beside) == {"b"}
    assert len(times["a"].alone) == len(times["b"].alone) == 5
    beside.clear()
    assert clock.time_all(ways, beside=())["b"].beside == 0
    assert beside == []


def test_policies_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cta_policy", lambda group, device: "zero")
    with pytest.raises(SymmMemError, match="found: zero for symmetric memory, zero for plain NCCL"):
        launch._check_policies(World(0, 2, CPU, None, None))  # type: ignore[arg-type]  # for what needs no group


# --- profiles ----------------------------------------------------------------------------------------------


def test_a_profile_is_split_by_step() -> None:
    from fsdp_symm.bench.profiling import split
    from fsdp_symm.trace.model import DeviceRow, Step, Trace

    def row(what: Any, name: str, start: float, nbytes: int | None = None, blocks: int | None = None) -> DeviceRow:
        grid = None if blocks is None else (blocks, 1, 1)
        return DeviceRow(what, name, 0, "7", start, start + 10.0, None, None, 0, nbytes, grid, None)

    trace = Trace("t", num_sms=100, steps=[Step(0, 0.0, 100.0), Step(1, 100.0, 200.0)])
    trace.device_rows = [
        row("copy", "Memcpy DtoD (Device -> Device)", 5.0, 2**20),
        row("copy", "Memcpy DtoD (Device -> Device)", 20.0, 4),
        row("kernel", "_sum_kernel", 40.0, blocks=5000),
        row("copy", "Memcpy DtoD (Device -> Device)", 105.0, 4),
        row("kernel", "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16", 120.0, blocks=16),
    ]
    trace.device_rows.append(row("copy", "Memcpy DtoH (Device -> Pageable)", 140.0, 8))
    runtime = [(10.0, "cudaLaunchKernel"), (141.0, "cudaStreamSynchronize"), (150.0, "cudaEventSynchronize")]
    runtime += [(160.0, "cudaDeviceSynchronize"), (260.0, "cudaStreamSynchronize")]  # the step's own end, and outside
    for start, name in runtime:
        trace.launches.start_us.append(start)
        trace.launches.name.append(name)
    ways = [Way(name, lambda: None, lambda: None, lambda: None) for name in ("pulls", "symmetric")]
    seen = split(trace, ways)
    pulls = {"engine": "copy engine", "sm_us": round(1000 / 3, 1), "kernels": 0.33, "host_reads": 0.0}
    assert seen["pulls"].columns() == pulls | {"host_waits": 0.0}
    kernel = {"engine": "symmetric kernel", "sm_us": round(160 / 3, 1), "kernels": 0.33, "host_reads": 0.33}
    assert seen["symmetric"].columns() == kernel | {"host_waits": 0.67}
    with pytest.raises(SymmMemError, match="one step a way"):
        split(trace, ways[:1])


# --- ranks -------------------------------------------------------------------------------------------------


def _fail(world: World, _: None) -> None:
    if world.rank == 1:
        raise ValueError("a [word] of rank 1")
    time.sleep(0.2)


def _sleep(world: World, _: None) -> None:
    time.sleep(60)


def test_a_failing_rank_speaks() -> None:
    with pytest.raises(SymmMemError, match=r"the bench: a rank failed; its own words:[\s\S]*a \[word\] of rank 1"):
        run_ranks(_fail, None, ranks=2, device_type="cpu", what="the bench")


def test_ranks_that_do_not_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUN_TIMEOUT_S", 5.0)
    start = time.monotonic()
    with pytest.raises(SymmMemTimeoutError, match="still running after 5 s"):
        run_ranks(_sleep, None, ranks=2, device_type="cpu", what="the bench")
    assert time.monotonic() - start < 30
