"""The benchmark's file is a trace that every reader can check, and its rows fit the common schema."""

from __future__ import annotations

import sys

import pytest

from fsdp_symm.bench import inspect_bench, schema


def test_synthetic_trace_repeats_the_recorded_one(inspect, tmp_path):
    path = tmp_path / "trace.json"
    num_rows, num_calls = inspect_bench.write_trace(path, 3_000_000)
    assert 3_000_000 <= path.stat().st_size < 5_000_000
    report = inspect(path)
    assert report["complete"]
    assert len(report["ranks"][0]["calls"]) == num_calls > 12
    assert not any(c["guess"] for c in report["ranks"][0]["calls"])
    assert num_rows % (num_calls // 12) == 0


def test_benchmark_writes_the_common_columns_and_its_own(monkeypatch, tmp_path, capsys):
    path = tmp_path / "inspect.csv"
    monkeypatch.setattr(sys, "argv", ["bench", "--csv", str(path), "--mb", "2", "--large-mb", "0", "--repeats", "1"])
    assert inspect_bench.main() == 0
    rows = schema.read(path)
    assert {"fsdp_symm inspect", "fsdp_symm load", "json.load"} <= {r.variant for r in rows}
    assert path.read_text().splitlines()[0].endswith("command,peak_bytes,mb_per_s")
    assert "HolisticTraceAnalysis" not in capsys.readouterr().out


def test_a_reader_that_loses_rows_is_not_timed():
    with pytest.raises(RuntimeError, match=r"json\.load: found 9; expected 10; the reader lost or made up rows"):
        inspect_bench._check("json.load", 9, 10, 1)
