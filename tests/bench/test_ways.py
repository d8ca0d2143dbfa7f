"""The benchmarks of ways, run over gloo and shared memory: results are checked, lines and tables are complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.bench import reduce_scatter, schema, unshard, way_tables
from fsdp_symm.bench.launch import World, run_ranks
from fsdp_symm.bench.profiling import Seen
from fsdp_symm.bench.reduce_scatter import ReduceBench, Result, Task
from fsdp_symm.bench.timing import Timed, Way, check
from fsdp_symm.bench.unshard import Arenas, UnshardBench, make_ways
from fsdp_symm.bench.unshard_block import BlockShards, Parameters
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemError, SymmMemUnavailableError

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


def _inside(line: dict[str, Any], name: str) -> bool:
    return 0 < line[f"{name}_min"] <= line[name] <= line[f"{name}_max"]


def test_unshard_measures_every_way(tmp_path: Path) -> None:
    lines = unshard.measure(UnshardBench(2, (0.25, 2), "the command", tmp_path / "traces", "cpu"))
    assert {p.name for p in (tmp_path / "traces").iterdir()} == {f"unshard_w2_{mib}mib.json.gz" for mib in (0, 2)}
    assert [x["variant"] for x in lines] == [unshard.DIRECT, unshard.PLAIN, unshard.NCCL, unshard.STAGED] * 2
    for x in lines:
        assert 0 < x["min_us"] <= x["median_us"] <= x["max_us"]
        assert (x["parameters"], x["n"], x["command"]) == (9, 5, "the command")
        measured = ("vs_direct", "exchange_us", "exchange_vs_direct", "place_us", "place_vs_direct")
        assert all(_inside(x, name) for name in (*measured, "host_us", "exchange_host_us", "place_host_us"))
        assert x["gb_per_s"] == pytest.approx(x["bytes"] / x["exchange_us"] / 1e3, abs=0.1)
        is_direct = x["variant"] == unshard.DIRECT
        assert (x["vs_direct"] == x["exchange_vs_direct"] == x["place_vs_direct"] == 1.0) == is_direct
        assert (x["exchange_us"], x["exchange_host_us"]) != (x["place_us"], x["place_host_us"]) or is_direct
        assert {"place_under_gemm_us_max", "place_gemm_slowdown_pct_min"} < set(x)
    direct = lines[0]
    assert all(
        direct[f"exchange_{part}"] == direct[f"place_{part}"] for part in ("us", "us_min", "host_us", "vs_direct")
    )
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


def _half_placed(world: World, _: None) -> list[str]:
    """A placing without its all-gather, and one without its copy-out."""
    shards = BlockShards.scaled(2**18, world.size)
    whole = torch.empty(shards.nbytes * world.size // 2, dtype=torch.bfloat16)
    parameters, errors = Parameters(world, shards), []
    take = unshard.take_from_group(world, world.plain, whole)
    for halved in ("gather", "copy"):
        used = take if halved == "copy" else lambda: (whole, lambda: None)
        staged = unshard.Staged(world, shards, parameters, used, 1)
        *_, placing = staged.ways("way")
        run = placing.run if halved == "gather" else take()[1]
        check(world, [unshard.Staged(world, shards, parameters, take, 1).ways("right")[2]], "unshard")
        with pytest.raises(SymmMemError) as error:
            check(world, [replace(placing, run=run)], "unshard")
        errors.append(str(error.value))
    return errors


def test_a_placing_needs_its_all_gather_and_its_copy_out() -> None:
    gather, copy = run_ranks(_half_placed, None, ranks=2, device_type="cpu", what="test")
    assert "unshard by way, placing: a wrong result on ranks [0, 1]" in gather
    assert "parameter 0, shard of rank 1" in gather  # its own chunk lies where it should
    assert "parameter 0, shard of rank 0" in copy


class _Script:
    """A clock that times nothing."""

    product_us = 7.0

    def time_all(self, ways: list[Way], beside: list[str]) -> dict[str, Timed]:
        us = {way.name: [float(2 + index)] for index, way in enumerate(ways)}
        return {
            name: Timed(some, [9.0], *([[some[0] * 10], [5.0]] if name in beside else [])) for name, some in us.items()
        }


def test_whole_and_placing_run_beside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["direct", "direct, exchange", "staged", "staged, exchange", "staged, placing"]
    ways = [Way(name, lambda: None, lambda: None, lambda: None) for name in names]
    monkeypatch.setattr(unshard, "make_ways", lambda *_: ways)
    monkeypatch.setattr(unshard, "check", lambda *_: None)
    monkeypatch.setattr(unshard, "profile_ways", lambda *_: dict.fromkeys(names, Seen()))
    shards = BlockShards.scaled(2**18, 2)
    bench = UnshardBench(2, (0.25,), device_type="cpu")
    direct, staged = unshard._measure_size(_alone(), _Script(), bench, shards, None)  # type: ignore[arg-type]
    assert [direct[name] for name in ("median_us", "exchange_us", "place_us", "place_vs_direct")] == [
        2.0,
        3.0,
        3.0,
        1.0,
    ]
    assert [staged[name] for name in ("median_us", "exchange_us", "place_us", "place_vs_direct")] == [
        4.0,
        5.0,
        6.0,
        2.0,
    ]
    assert [x["under_gemm_us"] for x in (direct, staged)] == [20.0, 40.0]
    assert [x["place_under_gemm_us"] for x in (direct, staged)] == [30.0, 60.0]
    assert [x["place_gemm_slowdown_pct"] for x in (direct, staged)] == [5.0, 5.0]
    assert staged["exchange_vs_direct"] == round(5 / 3, 3)


def test_unshard_finds_wrong_bytes() -> None:
    nothing, swapped, *idle = run_ranks(_swapped, None, ranks=3, device_type="cpu", what="test")
    assert "unshard by nothing: a wrong result on ranks [0, 1, 2]; nothing was timed" in nothing
    assert "parameter 0, shard of rank 0" in nothing
    assert "a wrong result on ranks [2]" in swapped
    assert "a right result on this rank" in swapped
    names = ["direct", "direct, exchange"]
    staged = ("plain NCCL", "NCCL window", "staged")
    names += [f"{way}{part}" for way in staged for part in ("", ", exchange", ", placing")]
    assert len(idle) == len(names)
    for name, text in zip(names, idle, strict=True):
        assert f"unshard by {name}: a wrong result on ranks [0, 1, 2]" in text
        own_is_left = name == "direct, exchange"
        peers_only = "parameter 0, shard of rank 1" if own_is_left else "rank"
        assert peers_only in text


# --- reduce-scatter ----------------------------------------------------------------------------------------


def test_reduce_scatter_measures_every_way(tmp_path: Path) -> None:
    lines = reduce_scatter.measure(ReduceBench(2, (0.25,), (), "the command", tmp_path / "traces", "cpu"))
    kinds = {"float32": 2**18, "bfloat16": 2**18, "bfloat16 in float32": 2**17}
    found = [(x["dtype"], x["op"], x["variant"]) for x in lines]
    ways = (("SUM", "host"), ("SUM", "plain NCCL"), ("AVG", "host"))
    assert found == [(kind, *way) for kind in kinds for way in ways]
    for x in lines:
        assert x["bytes"] == 2**18
        assert x["wire_bytes"] == (kinds[x["dtype"]] if x["variant"] == "host" else 2**18)
        assert x["gb_per_s"] == pytest.approx(x["wire_bytes"] / x["median_us"] / 1e3, abs=0.06)
        assert x["vs_symmetric"] > 0
        assert x["usual"] == (x["variant"] == "host")
    schema.write_lines(tmp_path / "r.csv", lines)
    assert len(schema.read(tmp_path / "r.csv")) == len(lines)
    assert (tmp_path / "traces/reduce_scatter_w2_0mib_bfloat16_in_float32_avg.json.gz").exists()


class _Pulling:
    """A wire that notes what it was told to do, and with what."""

    def __init__(self, engine: str = "copy_engine", widens: bool = True) -> None:
        self.reduce_scatter_way = "auto"
        self.engine, self.can_widen = engine, widens
        self.calls: list[tuple[str, int | None, torch.dtype]] = []
        self.fails = False

    @property
    def widens(self) -> bool:
        return self.can_widen and self.reduce_scatter_way == "copy_engine"

    def reduce_engine(self, input_: torch.Tensor, op: object) -> str:
        return self.engine if self.reduce_scatter_way == "copy_engine" else "nccl"

    def reduce_scatter(self, output: torch.Tensor, input_: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        from fsdp_symm.wire import pull_reduce

        assert input_.numel() == 2 * output.numel()
        self.input = input_
        self.calls.append((self.reduce_scatter_way, pull_reduce.PIECE_BYTES, input_.dtype))
        if self.fails:
            raise KeyboardInterrupt


class _Slots:
    """An arena of ordinary memory with a wire that notes."""

    group = type("G", (), {"size": staticmethod(lambda: 2)})

    def __init__(self, group: object = None, rings: Any = (), **more: Any) -> None:
        self.wire = _Pulling()
        self._memory = torch.zeros(rings[0].slot_bytes if rings else 2**20, dtype=torch.uint8)

    def acquire(self, role: str, nbytes: int, *, owner: str) -> torch.Tensor:
        return self._memory[:nbytes]

    def acquire_lease(self, role: str, nbytes: int, *, owner: str) -> tuple[torch.Tensor, None]:
        return self._memory[:nbytes], None

    def next_epoch(self, lease: None) -> int:
        return 1


def test_pieces_of_any_size_run_on_the_arena_s_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_symm.wire import pull_reduce

    arena = _Slots()
    wire = arena.wire
    monkeypatch.setattr(reduce_scatter, "wire_of", lambda arena: arena.wire)
    monkeypatch.setattr(pull_reduce, "PIECE_BYTES", 77)  # whatever it was comes back, and does not pass for the rule
    pieces = reduce_scatter._Pieces(arena)  # type: ignore[arg-type]
    task, output = Task(1024, torch.float32, "SUM"), torch.empty(1024)
    pieces.check(task, _alone())
    pieces.run(2, task, output)
    pieces.run(None, task, output)
    wire.fails = True
    with pytest.raises(KeyboardInterrupt):
        pieces.run(0.5, task, output)
    assert wire.calls == [("copy_engine", piece, torch.float32) for piece in (2 << 20, None, 1 << 19)]
    assert (wire.reduce_scatter_way, pull_reduce.PIECE_BYTES) == ("auto", 77)

    wire.can_widen = False
    pieces.check(task, _alone())
    with pytest.raises(SymmMemUnavailableError, match=r"bfloat16 in float32 a rank [\s\S]*a wire that does not widen"):
        pieces.check(Task(1024, torch.float32, "AVG", torch.bfloat16), _alone())
    wire.engine = "nccl"
    with pytest.raises(SymmMemUnavailableError, match="it would run on nccl"):
        pieces.check(task, _alone())
    assert wire.reduce_scatter_way == "auto"


class _AsOnGpus(World):
    """A rank that takes the way of GPUs, and meets nobody."""

    on_gpu = True  # type: ignore[assignment]

    def meet(self) -> None:
        pass


def test_every_way_on_gpus_gets_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: list[torch.Tensor] = []
    monkeypatch.setattr(reduce_scatter, "SymmMemArena", _Slots)
    monkeypatch.setattr(reduce_scatter, "wire_of", lambda arena: arena.wire)
    monkeypatch.setattr(reduce_scatter, "_plain", lambda group, output, whole, op: plain.append(whole))
    world = _AsOnGpus(0, 2, CPU, None, None)  # type: ignore[arg-type]
    machinery = reduce_scatter.Machinery(world, 2**14, (0.5,))
    for dtype, gradients in reduce_scatter.KINDS:
        task = Task(4096 // dtype.itemsize, dtype, "AVG", gradients)
        symmetric, nccl, *pulls = ways = machinery.make_ways(task)
        assert [way.name for way in ways] == [
            "symmetric kernel",
            "plain NCCL",
            *map(reduce_scatter.pulls_name, (None, 0.5)),
        ]
        assert ways[2].name == "copy engine"
        numbers = torch.cat([task.chunk(0, receiver, CPU) for receiver in range(2)])
        assert numbers.dtype == gradients
        (first, second), index = machinery._arenas, int(dtype != gradients)
        for way, arena, told in zip(
            (symmetric, *pulls),
            (first, machinery._arenas[index], machinery._arenas[index]),
            (("nccl", None, dtype), ("copy_engine", None, gradients), ("copy_engine", 1 << 19, gradients)),
            strict=True,
        ):
            way.run()
            assert arena.wire.calls[-1] == told
            assert torch.equal(arena.wire.input, numbers.to(told[2]))
        nccl.run()
        assert torch.equal(plain[-1], numbers.to(dtype))
        assert plain[-1].dtype == dtype
        sizes = [task.wire_nbytes(way.name) for way in ways]
        assert sizes == [4096, 4096, *[4096 * gradients.itemsize // dtype.itemsize] * 2]
    assert first.wire.reduce_scatter_way == "nccl"
    assert len(second.wire.calls) == 2


@pytest.mark.parametrize(("dtype", "gradients"), reduce_scatter.KINDS)
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_tolerance_knows_another_order_from_a_lost_rank(
    dtype: torch.dtype, gradients: torch.dtype, op: str, size: int
) -> None:
    task, world = Task(4096, dtype, op, gradients), _alone(1, size)
    result = Result(task, world)
    scale = size if op == "AVG" else 1
    chunks = [task.chunk(sender, 1, CPU).to(dtype) for sender in range(size)]

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
