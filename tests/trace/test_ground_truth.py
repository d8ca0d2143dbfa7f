"""Recorded traces whose truth is known: this project's fixtures always, public ones where they are at hand."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.trace.build import FIXTURES

CALLS = {
    "h200_fsdp_plain_w2_fp32": {
        ("all_gather", "plain_kernel", "ncclDevKernel_AllGather_RING_LL"): 8,
        ("reduce_scatter", "plain_kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"): 4,
    },
    "h200_fsdp_symm_w2_fp32": {
        ("all_gather", "copy_engine", ""): 8,
        ("reduce_scatter", "symmetric_kernel", "ncclSymkDevKernel_ReduceScatter_LD_sum_f32"): 4,
    },
    "h200_fsdp_direct_w2": {
        ("all_gather", "copy_engine", ""): 8,
        ("reduce_scatter", "symmetric_kernel", "ncclSymkDevKernel_ReduceScatter_LD_sum_f32"): 4,
    },
    "h200_a2a_symm_zero_w2": {("all_to_all", "copy_engine", ""): 3},
    "h200_a2a_symm_default_w2": {("all_to_all", "plain_kernel", "ncclDevKernel_SendRecv"): 3},
    "h200_a2av_symm_zero_w2": {("all_to_all", "plain_kernel", "ncclDevKernel_SendRecv"): 3},
    "h200_ag_plain_zero_w2": {("all_gather", "plain_kernel", "ncclDevKernel_AllGather_RING_LL"): 3},
}
LOCAL_COPIES = {"h200_fsdp_plain_w2_fp32": 1, "h200_fsdp_symm_w2_fp32": 1, "h200_fsdp_direct_w2": 1}
SHARD_BYTES = 134_221_824  # bfloat16 payload of one all-gather: the peer's half of a block


def _calls(rank):
    return Counter((c["kind"], c["engine"], "+".join(c["kernels"])) for c in rank["calls"])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_project_trace_is_judged_as_recorded(inspect, name):
    report = inspect(FIXTURES / f"{name}.json.gz")
    rank = report["ranks"][0]
    assert _calls(rank) == CALLS[name]
    assert rank["num_local_copies"] == LOCAL_COPIES.get(name, 0)
    assert not any(c["guess"] for c in rank["calls"])
    assert report["complete"]


def test_copy_engine_gathers_have_one_payload_copy_and_two_flags(inspect):
    rank = inspect(FIXTURES / "h200_fsdp_symm_w2_fp32.json.gz")["ranks"][0]
    gathers = [c for c in rank["calls"] if c["kind"] == "all_gather"]
    assert {(c["num_copies"], c["num_flags"], c["copied_bytes"]) for c in gathers} == {(1, 2, SHARD_BYTES)}
    assert {c["bytes"] for c in gathers} == {2 * SHARD_BYTES}
    assert {c["sm_us"] for c in gathers} == {0.0}
    assert sorted(c["module"] for c in gathers) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    for call in gathers:
        assert call["wait_us"] + call["transfer_us"] == pytest.approx(call["duration_us"])
        assert call["busbw_gbps"] == pytest.approx(call["bytes"] / 2 / call["duration_us"] / 1e3)


def test_direct_placement_copies_are_joined_and_its_casts_stay_compute(inspect):
    rank = inspect(FIXTURES / "h200_fsdp_direct_w2.json.gz")["ranks"][0]
    gathers = [c for c in rank["calls"] if c["kind"] == "all_gather"]
    assert {(c["num_copies"], c["copied_bytes"], c["bytes"], c["bytes_from"]) for c in gathers} == {
        (3, SHARD_BYTES, 2 * SHARD_BYTES, "copies")
    }
    assert {c["name"] for c in gathers} == {"fsdp_symm::all_gather_direct"}
    assert sorted(c["module"] for c in gathers) == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_own_chunk_of_an_all_to_all_counts_as_payload(inspect):
    rank = inspect(FIXTURES / "h200_a2a_symm_zero_w2.json.gz")["ranks"][0]
    assert {(c["num_copies"], c["num_flags"], c["pattern"]) for c in rank["calls"]} == {(2, 2, "unicast")}


def test_split_lists_are_given_as_the_reason_only_where_they_are(inspect):
    topics = {
        name: {r["topic"] for r in inspect(FIXTURES / f"{name}.json.gz")["reasons"]}
        for name in ("h200_a2av_symm_zero_w2", "h200_a2a_symm_default_w2", "h200_a2a_symm_zero_w2")
    }
    assert topics["h200_a2av_symm_zero_w2"] == {"uneven_all_to_all"}
    assert topics["h200_a2a_symm_default_w2"] == {"all_to_all_send_recv"}
    assert "all_to_all_send_recv" not in topics["h200_a2a_symm_zero_w2"]


def test_gloo_reduce_scatter_is_no_all_reduce(inspect):
    """Gloo runs a reduce-scatter as gloo:all_reduce on its own thread; the operator names the kind and the module."""
    report = inspect(FIXTURES / "cpu_gloo_fsdp2_w2_rank0.json.gz", FIXTURES / "cpu_gloo_fsdp2_w2_rank1.json.gz")
    for rank in report["ranks"]:
        kinds = Counter((c["kind"], c["engine"], c["wire"]) for c in rank["calls"])
        assert kinds == {
            ("all_gather", "host", "gloo"): 12,
            ("reduce_scatter", "host", "gloo"): 6,
            ("all_reduce", "host", "gloo"): 2,
        }
        modules = Counter(c["module"] for c in rank["calls"] if c["kind"] == "reduce_scatter")
        assert modules == {"0": 2, "1": 2, "2": 2}
        assert {c["bytes"] for c in rank["calls"] if c["kind"] != "all_reduce"} == {4 * 525568}
        assert [s["number"] for s in rank["steps"]] == [2, 3]
        assert [s["num_calls"] for s in rank["steps"]] == [10, 10]
    assert {s["num_matched"] for s in report["stragglers"]} == {20}


def test_recorded_host_wire_is_named_by_module(inspect):
    """Two steps of three FSDP2 modules over this package's CPU wire."""
    report = inspect(*sorted(FIXTURES.glob("cpu_host_fsdp2_w2_rank*.json.gz")))
    for rank in report["ranks"]:
        calls = Counter((c["kind"], c["engine"], c["wire"], c["module"], c["bytes"]) for c in rank["calls"])
        assert calls == {("all_gather", "host", "shared memory", module, 4 * 525568): 4 for module in "012"} | {
            ("reduce_scatter", "host", "shared memory", module, 4 * 525568): 2 for module in "012"
        }
    assert {s["num_matched"] for s in report["stragglers"]} == {18}


