"""The tables of ways, from lines as the benchmarks write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_symm.bench import reduce_scatter, schema, unshard, way_tables
from fsdp_symm.bench.reduce_scatter import ReduceBench
from fsdp_symm.bench.timing import spread
from fsdp_symm.bench.unshard import UnshardBench
from fsdp_symm.cli import main

ROW = {"versions": "v", "hardware": "h", "command": "c", "n": 5, "ranks": 2}


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
    line |= spread("exchange_us", [us / 2], 1) | spread("exchange_vs_direct", [us / 2000, us / 1000, us / 3000], 3)
    line |= {"exchange_host_us": 31.2} | spread("host_us", [38.4, 36.0, 41.0], 1) | spread("vs_direct", [us / 1000], 3)
    line |= spread("place_us", [us / 4, us / 2, us / 8], 1) | spread("place_vs_direct", [us / 400], 3)
    line |= {"place_host_us": 33.4} | spread("place_under_gemm_us", [us * 2], 1)
    line |= spread("place_gemm_slowdown_pct", [2.5, -0.25, 3.0], 2)
    return line | spread("under_gemm_us", [], 1) | spread("gemm_slowdown_pct", [1.5, -0.25, 2.0], 2) | more


def test_unshard_table() -> None:
    lines = [_unshard_line("direct", 1000.0, engine="copy engine", sm_us=0.0)]
    lines += [_unshard_line("NCCL window", 3200.0, place_gemm_slowdown_pct="")]
    _, _, first, second, _, *notes = way_tables.unshard_table(lines).splitlines()
    assert first == (
        "| 128 MiB | direct | copy engine | 1.000 (0.999-1.001) | 1.00 (1.00-1.00) | 0.250 (0.125-0.500) "
        "| 2.50 (2.50-2.50) | 2.000 | 2.5 % (-0.2 to 3.0) | 0.500 (0.500-0.500) | 0.50 (0.33-1.00) "
        "| 350 | 38, 33 | 0.00 |"
    )
    assert second == (
        "| 128 MiB | NCCL window | - | 3.200 (3.199-3.201) | 3.20 (3.20-3.20) | 0.800 (0.400-1.600) "
        "| 8.00 (8.00-8.00) | 6.400 | - | 1.600 (1.600-1.600) | 1.60 (1.07-3.20) | 350 | 38, 33 | - |"
    )
    assert notes[0].startswith("9 parameters")
    assert "copy-out in all but `direct`" in notes[0]
    assert "for `direct` the exchange itself" in notes[0]
    assert notes[1] == "2 ranks on h; v; `c`."


def _reduce_lines() -> list[dict[str, Any]]:
    """As they were before there was a rule for pieces."""
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
        "| 17, 34, 67 | 4.000, 2.000, 1.000 | 4.0 % (4.0 to 4.0), 2.0 % (2.0 to 2.0), 1.0 % (1.0 to 1.0) "
        "| 4.00, 2.00, 1.00 |"
    )
    assert "| AVG |" in second
    assert "copy engine (8 MiB pieces)" in note
    assert "in float32" not in note
    header, _, row, *_ = way_tables.pieces_table(lines).splitlines()
    assert header == "| chunk of a rank | dtype | 2 MiB pieces, ms | 8 MiB pieces, ms |"
    assert row == "| 64 MiB | float32 | 1.500 (1.500-1.500) | 1.000 (1.000-1.000) |"
    for line in lines:
        line["usual"] = 0
    assert "| 1.500 (1.500-1.500) | 0.75 " in way_tables.reduce_table(lines)


def test_reduce_tables_of_the_rule_and_of_two_types() -> None:
    names = {"copy engine, 2 MiB pieces": "copy engine"}
    rule = [x | {"variant": names.get(x["variant"], x["variant"])} for x in _reduce_lines() if x["op"] == "AVG"]
    for x in rule:
        ours = x["variant"].startswith("copy engine")
        x |= {"usual": int(x["variant"] == "copy engine"), "wire_bytes": (32 if ours else 64) << 20}
        x |= {"dtype": "bfloat16 in float32"}
    _, _, row, _, note, _ = way_tables.reduce_table(rule).splitlines()
    assert row.startswith("| 64 MiB | bfloat16 in float32 | AVG | 4.000 | 2.000 (2.000-2.000) | 1.500 (1.500-1.500) |")
    assert "| 17, 34, 22 |" in row
    assert "copy engine (pieces as the package cuts them)" in note
    assert "NCCL's ways get and send fp32" in note
    header, _, row, *_ = way_tables.pieces_table(rule).splitlines()
    assert header == "| chunk of a rank | dtype | the package's rule, ms | 8 MiB pieces, ms |"
    alone = [x for x in rule if "pieces" not in x["variant"]]
    assert way_tables.pieces_table(alone) == "Copy engines with pieces of other sizes: not measured."
    assert way_tables.reduce_table(alone).splitlines()[2] == way_tables.reduce_table(rule).splitlines()[2]


@pytest.mark.parametrize(("words", "pieces"), [([], ()), (["--pieces", "2,0.5"], (2.0, 0.5))])
def test_pieces_are_asked_for(
    words: list[str],
    pieces: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    asked: list[ReduceBench] = []
    monkeypatch.setattr(reduce_scatter, "measure", lambda bench: asked.append(bench) or _reduce_lines())
    assert main(["bench", "reduce-scatter", "--csv", str(tmp_path / "r.csv"), "--mib", "8", *words]) == 0
    assert (asked[0].mib, asked[0].pieces) == ((8.0,), pieces)
    assert ("--pieces" in asked[0].command, "equal bit by bit" in capsys.readouterr().out) == (bool(pieces),) * 2


class _Anything(dict[str, Any]):
    """A line of a training step, with a number in every column that it lacks."""

    def __missing__(self, name: str) -> float:
        return 1.0


def test_every_row_has_a_cell_for_each_header() -> None:
    step = _Anything(ROW, name="fsdp_step_d8_l1", losses="1.0", losses_within="0")
    steps = [_Anything(step, variant=variant) for variant in ("plain", "native", "direct+pulls", "floor")]
    shards = [_unshard_line(variant, 1.0) for variant in ("direct", "staged")]
    texts = [way_tables.step_table(steps), way_tables.unshard_table(shards), way_tables.reduce_table(_reduce_lines())]
    for text in [*texts, way_tables.pieces_table(_reduce_lines())]:
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) > 2
        assert len({line.count("|") for line in rows}) == 1, text
