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
from fsdp_symm.bench.timing import Clock, Timed, Way, check, covered, ratios, spread
from fsdp_symm.bench.unshard import Arenas, BlockShards, Parameters, UnshardBench, make_ways
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError

CPU = torch.device("cpu")
ROW = {"versions": "v", "hardware": "h", "command": "c", "n": 5, "ranks": 2}


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
        assert (x["host_pull_us"] != "") == (x["variant"] == unshard.DIRECT)
    path = tmp_path / "unshard.csv"
    schema.write_lines(path, lines)
    assert [r.variant for r in schema.read(path)] == [x["variant"] for x in lines]
    assert way_tables.unshard_table(schema.read_lines(path)) == way_tables.unshard_table(lines)


def _swapped(world: World, _: None) -> list[str]:
    """Every way is right; one that does nothing, and one whose last rank has two shards exchanged, are found out."""
    shards = BlockShards.scaled(2**18, world.size)
    arenas = Arenas(world, shards)
    ways = make_ways(world, shards, arenas, [])
    check(world, ways, "unshard")
    parameters = Parameters(world, shards)
    wrong = parameters.way("nothing", lambda: None)
    errors = []
    with pytest.raises(SymmMemError) as error:
        check(world, [wrong], "unshard")
    errors.append(str(error.value))

    def swap() -> None:
        for index, target in enumerate(parameters.targets):
            for rank, row in enumerate(target.view(world.size, -1)):
                source = (rank + 1) % world.size if index == 4 and world.rank == world.size - 1 else rank
                row.copy_(shards.shard(source, index, world.device))

    with pytest.raises(SymmMemError) as error:
        check(world, [parameters.way("swapped", swap)], "unshard")
    errors.append(str(error.value))
    del ways
    arenas.close()
    return errors


def test_unshard_finds_wrong_bytes() -> None:
    nothing, swapped = run_ranks(_swapped, None, ranks=3, device_type="cpu", what="test")
    assert "unshard by nothing: a wrong result on ranks [0, 1, 2]; nothing was timed" in nothing
    assert "parameter 0, shard of rank 0" in nothing
    assert "a wrong result on ranks [2]" in swapped
    assert "a right result on this rank" in swapped


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

    def _queue_beside(self, way: Way, beside: int, head: int) -> Any:
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
    assert timed.under == [90.0]  # of groups of one call: 110 and 70; the third is beside nothing

    clock.script = (0.0, [(0.0, 10.0)], [(50.0, 60.0)])
    clock._beside(way, timed, [100.0, 96.0])
    assert len(timed.slowdown) == len(timed.under) == 1


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
    ways = [Way(name, lambda: None, lambda: None, lambda: None) for name in ("pulls", "symmetric")]
    seen = split(trace, ways)
    assert seen["pulls"].columns() == {"engine": "copy engine", "sm_us": round(1000 / 3, 1), "kernels": 0.33}
    assert seen["symmetric"].columns() == {"engine": "symmetric kernel", "sm_us": round(160 / 3, 1), "kernels": 0.33}
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


def test_a_command_writes_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[UnshardBench] = []

    def measured(bench: UnshardBench) -> list[dict[str, Any]]:
        asked.append(bench)
        return [_unshard_line("direct", 1000.0)]

    monkeypatch.setattr(unshard, "measure", measured)
    path = tmp_path / "deep" / "u.csv"
    assert main(["bench", "unshard", "--csv", str(path), "--ranks", "4", "--mib", "8,64"]) == 0
    assert (asked[0].ranks, asked[0].mib) == (4, (8.0, 64.0))
    assert asked[0].command == f"fsdp-symm bench unshard --csv {path} --ranks 4 --mib 8,64"
    assert schema.read(path)[0].variant == "direct"
    assert "| 128 MiB | direct |" in capsys.readouterr().out


# --- tables ------------------------------------------------------------------------------------------------


def _unshard_line(variant: str, us: float, **more: Any) -> dict[str, Any]:
    line = ROW | {"name": "unshard", "variant": variant, "bytes": 128 << 20, "dtype": "bfloat16", "parameters": 9}
    line |= {"median_us": us, "min_us": us - 1, "max_us": us + 1, "gb_per_s": 350.4, "engine": "", "sm_us": ""}
    line |= {"host_pull_us": 31.2} | spread("host_us", [38.4, 36.0, 41.0], 1) | spread("vs_direct", [us / 1000], 3)
    return line | spread("under_gemm_us", [], 1) | spread("gemm_slowdown_pct", [1.5, -0.25, 2.0], 2) | more


def test_unshard_table() -> None:
    lines = [_unshard_line("direct", 1000.0, engine="copy engine", sm_us=0.0)]
    lines += [_unshard_line("NCCL window", 3200.0, gemm_slowdown_pct="", host_pull_us="")]
    _, _, first, second, _, *notes = way_tables.unshard_table(lines).splitlines()
    assert first == (
        "| 128 MiB | direct | copy engine | 1.000 (0.999-1.001) | 350 | 1.00 (1.00-1.00) | 38 (36-41) | 31 | - "
        "| 1.5 % (-0.2 to 2.0) | 0.00 |"
    )
    assert second == (
        "| 128 MiB | NCCL window | - | 3.200 (3.199-3.201) | 350 | 3.20 (3.20-3.20) | 38 (36-41) | - | - | - | - |"
    )
    assert notes[0].startswith("9 parameters")
    assert notes[1] == "2 ranks on h; v; `c`."


def _reduce_lines() -> list[dict[str, Any]]:
    lines = []
    times = {"symmetric kernel": 2000.0, "plain NCCL": 4000.0}
    times |= {"copy engine, 2 MiB pieces": 1500.0, "copy engine, 8 MiB pieces": 1000.0}
    for op in ("SUM", "AVG"):
        for variant, us in times.items():
            line = ROW | {"name": "reduce_scatter", "variant": variant, "bytes": 64 << 20, "dtype": "float32", "op": op}
            line |= {"median_us": us, "min_us": us, "max_us": us, "usual": int(variant.endswith("8 MiB pieces"))}
            line |= spread("host_us", [50.0], 1) | spread("vs_symmetric", [us / 2000], 3) | {"engine": "copy engine"}
            line |= spread("under_gemm_us", [us], 1) | spread("gemm_slowdown_pct", [us / 1000], 2) | {"sm_us": us}
            lines.append(line)
    return lines


def test_reduce_tables() -> None:
    lines = _reduce_lines()
    _, _, first, second, _, note, _ = way_tables.reduce_table(lines).splitlines()
    assert first.startswith(
        "| 64 MiB | float32 | SUM | 4.000 | 2.000 (2.000-2.000) | 1.000 (1.000-1.000) | 0.50 (0.50-0.50) "
        "| 4.000, 2.000, 1.000 | 4.0 % (4.0 to 4.0), 2.0 % (2.0 to 2.0), 1.0 % (1.0 to 1.0) | 4.00, 2.00, 1.00 |"
    )
    assert "| AVG |" in second
    assert "copy engine, 8 MiB pieces" in note
    header, _, row, *_ = way_tables.pieces_table(lines).splitlines()
    assert header == "| chunk of a rank | dtype | 2 MiB pieces, ms | 8 MiB pieces, ms |"
    assert row == "| 64 MiB | float32 | 1.500 (1.500-1.500) | 1.000 (1.000-1.000) |"
    for line in lines:
        line["usual"] = 0
    assert "| 1.500 (1.500-1.500) | 0.75 " in way_tables.reduce_table(lines)
