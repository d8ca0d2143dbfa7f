"""The classification rules, one synthetic trace for each."""

from __future__ import annotations

import pytest

from tests.trace.build import MB, PLAIN, Builder, copy_engine_gather, host_wire, only


def test_nvlink_copies_flags_and_bandwidth(judge):
    call = only(judge(copy_engine_gather(Builder(), 0)))
    assert (call["engine"], call["num_copies"], call["num_flags"], call["pattern"]) == ("copy_engine", 7, 14, "unicast")
    assert call["bytes"] == 8 * MB
    assert call["copied_bytes"] == 7 * MB
    assert call["duration_us"] == pytest.approx(96.5)  # first flag at 50, last one ends at 146.5
    assert call["transfer_us"] == pytest.approx(26)  # copies of a batch overlap: union, not 140
    assert call["wait_us"] == pytest.approx(70.5)
    assert call["busbw_gbps"] == pytest.approx(8 * MB / 96.5 / 1e3 * 7 / 8)


def test_a_multicast_write_and_a_batch(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB))
    b.copy("PtoP", 2 * MB, 50, 10, 5)
    assert only(judge(b))["pattern"] == "multicast"
    b.copy("PtoP", 3 * MB, 50, 10, 5)
    assert only(judge(b))["pattern"] == "batch of 2"


def test_a_copy_that_torch_asks_for_inside_a_collective_stays_memory(judge):
    """A list all-gather copies NCCL's output into the list with aten::copy_, inside the annotation."""
    b = Builder().collective("allgather", 0, 100, (MB, 8 * MB))
    b.kernel(PLAIN, 60, 30, 5)
    b.row("cpu_op", "aten::copy_", 20, 10)
    b.copy("DtoD", 2 * MB, 95, 10, 22, stream=7, launch="cudaMemcpyAsync")
    report = judge(b)
    assert (only(report)["engine"], only(report)["num_copies"]) == ("plain_kernel", 0)
    assert report["ranks"][0]["num_local_copies"] == 1


def test_local_copies_outside_are_memory_and_peer_copies_communication(judge):
    b = Builder().copy("DtoD", MB, 0, 10, 1).copy("PtoP", MB, 20, 10, 2).copy("HtoD", MB, 40, 10, 3)
    report = judge(b)
    call = only(report)
    assert (call["kind"], call["engine"], call["wire"], call["guess"]) == (
        "peer_copy",
        "copy_engine",
        "peer copy",
        False,
    )
    assert report["ranks"][0]["num_local_copies"] == 1


def test_four_byte_copy_from_the_host_is_a_flag_only_inside_nccl(judge):
    b = copy_engine_gather(Builder(), 0)
    b.copy("Memcpy HtoD (Pageable -> Device)", 4, 45, 1, 3).copy("Memcpy HtoD (Pageable -> Device)", 4, 300, 1, 200)
    call = only(judge(b))
    assert call["num_flags"] == 15
    assert call["start_us"] == 45
    other = Builder().row("cpu_op", "symm_mem::_low_contention_all_gather", 0, 50).copy("PtoP", MB, 70, 10, 10)
    other.copy("Memcpy HtoD (Pageable -> Device)", 4, 60, 1, 5)
    assert only(judge(other))["num_flags"] == 0


