"""The step benchmark: its arithmetic, what it reads from traces, and a run over gloo and shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_symm.bench import fsdp_step, schema, tables, way_tables
from fsdp_symm.bench.fsdp_step import StepBench, taxes, wrong_losses
from fsdp_symm.bench.step_trace import read_steps

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/trace/fixtures"
PLAIN, SYMM, DIRECT = (
    FIXTURES / f"h200_fsdp_{name}.json.gz" for name in ("plain_w2_fp32", "symm_w2_fp32", "direct_w2")
)


def test_taxes_are_taken_round_by_round() -> None:
    samples = {"native": [110.0, 230.0, 121.0], "direct": [106.0, 215.0, 112.0], "floor": [100.0, 200.0, 100.0]}
    found = taxes(samples)
    assert found["native"] == {"tax_us": 21.0, "tax_min_us": 10.0, "tax_max_us": 30.0, "tax_vs_native": 1.0}
    assert found["direct"] == {"tax_us": 12.0, "tax_min_us": 6.0, "tax_max_us": 15.0, "tax_vs_native": 0.571}
    assert found["floor"]["tax_us"] == 0.0
    del samples["native"]
    assert taxes(samples)["direct"]["tax_vs_native"] == ""


def test_losses_of_two_ranks_must_be_the_same() -> None:
    losses = {"plain": [1.0, 0.5], "native": [1.0, 0.5], "direct": [1.0, 0.5 + 1e-12], "floor": [9.0, 9.0]}
    assert wrong_losses(losses, 4) is None
    assert "direct, step 1: loss 0.500000000001 against 0.5" in (wrong_losses(losses, 2) or "")
    losses["native"][0] = 1.001
    assert "native, step 0: loss 1.001 against 1.0, expected the same within 1e-4" in (wrong_losses(losses, 4) or "")
    losses["native"][0] = float("nan")
    assert wrong_losses(losses, 4) is not None


def test_figures_of_a_trace() -> None:
    direct, symm, plain = (read_steps(path, 1).figures for path in (DIRECT, SYMM, PLAIN))
    assert (direct["gathers"], direct["gather_kernels"], direct["copy_outs"], direct["copy_out_us"]) == (8, 0, 0, 0.0)
    assert (symm["copy_engine_gathers"], symm["gather_kernels"], symm["copy_outs"]) == (8, 0, 8)
    assert (plain["copy_engine_gathers"], plain["gather_kernels"], plain["copy_outs"]) == (0, 8, 8)
    assert symm["copy_out_us"] > 1000
    for figures in (direct, symm, plain):
        assert (figures["reduces"], figures["reduce_kernels"], figures["local_sums"]) == (4, 4, 0)
        assert figures["gemm_us"] > figures["all_gather_us"] / 10


def test_figures_are_a_step_s() -> None:
    one, two = read_steps(SYMM, 1).figures, read_steps(SYMM, 2).figures
    assert two["all_gather_us"] == pytest.approx(one["all_gather_us"] / 2, abs=0.1)
    assert two["gathers"] == 4
    assert read_steps(SYMM, 3).figures["gathers"] == 2.67


def test_products_are_compared_with_the_floor_s() -> None:
    trace = read_steps(PLAIN, 1)
    twice = {key: us / 2 for key, us in trace.medians.items()}
    floor = read_steps(PLAIN, 1)
    floor.medians.update(twice)
    found = trace.against(floor)
    assert found["gemm_alone_us"] == pytest.approx(trace.against(trace)["gemm_alone_us"] / 2, abs=0.1)
    assert found["gemm_overlapped_us"] == trace.against(trace)["gemm_overlapped_us"]
    assert found["gemms_beside"] == sum(map(len, trace.products.values())) > 0
    floor.medians.clear()
    assert trace.against(floor) == {
        "gemm_overlapped_us": 0.0, "gemm_alone_us": 0.0, "gemm_slowdown_pct": "", "gemms_beside": 0
    }  # fmt: skip


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    bench = StepBench(2, ((128, 2),), 1024, 2, tmp_path / "traces", 2, "cpu")
    lines = fsdp_step.measure(bench, "the command")
    assert [x["variant"] for x in lines] == [v for v in fsdp_step.VARIANTS if v != "native"]
    for x in lines:
        assert (tmp_path / f"traces/fsdp_step_{x['variant']}_w2_d128.json.gz").is_file()
        assert x["profiled_steps"] == 2
        floor = x["variant"] == "floor"
        assert (x["gathers"], x["reduces"]) == ((0, 0) if floor else (4, 2))
        assert (x["losses"] == lines[0]["losses"]) == (not floor)
        assert x["host_all_gather_us"] > 0
        assert (x["symmetric_bytes"] > 0) == (x["variant"] in fsdp_step.OURS)
    path = tmp_path / "step.csv"
    schema.write_lines(path, lines)
    make = tables.TABLES["fsdp_step_w2"][1]
    text = make(path)
    assert text == way_tables.step_table(lines)
    assert "| d128_l2 | direct+pulls |" in text
    assert "all variants the same in every digit" in text


def test_the_table_says_whose_losses_differ(tmp_path: Path) -> None:
    columns = ("all_gather_us", "gather_kernels", "reduce_scatter_us", "reduce_kernels", "local_sums", "copy_outs")
    columns += ("copy_out_us", "gemm_overlapped_us", "gemm_alone_us", "sm_us", "host_all_gather_us", "ranks")
    columns += ("host_reduce_scatter_us", "peak_bytes", "symmetric_bytes", "median_us", "min_us", "max_us")
    line = dict.fromkeys(columns, 1000) | {"name": "fsdp_step_d8_l1", "hardware": "h", "versions": "v", "command": "c"}
    line |= {"tax_us": 6000.0, "tax_min_us": -500.0, "tax_max_us": 7000.0, "tax_vs_native": 0.5714}
    losses = {"plain": "1.0; 0.5", "direct": "1.0; 0.51", "floor": "3.0; 3.0"}
    text = way_tables.step_table([line | {"variant": v, "losses": some} for v, some in losses.items()])
    assert "| d8_l1 | direct | 1.0 (1.0-1.0) | 6.0 (-0.5 to 7.0) | 0.57 |" in text
    assert "| d8_l1 | floor | 1.0 (1.0-1.0) | - | - |" in text
    assert "Losses of d8_l1: plain 1.0; 0.5; other losses: direct 1.0; 0.51." in text
