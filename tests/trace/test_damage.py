"""Broken inputs: a one-line error or a partial result that says so, never a traceback, never a silent wrong number."""

from __future__ import annotations

import gzip
import json
import random
import re

import pytest

from tests.trace.build import FIXTURES, MB, Builder, copy_engine_gather

SEED = 20261129
NAMES = ("h200_fsdp_symm_w2_fp32", "h200_fsdp_direct_w2", "h200_a2a_symm_zero_w2", "cpu_gloo_fsdp2_w2_rank0")


def _numbers(report):
    """Every number that a reader may quote."""
    return [
        (r["comm_ms"], r["exposed_ms"], r["sm_ms"], r["bytes"], r["num_local_copies"], r["steps"],
         [(c["kind"], c["engine"], c["bytes"], c["duration_us"], c["sms"], c["module"]) for c in r["calls"]])
        for r in report["ranks"]
    ]  # fmt: skip


def _truncate(rng, text):
    return text[: rng.randrange(len(text))]


def _gzip_cut(rng, text):
    data = gzip.compress(text)
    return data[: rng.randrange(2, len(data))]


def _gzip_flip(rng, text):
    data = bytearray(gzip.compress(text))
    data[rng.randrange(12, len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _syntax(rng, text):
    """Lose or double one structural byte between rows' values; digits stay, so no number changes unseen."""
    spots = [m.start() for m in re.finditer(rb'[{}\[\]:,"]', text)]
    at = rng.choice(spots)
    return text[:at] + (text[at : at + 1] * 2 if rng.random() < 0.5 else b"") + text[at + 1 :]


def _bad_bytes(rng, text):
    """A name that is not UTF-8."""
    spots = [m.end() for m in re.finditer(rb'"name": "', text)]
    at = rng.choice(spots)
    return text[:at] + b"\xff\xfe" + text[at:]


def _bad_time(rng, text):
    """A time or length that cannot be, on a row that counts."""
    data = json.loads(text)
    rows = [
        e for e in data["traceEvents"]
        if e.get("cat") in ("kernel", "gpu_memcpy", "cuda_runtime") or "gloo:" in e.get("name", "")
    ]  # fmt: skip
    row = rng.choice(rows)
    key = rng.choice(("ts", "dur")) if row["cat"] != "cuda_runtime" else "ts"
    row[key] = rng.choice((-1.0, float("nan"), float("inf"), None, "soon", [], True))
    return json.dumps(data).encode()


def _bad_row(rng, text):
    """A row that is no row, or whose arguments are none."""
    data = json.loads(text)
    at = rng.randrange(len(data["traceEvents"]))
    data["traceEvents"][at] = rng.choice((17, "row", [], {**data["traceEvents"][at], "args": "none"}))
    return json.dumps(data).encode()


DAMAGES = (_truncate, _gzip_cut, _gzip_flip, _syntax, _bad_bytes, _bad_time, _bad_row)


@pytest.mark.parametrize("number", range(119))
def test_damaged_trace_never_misleads(cli, tmp_path, number):
    """17 inputs of each of 7 kinds of damage; the seed reproduces any of them."""
    rng = random.Random(SEED + number)
    name, damage = NAMES[number % len(NAMES)], DAMAGES[number % len(DAMAGES)]
    print(f"seed {SEED + number}: {damage.__name__} of {name}")
    good = FIXTURES / f"{name}.json.gz"
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(damage(rng, gzip.decompress(good.read_bytes())))
    ran = cli("inspect", bad, "--json")
    assert "Traceback" not in ran.err
    if ran.status == 2:
        assert ran.out == ""
        assert re.fullmatch(r"fsdp-symm inspect: [^\n]+\n", ran.err)
        return
    assert ran.status == 0
    report, truth = json.loads(ran.out), json.loads(cli("inspect", good, "--json").out)
    if _numbers(report) != _numbers(truth):
        assert report["warnings"]
        assert not report["complete"]
        assert "partial" in report["verdict"]
        assert "warning: " in ran.err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.json", b"", "the file is empty"),
        ("empty.json.gz", b"", "the file is empty"),
        ("text.json", b"hello", "not JSON"),
        ("text.json.gz", b"hello", "named .gz but neither gzip nor JSON"),
        ("array.json", b'[{"ph": "X"}]', "a JSON array; expected Kineto's object"),
        ("other.json", b'{"nodes": []}', "no traceEvents array"),
        ("none.json", b'{"traceEvents": []}', "traceEvents is empty"),
        ("chrome.json", b'{"traceEvents": [{"ph": "X", "cat": "blink", "name": "a", "ts": 1, "dur": 1}]}',
         "none of Kineto's categories"),
        ("cut.json", b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu', "breaks inside a row before any"),
        ("cut.json.gz", gzip.compress(b'{"traceEvents": []}')[:12], "cut short before any row"),
        ("rows.json", b'{"traceEvents": [1, 2]}', "2 unreadable rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_unusable_file_is_one_line_with_status_2(cli, tmp_path, command, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    ran = cli(command, path) if command == "inspect" else cli(command, FIXTURES / "h200_a2a_symm_zero_w2.json.gz", path)
    assert ran.status == 2
    assert ran.out == ""
    assert re.fullmatch(rf"fsdp-symm {command}: [^\n]*{re.escape(name)}: [^\n]*{re.escape(words)}[^\n]*\n", ran.err)


def test_missing_paths(cli, tmp_path):
    assert "no such file, folder or match" in cli("inspect", tmp_path / "x.json").err
    assert "no such file, folder or match" in cli("inspect", tmp_path / "*.json").err
    assert "found an empty path; expected a trace" in cli("inspect", "").err
    assert "File name too long; expected a trace" in cli("inspect", "a" * 300).err
    assert "no .json or .json.gz inside" in cli("inspect", tmp_path).err


def test_two_correlations_that_clash_are_reported(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0)
    b.row("cuda_runtime", "cudaLaunchKernel", 900, 1, correlation=101)
    report = inspect(b.write(tmp_path / "t.json"))
    assert any("1 correlation ids name several launches" in w for w in report["warnings"])


def test_copies_without_bytes_kernels_without_grid_and_far_rows_are_reported(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0).row("Trace", "PyTorch Profiler (0)", 0, 1000)
    b.copy("PtoP", -5, 150, 1, 10).kernel("ncclDevKernel_X(y)", 1e9, 1, 11, grid=(0, 0, 0))
    report = inspect(b.write(tmp_path / "t.json"))
    words = " ".join(report["warnings"])
    assert "1 copies without a usable byte count" in words
    assert "1 communication kernels without a grid" in words
    assert "1 device rows lie outside the recorded window" in words


def test_flags_without_payload_are_reported(inspect, tmp_path):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).copy("PtoP", 4, 50, 1, 5)
    report = inspect(b.write(tmp_path / "t.json"))
    assert any("1 calls show barrier flags but no payload" in w for w in report["warnings"])
    assert report["ranks"][0]["calls"][0]["engine"] == "copy_engine"


@pytest.mark.parametrize("cut", ["]}", "}]}"])
def test_a_cut_between_two_rows_is_noticed(inspect, tmp_path, cut):
    text = copy_engine_gather(Builder(), 0).text()
    assert text.endswith(cut)
    path = tmp_path / "t.json"
    path.write_text(text[: -len(cut)])
    report = inspect(path)
    assert not report["complete"]
    assert "partial result: the file ends" in report["warnings"][0]


def test_a_launch_without_a_time_is_noticed(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0)
    next(r for r in b.rows if r["cat"] == "cuda_runtime")["ts"] = -7.0
    report = inspect(b.write(tmp_path / "t.json"))
    assert not report["complete"]
    assert "1 rows left out: negative, missing or non-finite time" in report["warnings"][0]


def test_thousands_of_nested_rows_are_no_recursion(inspect, tmp_path):
    b = copy_engine_gather(Builder(), 0)
    for _ in range(5000):
        b.row("user_annotation", "nccl:all_reduce", 1000, 10)
    calls = inspect(b.write(tmp_path / "t.json"))["ranks"][0]["calls"]
    assert [c["kind"] for c in calls] == ["all_gather", "all_reduce"]