def test_flags_beside_a_kernel_do_not_make_it_mixed(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel(PLAIN, 60, 10, 6).copy("PtoP", 4, 50, 1, 5)
    assert only(judge(b))["engine"] == "plain_kernel"


def test_kernels_and_copies_together_are_mixed(judge):
    b = copy_engine_gather(Builder(), 0)
    b.kernel(PLAIN, 160, 10, 20)
    assert only(judge(b))["engine"] == "mixed"


@pytest.mark.parametrize(
    ("kernel", "engine"),
    [
        ("ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)", "symmetric_kernel"),
        ("ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)", "symmetric_kernel"),
        ("ncclDevKernel_AllGather_RING(ncclDevKernelArgsStorage<4096ul>)", "plain_kernel"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "plain_kernel"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "plain_kernel"),
    ],
)
def test_kernel_families(judge, kernel, engine):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel(kernel, 50, 10, 5, grid=(16, 1, 1))
    call = only(judge(b))
    assert (call["engine"], call["sms"], call["sm_us"]) == (engine, 16, 160)


def test_rocm_names(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB))
    b.copy("CopyDeviceToDevice", MB, 50, 10, 5, launch="hipMemcpyWithStream")
    b.copy("CopyDeviceToDevice", MB, 500, 10, 300, launch="hipMemcpyWithStream")
    report = judge(b)
    assert only(report)["engine"] == "copy_engine"
    assert report["ranks"][0]["num_local_copies"] == 1
    b.kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 60, 9, 6, launch="hipExtLaunchKernel")
    assert only(judge(b))["engine"] == "mixed"


def test_torch_symm_mem_by_operator_and_by_name(judge):
    b = Builder()
    b.row(
        "cpu_op",
        "symm_mem::one_shot_all_reduce",
        0,
        20,
        **{"Input Dims": [[1024], [], []], "Input type": ["float", "", ""]},
    )
    b.kernel("void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16>(float*)", 30, 10, 5)
    b.kernel("void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16>(float*)", 50, 10, 40)
    first, second = judge(b)["ranks"][0]["calls"]
    assert (first["engine"], first["kind"], first["bytes"], first["guess"]) == (
        "symm_mem_kernel",
        "all_reduce",
        4096,
        False,
    )
    assert (second["engine"], second["kind"], second["guess"]) == ("symm_mem_kernel", "all_reduce", True)


def test_low_contention_gather_is_copy_engine_with_its_barriers_counted(judge):
    b = Builder().row("cpu_op", "symm_mem::_low_contention_all_gather", 0, 50)
    b.kernel("void (anonymous namespace)::barrier_kernel(unsigned int**)", 60, 2, 5, grid=(1, 1, 1))
    b.row("cpu_op", "aten::copy_", 9, 5).copy("PtoP", MB, 70, 10, 10, launch="cudaMemcpyAsync")
    call = only(judge(b))
    assert (call["engine"], call["num_copies"], call["sms"], call["sm_us"]) == ("copy_engine", 1, 1, 2)


@pytest.mark.parametrize(("launch", "node"), [("cudaGraphLaunch", True), ("cudaGraphLaunch", False), ("replay", True)])
def test_graph_replay_is_judged_by_name_and_says_so(judge, launch, node):
    b = Builder().row("cpu_op", "c10d::_allgather_base_", 0, 50)  # around the replay: explains none of its rows
    b.row("cuda_runtime", launch, 5, 3, correlation=9)
    for at in (100, 200):
        for flag in (0, 30):
            b.copy("PtoP", 4, at + flag, 1, None, correlation=9, graph__node__id=4)
        b.copy("PtoP", MB, at + 10, 15, None, correlation=9, graph__node__id=5)
    b.kernel("ncclSymkDevKernel_ReduceScatter_LD_sum_f32(x)", 300, 50, None, correlation=9, graph__node__id=8)
    b.copy("DtoD", MB, 400, 10, None, correlation=9, graph__node__id=9)
    for row in b.rows:
        row["args"] = {k: v for k, v in row["args"].items() if node or k != "graph node id"}
    report = judge(b)
    calls = [c for c in report["ranks"][0]["calls"] if c["engine"] != "none_seen"]
    assert [(c["kind"], c["engine"], c["num_copies"], c["num_flags"]) for c in calls] == [
        ("peer_copy", "copy_engine", 1, 2),
        ("peer_copy", "copy_engine", 1, 2),
        ("reduce_scatter", "symmetric_kernel", 0, 0),
    ]
    assert all(c["guess"] and "CUDA-graph replay" in c["notes"][0] for c in calls)
    assert report["ranks"][0]["num_local_copies"] == 1
    assert any("judged by name alone" in w for w in report["warnings"])


