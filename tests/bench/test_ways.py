"""The benchmarks of ways, run over gloo and shared memory: results are checked, lines and tables are complete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.bench import launch, reduce_scatter, schema, unshard, way_tables
from fsdp_symm.bench.launch import World, run_ranks
from fsdp_symm.bench.reduce_scatter import ReduceBench, Result, Task
from fsdp_symm.bench.timing import Beside, Clock, Timed, Way, check, covered, ratios, spread
from fsdp_symm.bench.unshard import Arenas, UnshardBench, make_ways
from fsdp_symm.bench.unshard_block import BlockShards, Parameters
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError, SymmMemUnavailableError

CPU = torch.device("cpu")


def _alone(rank: int = 0, size: int = 2) -> World:
    return World(rank, size, CPU, None, None)  # type: ignore[arg-type]  # for what needs no group


# --- unshard -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("mib", [8, 32, 64, 128, 256])
def test_a_scaled_block_has_the_wanted_bytes(world_size: int, mib: int) -> None:
    shards = BlockShards.scaled(mib * 2**20, world_size)
    assert len(shards.numels) == 9
    assert shards.nbytes == pytest.approx(mib * 2**20, rel=0.01)
    q, k, v, o, gate, up, down, norm, _ = shards.numels
    assert q == o == 4 * k == 4 * v
    assert gate == up == down
    assert norm * norm * world_size == q  # [D / W] and [D / W, D]
    assert 3 < gate / q < 4.1
    assert [b.nbytes for b in shards.plan(0).by_peer[1]] == [2 * n for n in shards.numels]


def test_unshard_measures_every_way(tmp_path: Path) -> None:
    lines = unshard.measure(UnshardBench(2, (0.25, 2), "the command", tmp_path / "traces", "cpu"))
    assert {p.name for p in (tmp_path / "traces").iterdir()} == {f"unshard_w2_{mib}mib.json.gz" for mib in (0, 2)}
    assert [x["variant"] for x in lines] == [unshard.DIRECT, unshard.PLAIN, unshard.NCCL, unshard.STAGED] * 2
    for x in lines:
        assert 0 < x["min_us"] <= x["median_us"] <= x["max_us"]
        assert x["vs_direct_min"] <= x["vs_direct"] <= x["vs_direct_max"]
        assert x["host_us"] > 0
        assert (x["parameters"], x["n"], x["command"]) == (9, 5, "the command")
        assert 0 < x["exchange_us_min"] <= x["exchange_us"] <= x["exchange_us_max"]
        assert x["exchange_host_us"] > 0
        assert x["exchange_vs_direct_min"] <= x["exchange_vs_direct"] <= x["exchange_vs_direct_max"]
        assert x["gb_per_s"] == pytest.approx(x["bytes"] / x["exchange_us"] / 1e3, abs=0.1)
        assert (x["vs_direct"] == x["exchange_vs_direct"] == 1.0) == (x["variant"] == unshard.DIRECT)
    path = tmp_path / "unshard.csv"
    schema.write_lines(path, lines)
    assert [r.variant for r in schema.read(path)] == [x["variant"] for x in lines]
    assert way_tables.unshard_table(schema.read_lines(path)) == way_tables.unshard_table(lines)


def test_shards_are_rounded_on_their_way() -> None:
    shards = BlockShards.scaled(2**18, 2)
    for index in range(9):
        master, shard = shards.master(1, index, CPU), shards.shard(1, index, CPU)
        assert (master.dtype, shard.dtype) == (torch.float32, torch.bfloat16)
        assert not torch.equal(master, shard.float())  # a copy of bits would be found out
        assert not torch.equal(shard, shards.shard(0, index, CPU))


def _swapped(world: World, _: None) -> list[str]:
    """Every way is right; one that does nothing, and one whose last rank has two shards exchanged, are found out."""
    shards = BlockShards.scaled(2**18, world.size)
    arenas = Arenas(world, shards)
    ways = make_ways(world, shards, arenas)
    check(world, ways, "unshard")
    parameters = Parameters(world, shards)

    def swap() -> None:
        for index, target in enumerate(parameters.targets):
            for rank, row in enumerate(target.view(world.size, -1)):
                source = (rank + 1) % world.size if index == 4 and world.rank == world.size - 1 else rank
                row.copy_(shards.shard(source, index, world.device))

    wrong = [parameters.way("nothing", lambda: None), parameters.way("swapped", swap)]
    # the real ways, but without their work: every one of them must be found out by its own check
    wrong += [Way(way.name, lambda: None, way.wrong, way.poison) for way in ways]
    errors = []
    for way in wrong:
        with pytest.raises(SymmMemError) as error:
            check(world, [way], "unshard")
        errors.append(str(error.value))
    del ways
    arenas.close()
    return errors


def test_unshard_finds_wrong_bytes() -> None:
    nothing, swapped, *idle = run_ranks(_swapped, None, ranks=3, device_type="cpu", what="test")
    assert "unshard by nothing: a wrong result on ranks [0, 1, 2]; nothing was timed" in nothing
    assert "parameter 0, shard of rank 0" in nothing
    assert "a wrong result on ranks [2]" in swapped
    assert "a right result on this rank" in swapped
    names = [f"{way}{part}" for way in ("direct", "plain NCCL", "NCCL window", "staged") for part in ("", ", exchange")]
    assert len(idle) == len(names)
    for name, text in zip(names, idle, strict=True):
        assert f"unshard by {name}: a wrong result on ranks [0, 1, 2]" in text
        own_is_left = name == "direct, exchange"
        peers_only = "parameter 0, shard of rank 1" if own_is_left else "rank"
        assert peers_only in text


# --- reduce-scatter ----------------------------------------------------------------------------------------


def test_reduce_scatter_measures_every_way(tmp_path: Path) -> None:
    lines = reduce_scatter.measure(ReduceBench(2, (0.25,), (2.0,), "the command", None, "cpu"))
    assert {(x["dtype"], x["op"]) for x in lines} == {(d, o) for d in ("float32", "bfloat16") for o in ("SUM", "AVG")}
    assert {x["bytes"] for x in lines} == {2**18}
    for x in lines:
        assert x["vs_symmetric"] > 0
        assert x["usual"] == (x["variant"] == "host")
    schema.write_lines(tmp_path / "r.csv", lines)
    assert len(schema.read(tmp_path / "r.csv")) == len(lines)


class _Pulling:
    """A wire that notes what it was told to do."""

    def __init__(self, engine: str) -> None:
        self.reduce_scatter_way = "nccl"
        self.engine = engine
        self.calls: list[tuple[str, int]] = []

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        return self.engine if self.reduce_scatter_way == "copy_engine" else "nccl"

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> None:
        from fsdp_symm.wire import pull_reduce

        self.calls.append((self.reduce_scatter_way, pull_reduce.PIECE_BYTES))
        if len(self.calls) == 3:
            raise KeyboardInterrupt


class _Slots:
    """An arena that hands out ordinary memory."""

    group = type("G", (), {"size": staticmethod(lambda: 2)})

    def acquire_lease(self, role: str, nbytes: int, *, owner: str) -> tuple[torch.Tensor, None]:
        return torch.empty(nbytes, dtype=torch.uint8), None

    def next_epoch(self, lease: None) -> int:
        return 1


def test_pieces_of_any_size_run_on_the_arena_s_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_symm.wire import pull_reduce

    usual, wire = pull_reduce.PIECE_BYTES, _Pulling("copy_engine")
    monkeypatch.setattr(reduce_scatter, "wire_of", lambda arena: wire)
    pieces = reduce_scatter._Pieces(_Slots())  # type: ignore[arg-type]
    task, output = Task(1024, torch.float32, "SUM"), torch.empty(1024)
    pieces.check(task, output)
    pieces.run(2, task, output)
    pieces.run(0.5, task, output)
    with pytest.raises(KeyboardInterrupt):
        pieces.run(8, task, output)
    assert wire.calls == [("copy_engine", 2 << 20), ("copy_engine", 1 << 19), ("copy_engine", 8 << 20)]
    assert (wire.reduce_scatter_way, pull_reduce.PIECE_BYTES) == ("nccl", usual)
    assert pieces.usual == reduce_scatter.pulls_name(usual / 2**20)

    wire.engine = "nccl"
    with pytest.raises(SymmMemUnavailableError, match="it would run on nccl"):
        pieces.check(task, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_tolerance_knows_another_order_from_a_lost_rank(dtype: torch.dtype, op: str, size: int) -> None:
    task, world = Task(4096, dtype, op), _alone(1, size)
    result = Result(task, world)
    scale = size if op == "AVG" else 1
    chunks = [task.chunk(sender, 1, CPU) for sender in range(size)]

    backwards = chunks[-1].clone()  # rounded after every addition
    for chunk in chunks[-2::-1]:
        backwards += chunk
    result.output.copy_(backwards / scale)
    assert result.wrong_values() is None
    if (dtype, size) == (torch.bfloat16, 4):
        assert "differ in their bits" in (result.wrong_bits() or "")

    result.output.copy_(task.reference(world))
    assert result.wrong_bits() is None
    result.output.copy_((backwards - chunks[0]) / scale)
    assert "an element is" in (result.wrong_values() or "")
    result.poison()
    assert "an element is nan off" in (result.wrong_values() or "")
    assert "4096 of 4096 elements differ" in (result.wrong_bits() or "")


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
        launch._check_policies(_alone())


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


# --- commands ----------------------------------------------------------------------------------------------

BAD = {
    "ranks": (["unshard", "--ranks", "1"], "--ranks: found 1, expected at least 2"),
    "mib": (["unshard", "--mib", "8,x"], "--mib: found 8,x, expected different MiB from 0.125 to 4096"),
    "small": (["unshard", "--mib", "0.1"], "--mib: found 0.1, expected"),
    "odd": (["reduce-scatter", "--mib", "1.0001"], "--mib: found 1.0001, expected"),
    "twice": (["reduce-scatter", "--mib", "8,8"], "--mib: found 8,8, expected different MiB"),
    "pieces": (["reduce-scatter", "--pieces", "0"], "--pieces: found 0, expected"),
    "empty": (["reduce-scatter", "--pieces", ""], "--pieces: found , expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_way_arguments(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments, text = BAD[name]
    path = tmp_path / "x.csv"
    assert main(["bench", *arguments, "--csv", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fsdp-symm bench {arguments[0]}: {text}")
    assert "fix: --" in error
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("bench", ["unshard", "reduce-scatter"])
def test_ways_need_a_gpu(bench: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", bench, "--csv", str(tmp_path / "x.csv")]) == 2
    assert f"bench {bench}: found no GPU, expected one or more" in capsys.readouterr().err
