"""The two commands from outside: status, text, JSON, CSV, HTML, and the Python names."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_symm.trace import TraceError, progress, summarize
from tests.trace.build import FIXTURES, Builder, copy_engine_gather, host_wire

SYMM = FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz"
PLAIN = FIXTURES / "h200_fsdp_plain_w2_fp32.json.gz"
GLOO = FIXTURES / "cpu_gloo_fsdp2_w2_rank0.json.gz"
DOC = Path(__file__).parents[2] / "docs" / "inspect.md"


@pytest.mark.parametrize(
    ("path", "expect", "status"),
    [
        (SYMM, "copy-engine", 0),  # without kinds: what a copy engine can do at all
        (SYMM, "copy-engine:all_gather", 0),
        (SYMM, "copy-engine:all-gather", 0),
        (SYMM, "copy-engine:reduce_scatter", 1),
        (SYMM, "copy-engine:all_gather,reduce_scatter", 1),
        (SYMM, "symmetric-kernel:reduce_scatter", 0),
        (SYMM, "copy-engine:all_to_all", 1),  # nothing to vouch for is not a success
        (PLAIN, "copy-engine", 1),
        (GLOO, "host", 0),
        (GLOO, "copy-engine", 1),
    ],
)
def test_expectation_decides_the_status(cli, path, expect, status):
    assert cli("inspect", path, "--expect", expect).status == status


def test_unmet_expectation_lists_the_offending_calls(cli):
    ran = cli("inspect", SYMM, "--expect", "copy-engine:reduce_scatter")
    lines = [line for line in ran.err.splitlines() if line.startswith("unmet: ")]
    assert len(lines) == 4
    assert "reduce_scatter 3" in lines[0]
    assert "symmetric kernel ncclSymkDevKernel_ReduceScatter_LD_sum_f32, not the copy engine" in lines[0]
    nothing = cli("inspect", SYMM, "--expect", "copy-engine:all_to_all").err
    assert "no all-to-alls in the trace: nothing shows the copy engine" in nothing


def test_long_lists_of_offenders_are_cut_and_counted(cli, tmp_path):
    b = host_wire()
    b.rows += [{**b.rows[1], "ts": 2000 + 100 * i} for i in range(30)]
    err = cli("inspect", b.write(tmp_path / "t.json"), "--expect", "copy-engine:all_gather").err
    assert err.count("unmet: ") == 21
    assert "unmet: and 12 more" in err


def test_incomplete_trace_vouches_for_nothing(cli, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(copy_engine_gather(Builder(), 0).text()[:-40])
    ran = cli("inspect", path, "--expect", "copy-engine:all_gather")
    assert ran.status == 1
    assert "rows are missing from the trace" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--expect", "warp-drive"), "unknown engine 'warp-drive'; expected one of copy-engine,"),
        (("--expect", "copy-engine:"), "--expect copy-engine:: no collective after ':'; expected one of all_gather,"),
        (("--expect", "copy-engine:,,"), "no collective after ':'"),
        (("--expect", "copy-engine:all_gthr"), "unknown collective 'all_gthr'; expected one of all_gather,"),
        (("--rank", "4"), "--rank 4: no such rank; found 0"),
        (("--step", "9"), "--step 9: no such step; found no ProfilerStep rows; call prof.step() in the loop"),
        (
            ("--html", "/nonexistent/x.html"),
            "--html /nonexistent/x.html: No such file or directory; expected a writable",
        ),
    ],
)
def test_bad_arguments_are_one_line(cli, arguments, words):
    ran = cli("inspect", SYMM, *arguments)
    assert ran.status == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_missing_step_lists_what_there_is(cli):
    assert "--step 9: no such step; found 2, 3" in cli("inspect", GLOO, "--step", "9").err


def test_json_and_csv_exclude_each_other(cli):
    with pytest.raises(SystemExit) as left:
        cli("inspect", SYMM, "--json", "--csv")
    assert left.value.code == 2


@pytest.mark.parametrize("name", [p.name for p in sorted(FIXTURES.glob("*.gz"))])
def test_text_fits_80_columns_and_ends_with_the_verdict(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli("inspect", FIXTURES / name)
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "\nverdict  " in ran.out
    diff = cli("diff", FIXTURES / name, SYMM)
    assert diff.status == 0
    assert max(map(len, diff.out.splitlines())) <= 80


def test_long_module_names_wrap_and_lose_nothing(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    b = host_wire()
    name = "model.decoder.layers.31.feed_forward.experts"
    b.rows[1]["args"]["module"] = name
    out = cli("inspect", b.write(tmp_path / "t.json")).out
    assert name not in out
    cells = [line.split(" ")[0] for line in out.splitlines()]
    assert name in "".join(cells)


def test_many_ranks_show_the_worst_in_full(cli, tmp_path):
    for rank in range(6):
        b = Builder(rank=rank)
        copy_engine_gather(b, 0)
        b.rows[-1]["dur"] += 100 if rank == 4 else 0
        b.write(tmp_path / f"{rank}.json")
    out = cli("inspect", tmp_path).out
    assert "most exposed of 6 ranks" in out
    assert "rank 4/8" in out
    assert "rank 3/8" not in out
    assert "rank 3/8" in cli("inspect", tmp_path, "--rank", 3).out


def test_csv_has_one_line_for_each_collective_row(cli):
    ran = cli("inspect", SYMM, "--csv")
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert len(rows) == 8
    assert {(r["kind"], r["engine"]) for r in rows} == {
        ("all_gather", "copy_engine"),
        ("reduce_scatter", "symmetric_kernel"),
    }
    assert all(r["wait_ms"] == "" for r in rows if r["engine"] == "symmetric_kernel")


def _keys(value, at=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{at}.{key}".lstrip(".")
            yield from _keys(inner, f"{at}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, at + "[]")


def test_json_is_what_the_documentation_says(inspect, cli):
    """Both ways: no key without a line in the document, no documented key that is never written."""
    documented = set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", DOC.read_text(), re.MULTILINE))
    ranks = inspect(GLOO, FIXTURES / "cpu_gloo_fsdp2_w2_rank1.json.gz")
    report = inspect(PLAIN)
    diff = json.loads(cli("diff", PLAIN, SYMM, "--json").out)
    engines = {
        f"diff.engines[].{side}.{e}"
        for side in ("before", "after")
        for e in ("plain_kernel", "copy_engine", "symmetric_kernel")
    }
    written = set(_keys(ranks)) | set(_keys(report)) | {f"diff.{key}" for key in _keys(diff)} - engines
    assert written == documented
    assert report["schema_version"] == diff["schema_version"] == 1


def test_diff_says_what_changed(cli):
    found = json.loads(cli("diff", PLAIN, SYMM, "--json").out)
    changes = {m["name"]: m for m in found["metrics"]}
    assert changes["exposed_ms"]["change"] == pytest.approx(8.8127 / 13.4268 - 1, abs=1e-3)
    assert changes["sm_ms"]["before"] == pytest.approx(165.53, abs=0.01)
    engines = {e["kind"]: (e["before"], e["after"]) for e in found["engines"]}
    assert engines["all_gather"] == ({"plain_kernel": 1.0}, {"copy_engine": 1.0})
    assert found["verdict"].startswith("all-gather: plain kernel -> copy engine; reduce-scatter: plain kernel -> symm")
    assert len(found["collectives"]) == 8
    same = json.loads(cli("diff", SYMM, SYMM, "--json").out)
    assert same["verdict"].startswith("same engines; ")
    assert {m["change"] for m in same["metrics"]} <= {0.0, None}


def test_diff_warns_when_the_two_sides_do_different_work(cli):
    ran = cli("diff", GLOO, SYMM)
    words = " ".join(ran.out.split())
    assert "bytes per step differ" in words
    assert "the devices differ: NVIDIA H200, no device" in words
    assert "only one side has ProfilerStep rows" in words


def _page_data(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_html_is_one_safe_file(cli, tmp_path, command):
    b = host_wire()
    evil = "</script><script>alert(1)</script>"
    b.rows[1]["args"]["module"] = evil
    trace, page = b.write(tmp_path / "t.json"), tmp_path / "page.html"
    paths = [trace] if command == "inspect" else [trace, SYMM]
    assert cli(command, *paths, "--html", page).status == 0
    html = page.read_text()
    assert evil not in html
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert not re.search(r"(src|href)=|url\(|@import|https?://", html)
    assert html.count("<canvas") == (1 if command == "inspect" else 2)
    assert _page_data(html)["views"][0]["ranks"][0]["lanes"] == ["compute", "host"]
    assert page.stat().st_size < 300_000


def test_html_timeline_holds_every_device_row_of_a_call(cli, tmp_path):
    page = tmp_path / "page.html"
    cli("inspect", SYMM, "--html", page)
    (rank,) = _page_data(page.read_text())["views"][0]["ranks"]
    shades = [rank["names"][row[3]] for row in rank["rows"]]
    assert shades.count("copy_engine") == 8
    assert shades.count("flag") == 16 + 8  # each flag, and the band behind each call
    assert shades.count("symmetric_kernel") == 4
    assert all(row[1] >= 0 and row[1] + row[2] <= rank["span_us"] + 0.01 for row in rank["rows"])


def test_html_of_many_kernels_and_ranks_stays_small(cli, tmp_path):
    for rank in range(10):
        b = copy_engine_gather(Builder(rank=rank), 0)
        for i in range(5000 if rank == 9 else 10):
            b.rows.append({**b.rows[2], "cat": "kernel", "name": "gemm", "ts": 200.0 + 2 * i, "dur": 1.0})
        b.write(tmp_path / f"{rank}.json")
    page = tmp_path / "page.html"
    cli("inspect", tmp_path, "--html", page)
    html = page.read_text()
    ranks = _page_data(html)["views"][0]["ranks"]
    assert len(ranks) == 8
    assert "the 8 most exposed of 10 ranks" in html
    assert max(len(r["rows"]) for r in ranks) < 4100
    alone = tmp_path / "alone.html"
    cli("inspect", tmp_path / "9.json", "--html", alone)
    assert "compute rows that lie close together are merged" in alone.read_text()


def test_summary_for_a_training_loop():
    found = summarize(SYMM)
    assert found.engine_shares == {"all_gather": {"copy_engine": 1.0}, "reduce_scatter": {"symmetric_kernel": 1.0}}
    assert found.exposed_ms == pytest.approx(8.8127, abs=1e-3)
    assert found.sm_ms == pytest.approx(57.071, abs=1e-3)
    assert (found.num_steps, found.complete, found.warnings) == (1, True, ())
    assert found.verdict.endswith("communication exposed, 66%.")
    both = summarize(sorted(FIXTURES.glob("cpu_gloo*")))
    assert both.num_steps == 2
    assert both.engine_shares["all_gather"] == {"host": 1.0}
    assert 30 < both.comm_ms < 50  # per step, not per trace
    with pytest.raises(TraceError, match="no path given"):
        summarize([])


def test_trace_without_communication_says_so(cli, tmp_path):
    b = Builder().kernel("gemm", 0, 10, 1)
    assert "No communication found in 1 trace." in cli("inspect", b.write(tmp_path / "t.json")).out


@pytest.mark.parametrize("arguments", [["--json"], ["--csv"], []])
def test_a_reader_that_leaves_early_is_no_error(arguments):
    words = " ".join(str(a) for a in ("-m", "fsdp_symm.cli", "inspect", SYMM, *arguments))
    done = subprocess.run(f"{sys.executable} {words} | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_progress_bar_on_terminals_only(cli, monkeypatch):
    monkeypatch.setattr(progress, "_LONG_BYTES", 0)
    assert SYMM.name not in cli("inspect", SYMM).err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert SYMM.name in cli("inspect", SYMM).err