def test_a_graph_that_one_of_our_own_calls_launches_belongs_to_that_call(judge):
    b = Builder()
    for at, kind in ((0, "all_gather"), (100, "reduce_scatter")):
        b.row("cpu_op", f"fsdp_symm::{kind}", at, 50)
        b.row("cuda_runtime", "cudaGraphLaunch", at + 5, 3, correlation=at + 1)
        for start, nbytes in ((10, 4), (12, MB), (30, MB), (48, 4)):
            b.copy("DtoD", nbytes, at + start, 2, None, correlation=at + 1, graph__node__id=4)
    b.row("cuda_runtime", "cudaGraphLaunch", 300, 3, correlation=9)  # the user's own, outside of any call
    b.copy("DtoD", MB, 310, 2, None, correlation=9, graph__node__id=4)
    report = judge(b)
    calls = report["ranks"][0]["calls"]
    assert [(c["kind"], c["engine"], c["num_copies"], c["num_flags"], c["guess"]) for c in calls] == [
        ("all_gather", "copy_engine", 2, 2, False),
        ("reduce_scatter", "copy_engine", 2, 2, False),
    ]
    assert report["ranks"][0]["num_local_copies"] == 1


@pytest.mark.parametrize(("copies", "engine"), [(0, "plain_kernel"), (1, "mixed")])
def test_the_driver_s_copy_kernels_are_kernels(judge, copies, engine):
    b = Builder().row("cpu_op", "fsdp_symm::all_gather", 0, 50)
    b.row("cuda_runtime", "cudaGraphLaunch", 5, 3, correlation=1)
    for at, name in ((60, "memcpy32_post"), (70, "memcpy128"), (90, "memcpy32_post")):
        b.kernel(name, at, 2, None, correlation=1, graph__node__id=4, grid=(4, 1, 1))
    for at in range(copies):
        b.copy("DtoD", MB, 80 + at, 2, None, correlation=1, graph__node__id=4)
    b.kernel("memcpy32_post", 200, 2, None, correlation=7, graph__node__id=4)  # a user's graph: computation
    report = judge(b)
    call = only(report)
    assert (call["engine"], call["sms"], call["kernels"]) == (engine, 4, ["memcpy128", "memcpy32_post"])


def test_copies_of_our_own_wire_whose_calls_are_not_recorded_are_joined_by_their_external_id(judge):
    """Kineto records none of the driver's copy calls."""
    b = Builder().row("cpu_op", "fsdp_symm::dispatch", 0, 50, External__id=41).row("cpu_op", "aten::mm", 60, 9)
    for at, nbytes in ((10, 4), (12, MB), (30, 4)):
        b.copy("DtoD", nbytes, 100 + at, 2, None, correlation=900 + at, External__id=41)
    b.copy("DtoD", MB, 200, 2, None, correlation=999, External__id=42)  # nobody's
    report = judge(b)
    call = only(report)
    assert (call["kind"], call["engine"], call["num_copies"], call["num_flags"]) == ("dispatch", "copy_engine", 1, 2)
    assert report["ranks"][0]["num_local_copies"] == 1


def test_coalesced_calls_share_the_launch_that_ends_their_group(judge):
    b = Builder()
    for at in (0, 20):
        b.collective("_allgather_base", at, 15, (MB, 8 * MB))
    b.row("user_annotation", "nccl:coalesced", 40, 20).kernel(PLAIN, 70, 30, 45)
    call = only(judge(b))
    assert (call["kind"], call["engine"], call["bytes"]) == ("all_gather", "plain_kernel", 2 * 8 * MB * 2)
    assert "coalesces 2 calls" in call["notes"]


