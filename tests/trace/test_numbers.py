"""Sizes, times, bandwidths and their doubts, one synthetic trace for each."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_symm.trace.intervals import Union
from tests.trace.build import FIXTURES, MB, PLAIN, Builder, copy_engine_gather, host_wire, only


def test_overlap_exposed_and_sm_time(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel(PLAIN, 100, 100, 5, grid=(16, 1, 1))
    b.kernel("gemm_a", 150, 100, 45, stream=3).kernel("gemm_b", 180, 10, 46, stream=4)
    rank = judge(b)["ranks"][0]
    assert rank["comm_ms"] == pytest.approx(0.1)
    assert rank["exposed_ms"] == pytest.approx(0.05)
    assert rank["overlap"] == pytest.approx(0.5)
    assert rank["sm_ms"] == pytest.approx(1.6)
    assert rank["steps"][0]["sm_share"] == pytest.approx(16 * 100 / (132 * 150))


def test_gemm_slowdown_needs_three_samples_of_either(judge):
    b = Builder()
    for i in range(3):
        b.collective("_allgather_base", 1000 * i, 40, (MB, 8 * MB)).kernel(PLAIN, 1000 * i + 100, 300, 1000 * i + 5)
        b.kernel("some_gemm", 1000 * i + 150, 120 + i, 1000 * i + 60, stream=3)
        b.kernel("some_gemm", 1000 * i + 600, 100 + i, 1000 * i + 61, stream=3)
        b.row("cpu_op", "aten::mm", 1000 * i + 58, 6, **{"Input Dims": [[64, 32], [32, 16]]})
    (row,) = judge(b)["ranks"][0]["gemms"]
    assert (row["engine"], row["num_overlapped"], row["num_alone"]) == ("plain_kernel", 3, 3)
    assert row["slowdown"] == pytest.approx(121 / 101)
    assert row["shapes"] == "[64,32]x[32,16]"
    b.rows = [r for r in b.rows if r["ts"] < 2000]
    assert judge(b)["ranks"][0]["gemms"][0]["slowdown"] is None


def test_steps_follow_the_launch_not_the_device(judge):
    b = Builder().step(5, 0, 100).step(6, 100, 100)
    b.collective("_allgather_base", 10, 40, (MB, 8 * MB)).kernel(PLAIN, 150, 10, 15)
    b.collective("_allgather_base", 110, 40, (MB, 8 * MB)).kernel(PLAIN, 250, 30, 115)
    steps = judge(b)["ranks"][0]["steps"]
    assert [(s["number"], s["comm_ms"]) for s in steps] == [(5, pytest.approx(0.01)), (6, pytest.approx(0.03))]
    assert [c["start_us"] for c in judge(b, "--step", 6)["ranks"][0]["calls"]] == [250]


def test_a_single_number_has_one_element_and_a_scalar_argument_none(judge):
    b = host_wire()
    b.rows = b.rows[:1]
    b.row("cpu_op", "c10d::allreduce_", 10, 5).row("user_annotation", "gloo:all_reduce", 20, 5, tid=2,
          **{"Input Dims": [[]], "Input type": ["long int"]})  # fmt: skip
    b.row("cpu_op", "c10d::allreduce_", 30, 5).row("user_annotation", "gloo:all_reduce", 40, 5, tid=2,
          **{"Input Dims": [[]], "Input type": ["Scalar"]})  # fmt: skip
    assert [c["bytes"] for c in judge(b)["ranks"][0]["calls"]] == [8, None]


@pytest.mark.parametrize(("sizes", "want"), [((2, 1), 2), ((2, 4), None)])
def test_world_size_stands_in_only_where_no_other_group_could_be_meant(judge, sizes, want):
    b = host_wire()
    b.rows = b.rows[:1]
    b.metadata["distributedInfo"]["pg_config"] = [{"pg_name": str(i), "pg_size": n} for i, n in enumerate(sizes)]
    b.row("cpu_op", "c10d::allreduce_", 10, 5).row("user_annotation", "gloo:all_reduce", 20, 5, tid=2)
    report = judge(b)
    assert only(report)["group_size"] == want
    assert any("name no group" in w for w in report["warnings"]) == (want is not None)


@pytest.mark.parametrize(
    ("name", "nelems", "payload", "factor"),
    [
        ("_allgather_base", (MB, 8 * MB), 16 * MB, 7 / 8),
        ("_reduce_scatter_base", (8 * MB, MB), 16 * MB, 7 / 8),
        ("all_to_allv", (MB, 3 * MB), 2 * MB, 7 / 8),
        ("allreduce", (MB, MB), 2 * MB, 14 / 8),
        ("broadcast", (MB, MB), 2 * MB, 1),
    ],
)
def test_bytes_and_bus_bandwidth_of_each_kind(judge, name, nelems, payload, factor):
    b = Builder().collective(name, 0, 40, nelems).kernel("ncclDevKernel_Generic(x)", 50, 100, 5)
    call = only(judge(b))
    assert call["bytes"] == payload
    assert call["busbw_gbps"] == pytest.approx(payload / 100 / 1e3 * factor)


def test_a_grid_larger_than_the_device_counts_the_device(judge):
    b = Builder().collective("allreduce", 0, 40, (MB, MB)).kernel("ncclDevKernel_X(x)", 50, 10, 5, grid=(1000, 1, 1))
    assert (only(judge(b))["sms"], only(judge(b))["sm_us"]) == (132, 1320)


def test_gemm_half_covered_is_no_sample(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel(PLAIN, 100, 100, 5)
    b.kernel("some_gemm", 150, 100, 45, stream=3).row("cpu_op", "aten::mm", 44, 5)
    b.kernel("some_gemm", 110, 50, 46, stream=3)
    (row,) = judge(b)["ranks"][0]["gemms"]
    assert (row["num_overlapped"], row["num_alone"]) == (1, 0)


def test_gemm_slowdown_needs_samples_alone_too(judge):
    b = Builder()
    for i in range(3):
        b.collective("_allgather_base", 1000 * i, 40, (MB, 8 * MB)).kernel(PLAIN, 1000 * i + 100, 300, 1000 * i + 5)
        b.row("cpu_op", "aten::mm", 1000 * i + 58, 6).kernel("some_gemm", 1000 * i + 150, 120, 1000 * i + 60, stream=3)
    b.kernel("some_gemm", 600, 100, 61, stream=3)
    (row,) = judge(b)["ranks"][0]["gemms"]
    assert (row["num_overlapped"], row["num_alone"], row["slowdown"]) == (3, 1, None)


def test_guesses_are_not_compared_between_ranks(inspect, tmp_path):
    for rank in range(2):
        b = copy_engine_gather(Builder(rank=rank, world=2), 0).kernel("ncclDevKernel_SendRecv(x)", 900, 10, None)
        b.write(tmp_path / f"{rank}.json")
    report = inspect(tmp_path)
    assert [len(r["calls"]) for r in report["ranks"]] == [2, 2]
    assert [s["num_matched"] for s in report["stragglers"]] == [1, 1]


@pytest.mark.parametrize("name", ["h200_fsdp_plain_w2_fp32", "hta_a100_16rank_fsdp_a2a_rank0"])
def test_exposed_time_by_an_independent_sweep(inspect, public, name):
    """Count, at every start and end of a row, how many kernels of either sort run; no unions, no searches."""
    path = FIXTURES / f"{name}.json.gz"
    path = path if path.exists() else public(name)
    edges = []
    for row in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if row.get("cat") == "kernel":
            sort = row["name"].startswith("nccl")
            edges += [(row["ts"], 1, sort), (row["ts"] + row["dur"], -1, sort)]
    running, last, comm, exposed = [0, 0], 0.0, 0.0, 0.0
    for at, change, sort in sorted(edges):
        comm += (at - last) * (running[True] > 0)
        exposed += (at - last) * (running[True] > 0 and running[False] == 0)
        running[sort] += change
        last = at
    rank = inspect(path)["ranks"][0]
    assert rank["comm_ms"] == pytest.approx(comm / 1e3)
    assert rank["exposed_ms"] == pytest.approx(exposed / 1e3)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@given(spans, spans, st.tuples(st.integers(0, 50), st.integers(0, 20)))
def test_unions_agree_with_counting_cells(left, right, query):
    cells = [{c for start, end in some for c in range(start, end)} for some in (left, right)]
    a, b = Union.of(left), Union.of(right)
    span = (query[0], query[0] + query[1])
    assert a.length_us == len(cells[0])
    assert a.intersect_us(b) == b.intersect_us(a) == len(cells[0] & cells[1])
    assert a.overlap_us(span) == len(cells[0] & set(range(*span)))
    assert all(a.contains(c + 0.5) == (c in cells[0]) for c in range(55))
