"""``fsdp-symm bench experts`` as a user types it, and what its tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.bench import expert_tables, experts, schema
from fsdp_symm.bench.experts import ExpertsBench
from fsdp_symm.cli import main

# --- commands ----------------------------------------------------------------------------------------------

BAD = {
    "ranks": (["--ranks", "1"], "--ranks: found 1, expected at least 2"),
    "text": (
        ["--experts", "8"],
        "--experts: found 8, expected different EXPERTSxTOPK with experts that 2 ranks divide",
    ),
    "odd": (["--experts", "9x2"], "--experts: found 9x2, expected"),
    "topk": (["--experts", "8x9"], "--experts: found 8x9, expected"),
    "twice": (["--experts", "8x2,8x2"], "--experts: found 8x2,8x2, expected"),
    "tokens": (["--tokens", "0"], "--tokens: found 0, expected different multiples of 1, fix: --tokens 4096"),
    "hidden": (["--hidden", "12"], "--hidden: found 12, expected different multiples of 8, fix: --hidden 2048"),
    "rounds": (["--rounds", "2"], "--rounds: found 2, expected 3 to 100"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments, text = BAD[name]
    assert main(["bench", "experts", *arguments, "--csv", str(tmp_path / "x.csv")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fsdp-symm bench experts: {text}")
    assert "fix: --" in error
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_gpu_that_is_asked_for_must_be_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "experts", "--csv", str(tmp_path / "x.csv"), "--device", "cuda"]) == 2
    assert "bench experts: found no GPU" in capsys.readouterr().err


def test_the_command_measures_what_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[ExpertsBench] = []
    monkeypatch.setattr(experts, "measure", lambda bench: asked.append(bench) or _lines())
    path = tmp_path / "e.csv"
    more = ["--device", "cpu", "--experts", "8x2", "--tokens", "64,128", "--hidden", "16", "--ranks", "4"]
    assert main(["bench", "experts", "--csv", str(path), *more, "--rounds", "7"]) == 0
    command = f"fsdp-symm bench experts --csv {path} --ranks 4 --device cpu --experts 8x2 --tokens 64,128 --hidden 16"
    assert asked == [ExpertsBench(4, ((8, 2),), (64, 128), (16,), f"{command} --rounds 7", None, 7, "cpu")]
    out = capsys.readouterr().out
    assert "**loses**" in out
    assert "MiB from peers" in out
    assert len(schema.read(path)) == len(_lines())


# --- tables ------------------------------------------------------------------------------------------------


def _lines(**ratios: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Lines of one layer; ratios to copy_engine as median, min, max."""
    ratios = {"all_to_all": (0.5, 0.4, 0.8), "copy_engine_exact": (0.9, 0.8, 1.1)} | ratios
    lines = []
    for name in ("experts_combine", "experts_forward_backward"):
        for variant, (middle, low, high) in {"copy_engine": (1.0, 1.0, 1.0), **ratios}.items():
            line = {"name": name, "variant": variant, "ranks": 2, "bytes": 2**20, "dtype": "bfloat16", "n": 5}
            line |= {"median_us": 2000 * middle, "min_us": 1000 * middle, "max_us": 3000 * middle}
            line |= {"versions": "v", "hardware": "h", "command": "c", "routing": "skewed"}
            line |= {"experts": 8, "topk": 2, "tokens": 64, "hidden": 16, "auto": int(variant == "copy_engine")}
            line |= {"vs_copy_engine": middle, "vs_copy_engine_min": low, "vs_copy_engine_max": high}
            line |= {"under_gemm_us": 2500.0, "gemm_slowdown_pct": "", "engine": "copy engine", "sm_us": 1234.0}
            line |= {"host_reads": 1.0, "host_waits": 2.0, "host_us": 77.7, "moved_bytes": 3 * 2**19}
            lines.append(line | {"peak_bytes": "", "symmetric_bytes": 2**21})
    return lines


def test_the_table_says_where_copy_engine_loses() -> None:
    header, _, first, second, _, losses, auto, where = expert_tables.experts_table(_lines()).splitlines()
    assert "| all_to_all / copy_engine (min-max) | copy_engine_exact / copy_engine (min-max) |" in header
    assert first == (
        "| 8 experts, top 2, 64 x 16 | skewed | combine | 2.000 (1.000-3.000) | 0.50 (0.40-0.80) | 0.90 (0.80-1.10) "
        "| **loses**: 2.00 (1.25-2.50) of all_to_all |"
    )
    assert "| forward + backward |" in second
    assert losses == (
        "`copy_engine` loses in 2 of 2 lines, slower in every round: 8 experts, top 2, 64 x 16, skewed, combine "
        "(to all_to_all); 8 experts, top 2, 64 x 16, skewed, forward + backward (to all_to_all)."
    )
    assert "(takes copy_engine; all_to_all / copy_engine 0.50 (0.40-0.80))" in auto
    assert where == "2 ranks on h; v; `c`."


def test_a_loss_within_the_spread_is_called_one() -> None:
    text = expert_tables.experts_table(_lines(all_to_all=(1.2, 1.1, 1.3)))
    assert "loses within the spread: 1.11 (0.91-1.25) of copy_engine_exact" in text
    assert "**loses**" not in text
    assert "loses in 0 of 2 lines, slower in every round: nowhere." in text
    assert "not in every one in 2 more" in text
    assert "for forward + backward: nowhere." in text


def test_a_clear_loss_counts_before_a_larger_one_that_is_not() -> None:
    text = expert_tables.experts_table(_lines(all_to_all=(0.5, 0.4, 1.3), copy_engine_exact=(0.8, 0.7, 0.9)))
    assert "**loses**: 1.25 (1.11-1.43) of copy_engine_exact" in text
    assert "loses in 2 of 2 lines" in text


def test_wins_and_what_static_shapes_cost() -> None:
    quick = {"copy_engine, static": (0.7, 0.6, 0.8)}  # the same transport is no loss
    text = expert_tables.experts_table(_lines(all_to_all=(1.6, 1.5, 1.7), copy_engine_exact=(1.25, 1.2, 1.3), **quick))
    assert "| 0.80 (0.77-0.83) of copy_engine_exact |" in text
    assert "loses in 0 of 2" in text
    lines = _lines(all_to_all=(1.2, 1.1, 1.3))
    for line in lines:
        line["auto"] = int(line["variant"] == "all_to_all")  # the slower one now
    assert "(takes all_to_all;" in expert_tables.experts_table(lines)


def test_what_auto_takes_where_nothing_may_be_read_is_compared_too() -> None:
    lines = _lines(all_to_all=(0.5, 0.4, 0.8), **{"copy_engine, static": (0.75, 0.7, 0.8)})
    assert "in this table, of all_to_all's time: 1.50 (8 experts, top 2, 64 x 16, skewed)." in (
        expert_tables.experts_table(lines)
    )
    assert "reads nothing on the host" not in expert_tables.experts_table(_lines())


def test_the_costs_table() -> None:
    rows = expert_tables.experts_costs_table(_lines()).splitlines()
    assert rows[2] == (
        "| 8 experts, top 2, 64 x 16 | skewed | copy_engine | 2.000 (1.000-3.000) | 2.500 | - | copy engine | 1.23 "
        "| 1, 2 | 78 | 1.5 | - + 2.0 |"
    )
    assert len([row for row in rows if "| skewed |" in row]) == 3  # forward and backward only