def test_metadata_on_the_kernel_names_a_call_whose_launch_is_missing(judge):
    b = Builder()
    b.kernel(PLAIN, 50, 10, None, **{
        "Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 80, "dtype": "Float",
        "Group size": 8, "Process Group Name": "3",
    })  # fmt: skip
    call = only(judge(b))
    assert (call["kind"], call["bytes"], call["group"], call["guess"]) == ("all_gather", 320, "3", False)


def test_gpu_annotation_names_a_kernel_where_the_trace_has_no_cpu_rows(judge):
    b = Builder().kernel("ncclDevKernel_SendRecv(x)", 50, 10, None, stream=7)
    b.row("gpu_user_annotation", "nccl:all_to_all", 49.5, 11, tid=7, pid=0)
    call = only(judge(b))
    assert (call["kind"], call["guess"]) == ("all_to_all", True)


def test_waits_and_inits_are_no_collectives(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel(PLAIN, 50, 10, 5)
    for name in ("wait", "init"):
        b.row("cpu_op", "record_param_comms", 60, 5, **{"Collective name": name})
    b.row("cpu_op", "record_param_comms", 80, 5)
    assert only(judge(b))["kind"] == "all_gather"


def test_group_of_one_moves_nothing(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, MB), 1).copy("DtoD", 2 * MB, 50, 10, 5)
    assert only(judge(b))["engine"] == "none_seen"


def test_call_without_device_rows_says_why(judge):
    b = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB)).kernel("vectorized_add", 500, 10, 400)
    call = only(judge(b))
    assert call["engine"] == "none_seen"
    assert "no device row belongs to it" in call["notes"][-1]
    b.kernel("somebodysKernel<float>(x)", 60, 10, 5)
    assert "unknown names: somebodysKernel" in only(judge(b))["notes"][-1]
    cpu_only = Builder().collective("_allgather_base", 0, 40, (MB, 8 * MB))
    report = judge(cpu_only)
    assert "record with ProfilerActivity.CUDA" in only(report)["notes"][-1]
    assert [r["topic"] for r in report["reasons"]] == ["no_device_rows"]


def test_host_wire_by_module(judge):
    report = judge(host_wire())
    calls = report["ranks"][0]["calls"]
    assert [(c["kind"], c["module"], c["engine"], c["wire"], c["bytes"]) for c in calls] == [
        ("all_gather", "layers.0", "host", "shared memory", 4 * MB),
        ("all_gather", "layers.1", "host", "shared memory", 4 * MB),
        ("reduce_scatter", "layers.1", "host", "shared memory", 8 * MB),
    ]
    assert [c["duration_us"] for c in calls] == [50, 50, 80]
    assert calls[0]["busbw_gbps"] == pytest.approx(4 * MB / 50 / 1e3 / 2)
    assert report["verdict"].startswith("2 of 2 all-gathers were moved by the host (shared memory)")


def test_plain_engine_around_gloo_counts_once(judge):
    b = host_wire("plain")
    dims = {"Input Dims": [[2 * MB], [MB]], "Input type": ["float", "float"]}
    for at in (110, 310):
        b.row("cpu_op", "c10d::_allgather_base_", at, 10, **dims)
        b.row(
            "user_annotation", "gloo:all_gather", at + 5, 30, tid=2, **{"Input Dims": [[MB]], "Input type": ["float"]}
        )
    b.row("cpu_op", "c10d::_reduce_scatter_base_", 610, 10, **dims)
    b.row("user_annotation", "gloo:all_reduce", 620, 40, tid=2)
    calls = judge(b)["ranks"][0]["calls"]
    assert [(c["kind"], c["engine"], c["wire"], c["duration_us"]) for c in calls] == [
        ("all_gather", "host", "gloo", 30),
        ("all_gather", "host", "gloo", 30),
        ("reduce_scatter", "host", "gloo", 40),
    ]
    assert [c["module"] for c in calls] == ["layers.0", "layers.1", "layers.1"]
    assert [c["bytes"] for c in calls] == [4 * MB, 4 * MB, 8 * MB]