PUBLIC = {
    "tracelens_b200_symm_mem_8rank_rank0": (
        {("all_reduce", "symm_mem_kernel"): 73, ("all_gather", "plain_kernel"): 1},
        146,
    ),
    "hta_a100_16rank_fsdp_a2a_rank0": (
        {
            ("all_to_all", "plain_kernel"): 45,
            ("all_to_all", "none_seen"): 10,
            ("all_gather", "plain_kernel"): 10,
            ("reduce_scatter", "plain_kernel"): 10,
            ("all_reduce", "plain_kernel"): 10,
            ("send_recv", "plain_kernel"): 5,
        },
        1280,
    ),
    "hta_128rank_a2a_sampled_rank0": (
        {("all_to_all", "plain_kernel"): 4, ("all_reduce", "plain_kernel"): 4, ("all_gather", "plain_kernel"): 2},
        8,
    ),
    "hta_128rank_a2a_sampled_rank1": (
        {("all_to_all", "plain_kernel"): 4, ("all_reduce", "plain_kernel"): 4, ("all_gather", "plain_kernel"): 2},
        8,
    ),
    "hta_v100_2rank_a2a_many_d2d_rank1": (
        {("all_to_all", "plain_kernel"): 42, ("all_reduce", "plain_kernel"): 21, ("send_recv", "plain_kernel"): 1},
        4645,
    ),
    **{
        f"param_v100_8rank_dlrm_a2a_rank{r}": (
            {("all_to_all", "plain_kernel"): 5, ("all_reduce", "plain_kernel"): 3},
            1,
        )
        for r in range(3)
    },
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_trace_has_no_false_positive(inspect, public, name):
    calls, local = PUBLIC[name]
    rank = inspect(public(name))["ranks"][0]
    assert Counter((c["kind"], c["engine"]) for c in rank["calls"]) == calls
    assert rank["num_local_copies"] == local
    assert not any(c["num_copies"] for c in rank["calls"])  # no local copy became communication


def test_launches_before_the_window_are_marked_as_guesses(inspect, public):
    report = inspect(public("hta_a100_16rank_fsdp_a2a_rank0"))
    guessed = [c for c in report["ranks"][0]["calls"] if c["guess"]]
    assert len(guessed) == 5
    assert {c["kernels"][0] for c in guessed} == {"ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"}
    assert any("5 of 90 calls judged by name alone" in w for w in report["warnings"])
    empty = [c for c in report["ranks"][0]["calls"] if c["engine"] == "none_seen"]
    assert {c["bytes"] for c in empty} == {0}


def test_multi_rank_names_the_late_rank(inspect, public):
    paths = [public(f"param_v100_8rank_dlrm_a2a_rank{r}") for r in range(3)]
    report = inspect(*paths)
    late = {s["rank"]: s for s in report["stragglers"]}
    assert [late[r]["num_last"] for r in range(3)] == [1, 1, 6]
    assert late[1]["waited_ms"] > 1000 * late[2]["waited_ms"]
    assert any("3 of 8 ranks loaded" in w for w in report["warnings"])
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 2]
