"""Found by a hostile user: each test fails without its fix."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest

from fsdp_symm.cli import main
from fsdp_symm.trace.load import load_trace
from fsdp_symm.trace.scan import EventScanner
from tests.trace.build import FIXTURES, MB, PLAIN, Builder, copy_engine_gather, only

SYMM = FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz"


def gather(module: str = "layers.0") -> Builder:
    b = Builder(world=2).row("user_annotation", f"FSDP::all_gather ({module})", 90, 100)
    return b.collective("_allgather_base", 100, 20, (1024, 2048), 2).kernel(PLAIN, 200, 50, 105)


def outside(*args: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsdp_symm.cli", *args], capture_output=True, text=True, check=False, **more
    )


def test_html_never_overwrites_a_trace(cli, tmp_path):
    path = gather().write(tmp_path / "t.json")
    before = path.read_bytes()
    for args in (("inspect", path), ("diff", path, path)):
        ran = cli(*args, "--html", path)
        assert ran.status == 2
        assert "this is one of the traces" in ran.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("module", ["x[abc]", "x[/abc]", "[red]", "a:smile:"])
def test_names_that_look_like_markup_are_printed_as_they_are(cli, tmp_path, module):
    ran = cli("inspect", gather(module).write(tmp_path / "t.json"))
    assert ran.status == 0
    assert ran.out.count(module) == 2  # in the table and in the reason


def test_file_names_that_are_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/bad\xff.json"
    with open(path, "wb") as file:
        file.write(gather().text().encode())
    html = str(tmp_path / "h.html")
    ran = outside("inspect", os.fsdecode(path), "--json", "--html", html)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["ranks"][0]["path"].endswith("bad\\xff.json")


def test_output_without_utf8_is_no_traceback(tmp_path):
    path = str(gather().write(tmp_path / "t.json"))
    ran = outside("inspect", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0, ran.stderr
    assert "verdict" in ran.stdout


def test_slowdown_of_one_step_compares_with_gemms_beside_nothing(cli, tmp_path):
    b = Builder(world=2)
    for n in (1, 2, 3):
        t = n * 10_000
        b.step(n, t, 9_000).collective("_allgather_base", t + 10, 20, (MB, 2 * MB), 2)
        b.kernel(PLAIN, t + 100, 1000, t + 15)
        for at, dur in ((t + 110, 200), (t + 410, 200), (t + 710, 200), (t + 2000, 100)):
            b.row("cpu_op", "aten::mm", at - 51, 5, tid=2, **{"Input__Dims": [[8, 8], [8, 8]]})
            b.row("cuda_runtime", "cudaLaunchKernel", at - 50, 1, tid=2, correlation=at)
            b.kernel("nvjet_gemm", at, dur, None, stream=3, correlation=at)
    path = b.write(tmp_path / "t.json")
    for step in ((), ("--step", "1"), ("--step", "2")):
        (row,) = json.loads(cli("inspect", path, "--json", *step).out)["ranks"][0]["gemms"]
        assert row["slowdown"] == pytest.approx(2.0), step


def test_each_named_kind_and_each_expectation_must_hold(cli):
    assert cli("inspect", SYMM, "--expect", "copy-engine:all_gather,all_to_all").status == 1
    two = ("--expect", "copy-engine:reduce_scatter", "--expect", "copy-engine:all_gather")
    assert cli("inspect", SYMM, *two).status == 1
    assert cli("inspect", SYMM, "--expect", "").status == 2


def test_flags_alone_do_not_meet_an_expectation(cli, tmp_path):
    b = copy_engine_gather(Builder(), 100)
    b.rows = [r for r in b.rows if r["args"].get("bytes", 4) == 4]
    ran = cli("inspect", b.write(tmp_path / "t.json"), "--expect", "copy-engine:all_gather")
    assert ran.status == 1
    assert "barrier flags but no payload" in ran.err


def test_device_all_to_all_of_torch_is_communication(cli, tmp_path):
    b = Builder(world=2).row("cpu_op", "symm_mem::all_to_all_vdev", 100, 50)
    b.kernel("exchangeSplitAndOffset(long*, long*, int)", 200, 10, 105).kernel("allToAllV(void*, void*)", 210, 40, 110)
    call = only(json.loads(cli("inspect", b.write(tmp_path / "t.json"), "--json").out))
    assert (call["kind"], call["engine"], call["duration_us"]) == ("all_to_all", "symm_mem_kernel", 50)


def test_negative_sizes_make_bytes_unknown(cli, tmp_path):
    b = Builder(world=2)
    shape = {"Input__Dims": [[-64], [-32]], "Input__type": ["float", "float"]}
    b.row("cpu_op", "c10d::_allgather_base_", 100, 50, **shape).kernel(PLAIN, 200, 50, 105)
    assert only(json.loads(cli("inspect", b.write(tmp_path / "t.json"), "--json").out))["bytes"] is None


def test_calls_outside_of_every_step_are_counted(cli, tmp_path):
    b = gather().step(1, 5000, 100)
    assert "1 calls were asked for outside of every step" in cli("inspect", b.write(tmp_path / "t.json"), "--json").err


def test_a_first_row_with_another_key_does_not_search_the_buffer_over_and_over(tmp_path, monkeypatch):
    b = gather()
    body = json.dumps(b.rows)[1:-1]
    head = '{"traceEvents": [{"name": "process_name", "ph": "M"}, '
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress((head + ", ".join([body] * 25_000) + "]}").encode()))
    sizes = []
    real = EventScanner._last_border
    monkeypatch.setattr(EventScanner, "_last_border", lambda self, b: (sizes.append(len(b)), real(self, b))[1])
    load_trace(path)
    assert sum(sizes) < 4 * max(sizes)


def test_flag_copies_are_four_bytes_and_grids_have_three_axes(cli, tmp_path):
    b = Builder(world=2).collective("_allgather_base", 100, 40, (2, 4), 2)
    b.copy("DtoD", 8, 200, 5, 105).copy("PtoP", 4, 500, 5, 400).copy("PtoP", MB, 510, 5, 400, correlation=102)
    b.kernel(PLAIN, 600, 10, 450, grid=(2, 3, 4))
    calls = json.loads(cli("inspect", b.write(tmp_path / "t.json"), "--json").out)["ranks"][0]["calls"]
    small = calls[0]
    assert (small["num_copies"], small["num_flags"], small["copied_bytes"]) == (1, 0, 8)
    peers = [c for c in calls if c["kind"] == "peer_copy"]
    assert sum(c["num_flags"] for c in peers) == 1
    assert sum(c["copied_bytes"] for c in peers) == MB
    assert max(c["sms"] for c in calls) == 24


def test_a_file_that_only_a_search_found_may_be_no_trace(tmp_path, capsys):
    shutil.copy(FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz", tmp_path)
    (tmp_path / "report.json").write_text("")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    caught = capsys.readouterr()
    assert "skipped: " in caught.err
    assert "report.json" in caught.err
    assert "config.json" in caught.err
    assert main(["inspect", str(tmp_path / "*.json*"), "--json"]) == 0
    assert main(["inspect", str(tmp_path / "report.json")]) == 2, "a file named itself must be a trace"


def test_the_same_file_twice_counts_once(tmp_path, monkeypatch, capsys):
    shutil.copy(FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz", tmp_path / "t.json.gz")
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "t.json.gz", str(tmp_path / "t.json.gz"), ".", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 1


def test_a_lone_local_copy_without_a_group_size_is_a_guess(tmp_path, capsys):
    b = Builder()
    b.collective("_allgather_base", 0, 40, (MB // 2, MB // 2))
    for row in b.rows:
        row["args"].pop("Group size", None)
        row["args"].pop("Process Group Ranks", None)
    b.metadata["distributedInfo"] = {"backend": "nccl"}
    b.copy("DtoD", MB, 100, 20, 5)
    assert main(["inspect", str(b.write(tmp_path / "t.json")), "--json"]) == 0
    call = only(json.loads(capsys.readouterr().out))
    assert call["guess"]
    assert any("may be a group of one rank" in note for note in call["notes"])


def test_a_kernel_whose_launch_was_not_recorded_is_joined_by_its_external_id(tmp_path, capsys):
    b = Builder()
    b.collective("_allgather_base", 0, 40, (MB // 2, 4 * MB))
    b.rows[0]["args"]["External id"] = 77
    b.row("kernel", PLAIN, 100, 50, tid=7, pid=0, device=0, stream=7, grid=[8, 1, 1], correlation=9, External__id=77)
    assert main(["inspect", str(b.write(tmp_path / "t.json")), "--json"]) == 0
    call = only(json.loads(capsys.readouterr().out))
    assert (call["kind"], call["engine"], call["guess"], call["group_size"]) == ("all_gather", "plain_kernel", False, 8)