def test_own_annotation_around_nccl_counts_once_and_the_device_decides(judge):
    b = Builder().row("cpu_op", "fsdp_symm::all_gather", 0, 60, module="blocks.3", bytes=8 * MB, engine="nccl",
                      group="dp", group_size=8)  # fmt: skip
    copy_engine_gather(b, 10)
    call = only(judge(b))
    assert (call["module"], call["group"], call["engine"], call["bytes"]) == ("blocks.3", "dp", "copy_engine", 8 * MB)


def test_fsdp_annotation_names_the_module_and_the_root_has_no_name(judge):
    b = Builder()
    for at, name in ((0, "FSDP::all_gather (model.layers.0)"), (1000, "FSDP::all_gather"), (2000, "FSDP::pre_forward")):
        b.row("user_annotation", name, at, 60)
        b.collective("_allgather_base", at + 5, 40, (MB, 8 * MB)).kernel(PLAIN, at + 70, 10, at + 10)
    assert [c["module"] for c in judge(b)["ranks"][0]["calls"]] == ["model.layers.0", "(root)", ""]


@pytest.mark.parametrize(
    ("kernel", "driver", "topic", "words"),
    [
        ("ncclSymkDevKernel_AllGather_STMC(x)", 13000, "symmetric_kernel_instead", "CTA policy"),
        ("ncclSymkDevKernel_AllGather_STMC(x)", 12040, "symmetric_kernel_instead", "driver is too old: 12040"),
        (PLAIN, 13000, "no_window", "rendezvoused"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(x)", 13000, "nccl_too_old", "NCCL 2.28 or newer"),
    ],
)
def test_reasons_rest_on_evidence(judge, kernel, driver, topic, words):
    b = Builder(cuda_driver_version=driver).collective("_allgather_base", 0, 40, (MB, 8 * MB))
    b.kernel(kernel, 50, 10, 5, grid=(2, 1, 1))
    (reason,) = judge(b)["reasons"]
    assert reason["topic"] == topic
    assert words in reason["checks"][0]
    assert "2 SMs" in reason["evidence"]


def test_reduce_scatter_left_behind_is_named(judge):
    b = copy_engine_gather(Builder(), 0)
    b.collective("_reduce_scatter_base", 1000, 40, (8 * MB, MB))
    b.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 1100, 10, 1005)
    assert "reduce_scatter_plain" in [r["topic"] for r in judge(b)["reasons"]]


def test_old_traces_round_so_an_inner_row_may_end_later(judge):
    b = Builder().row("cpu_op", "c10d::allreduce_", 0, 40)
    b.row("cpu_op", "record_param_comms", 5, 36).row("user_annotation", "nccl:all_reduce", 6, 35)
    b.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 60, 10, 10)
    assert only(judge(b))["kind"] == "all_reduce"


def test_gloo_work_of_calls_before_the_window_is_its_own_guess(judge):
    b = host_wire()
    b.rows = b.rows[:1]
    b.row("user_annotation", "gloo:all_reduce", 10, 5, tid=2)
    b.row("cpu_op", "c10d::_reduce_scatter_base_", 20, 5).row("user_annotation", "gloo:all_reduce", 30, 7, tid=2)
    calls = judge(b)["ranks"][0]["calls"]
    assert [(c["kind"], c["duration_us"], c["guess"]) for c in calls] == [
        ("all_reduce", 5, True),
        ("reduce_scatter", 7, False),
    ]


def test_empty_calls_count_for_nothing(judge, cli, tmp_path):
    b = copy_engine_gather(Builder(), 0).collective("_allgather_base", 900, 40, (0, 0))
    report = judge(b)
    assert report["verdict"].startswith("1 of 1 all-gather used the copy engine; ")
    assert report["reasons"] == [] or all(r["topic"] != "no_device_rows" for r in report["reasons"])
    assert cli("inspect", tmp_path / "trace.json", "--expect", "copy-engine").status == 0
