"""Reading: formats, sets of files, bounded blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_symm.trace.scan import Blocks, EventScanner
from tests.trace.build import FIXTURES, Builder, copy_engine_gather, host_wire

SYMM = FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz"


def _rows(path: Path, chunk_bytes: int):
    scanner = EventScanner(Blocks(path), chunk_bytes)
    rows = [row for block in scanner for row in block]
    return [(r.ph, r.cat, r.name, r.ts, r.dur) for r in rows], scanner


@pytest.mark.parametrize("chunk_bytes", [1 << 8, 1 << 12, 1 << 16])
@pytest.mark.parametrize("name", ["h200_fsdp_direct_w2", "cpu_gloo_fsdp2_w2_rank0"])
def test_blocks_of_any_size_read_the_same_rows(name, chunk_bytes):
    whole, first = _rows(FIXTURES / f"{name}.json.gz", 1 << 26)
    small, second = _rows(FIXTURES / f"{name}.json.gz", chunk_bytes)
    assert len(whole) > 1000
    assert small == whole
    assert first.metadata == second.metadata
    assert second.problems == []


def test_rows_with_any_first_key_metadata_behind_and_indentation(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0)
    data = json.loads(b.text())
    data["traceEvents"] = [dict(sorted(row.items())) for row in data["traceEvents"]]
    reordered = {"traceEvents": data.pop("traceEvents"), **data}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(reordered, indent=2))
    found, want = inspect(path), inspect(b.write(tmp_path / "plain.json"))
    assert found["ranks"][0]["calls"] == want["ranks"][0]["calls"]
    assert (found["ranks"][0]["rank"], found["ranks"][0]["num_sms"]) == (0, 132)


def test_content_decides_not_the_suffix(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0)
    plain, zipped = b.write(tmp_path / "a.json"), b.write(tmp_path / "b.json.gz")
    plain.rename(tmp_path / "c.json.gz")
    zipped.rename(tmp_path / "d.json")
    assert inspect(tmp_path / "c.json.gz")["ranks"][0]["calls"] == inspect(tmp_path / "d.json")["ranks"][0]["calls"]


def test_values_outside_json_are_read_and_reported(inspect, tmp_path):
    text = copy_engine_gather(Builder(), 0).text()
    path = tmp_path / "t.json"
    path.write_bytes(text.replace('"stream": 21', '"stream": 21, "memory bandwidth (GB/s)": Infinity', 1).encode())
    report = inspect(path)
    assert report["complete"]
    assert report["warnings"] == ["rank 0: 1 rows held invalid UTF-8, NaN or Infinity; those values dropped"]
    assert report["ranks"][0]["calls"][0]["num_copies"] == 7


@pytest.mark.parametrize("broken", [b'"odd\xff"', rb'"odd\ud800"'])
@pytest.mark.parametrize(("category", "complete"), [("python_function", True), ("kernel", False)])
def test_names_that_are_not_utf8_count_only_where_they_decide(inspect, tmp_path, category, complete, broken):
    text = copy_engine_gather(Builder(), 0).row(category, "odd", 500, 1).row("cpu_op", "a", 0, 1).text().encode()
    path = tmp_path / "t.json"
    path.write_bytes(text.replace(b'"odd"', broken))
    report = inspect(path)
    assert report["complete"] == complete
    assert ("partial" in report["verdict"]) == (not complete)
    assert any("invalid UTF-8" in w for w in report["warnings"])


def test_metadata_with_half_a_surrogate_can_be_printed(cli, tmp_path):
    text = copy_engine_gather(Builder(), 0).text().replace("NVIDIA H200", r"NVIDIA \ud800")
    path = tmp_path / "t.json"
    path.write_text(text)
    assert cli("inspect", path, "--html", tmp_path / "t.html").status == 0


def test_folder_glob_and_repeated_paths_are_one_set(inspect, tmp_path):
    for rank in (1, 0):
        copy_engine_gather(Builder(rank=rank), 0).write(tmp_path / f"r{rank}.json")
    for paths in ([tmp_path], [tmp_path / "*.json"], [tmp_path / "r1.json", tmp_path, tmp_path / "r0.json"]):
        assert [r["rank"] for r in inspect(*paths)["ranks"]] == [0, 1]


def test_rank_comes_from_the_name_where_metadata_has_none(inspect, tmp_path):
    b = copy_engine_gather(Builder(distributedInfo={}), 0)
    assert inspect(b.write(tmp_path / "worker-3.json"))["ranks"][0]["rank"] == 3
    assert inspect(b.write(tmp_path / "x.json"))["ranks"][0]["label"] == "x.json"


def test_one_rank_in_two_files_is_said(inspect, tmp_path):
    for name in ("a", "b"):
        copy_engine_gather(Builder(), 0).write(tmp_path / f"{name}.json")
    report = inspect(tmp_path)
    assert any("rank 0 is also in" in w for w in report["warnings"])
    assert report["stragglers"] == []


def test_memory_follows_the_block_not_the_file(tmp_path):
    """40 MB of rows that nobody needs must not stay: the peak of a fresh process is far below the file."""
    b = host_wire()
    filler = {"ph": "X", "cat": "python_function", "name": "f" * 800, "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    b.rows += [filler] * 45_000
    path = b.write(tmp_path / "t.json")
    code = (
        "import resource, sys; from fsdp_symm.trace import inspect_traces;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "assert len(inspect_traces(sys.argv[1]).ranks[0].calls) == 3;"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True).stdout)
    assert path.stat().st_size > 40e6
    assert grown < path.stat().st_size * 0.8


def test_inspector_needs_no_torch(tmp_path):
    code = (
        "import sys; from fsdp_symm.cli import main; main(['inspect', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, SYMM], capture_output=True).returncode == 0
