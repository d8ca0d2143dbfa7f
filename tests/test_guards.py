from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_symm import guards
from fsdp_symm.guards import GroupFacts, expected_engine, facts, findings, first_line

HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
TWO = {
    "ranks": (0, 1), "hosts": ("a", "a"), "devices": ("GPU-0", "GPU-1"), "policies": ("zero", "zero"),
    "nccl_version": (2, 30, 7), "nccl_built": (2, 30, 7),
}  # fmt: skip
SHARED = {"devices": ("GPU-0",) * 4, "nvls": "off"}
TOLD = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}


def nccl(*version: int) -> dict:
    return {"nccl_version": version, "nccl_built": version}


# code, severity, facts that differ from the good ones, words that the text must hold
CASES = [
    ("no_nccl", "blocks", {"nccl_version": None, "nccl_built": None}, ["without NCCL", "backend='host'"]),
    ("nccl_no_windows", "blocks", nccl(2, 26, 5), ["NCCL 2.26.5", "2.27.0", "2.29.2"]),
    ("windows_disabled", "blocks", {"environment": {"NCCL_WIN_ENABLE": "0"}}, ["NCCL_WIN_ENABLE=0", "unset NCCL_WIN"]),
    ("windows_disabled", "blocks", {"environment": {"NCCL_CUMEM_ENABLE": "0"}}, ["NCCL_CUMEM_ENABLE=0"]),
    ("windows_disabled", "blocks", {"environment": {"NCCL_P2P_DISABLE": "1"}}, ["NCCL_P2P_DISABLE=1"]),
    ("no_peer_access", "blocks", {"peer_access": False}, ["can_device_access_peer is False", "NVLink"]),
    ("two_rank_nvls_hang", "blocks", TWO, ["NCCL 2.30.7", "NVLS not switched off", "2.31.2", "NCCL_NVLS_ENABLE=0"]),
    ("two_rank_nvls_hang", "blocks", {**TWO, "nvls": "on", **nccl(2, 29, 7)}, ["NCCL 2.29.7", "NVLS on"]),
    ("policy_differs", "blocks", {"policies": ("zero", "default", "zero", "zero")}, ["rank 1: default"]),
    ("capture_in_progress", "blocks", {"capturing": True}, ["capture in progress", "before torch.cuda.graph"]),
    ("device_mismatch", "blocks", {"model_device": 3}, ["current device cuda:0, model on cuda:3", "set_device(3)"]),
    ("shared_gpu_refused", "blocks", SHARED, ["4 ranks on 1 GPUs", "NCCL_MULTI_RANK_GPU_ENABLE=unset"]),
    ("symm_backend_taken", "blocks", {"symm_backend": "NVSHMEM", "wanted_symm_backend": "CUDA"}, ["NVSHMEM", "CUDA"]),
    (
        "symm_backend_taken",
        "blocks",
        {"symm_backend": "NCCL", "wanted_symm_backend": "CUDA", "environment": {"TORCH_SYMMMEM": "NCCL"}},
        ["TORCH_SYMMMEM=NCCL"],
    ),
    ("nccl_no_copy_engine", "degrades", nccl(2, 27, 7), ["NCCL 2.27.7", "2.28.3"]),
    ("driver_too_old", "degrades", {"driver_version": (12, 4)}, ["reports CUDA 12.4", "CUDA 12.5", "driver 555"]),
    ("several_hosts", "degrades", {"hosts": ("a", "a", "b", "b")}, ["2 hosts", "domain: unknown", "HSDP"]),
    (
        "several_hosts",
        "degrades",
        {"hosts": ("a", "a", "b", "b"), "one_nvlink_domain": True, **nccl(2, 28, 9)},
        ["NCCL 2.28.9", "domain: yes", "2.29.2"],
    ),
    ("no_nvlink_domain", "degrades", {"one_nvlink_domain": False}, ["no active NVLink", "CUDA_VISIBLE_DEVICES"]),
    ("one_sided_registration", "degrades", nccl(2, 28, 9), ["NCCL 2.28.9", "2.29.2", "in-place all-gathers"]),
    ("policy_not_zero", "degrades", {"policies": ("default",) * 4}, ["policy default, from the group's options"]),
    (
        "policy_not_zero",
        "degrades",
        {"policies": ("efficiency",) * 4, "policy_source": "env", "environment": {"NCCL_CTA_POLICY": "1"}},
        ["policy efficiency, from NCCL_CTA_POLICY=1", "unset NCCL_CTA_POLICY"],
    ),
    ("max_connections", "warns", {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, ["CUDA_DEVICE_MAX_CONN"]),
    ("register_allocator_hook", "warns", {"environment": {HOOK: "true"}}, [f"{HOOK}=true", "ncclMemAlloc"]),
    (
        "expandable_segments",
        "warns",
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        ["expandable_segments:True", "not from the caching allocator", "pytorch#187465"],
    ),
    (
        "shared_gpu_time_slicing",
        "warns",
        {**SHARED, "environment": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}},
        ["CUDA_MPS_PIPE_DIRECTORY", "nvidia-cuda-mps-control -d"],
    ),
    ("shared_gpu_crowded", "warns", {**SHARED, "environment": TOLD}, ["4 ranks on one GPU", "NCCL_MAX_CTAS=8"]),
    ("several_nccl", "warns", {"nccl_libraries": ("/a/libnccl.so.2", "/b/libnccl.so.2")}, ["/b/libnccl.so.2"]),
    ("several_nccl", "warns", {"nccl_built": (2, 28, 9)}, ["built with 2.28.9, loaded 2.31.2", "LD_PRELOAD"]),
    ("launch_blocking", "warns", {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, ["CUDA_LAUNCH_BLOCKING=1"]),
]  # fmt: skip


def make(changes: dict) -> GroupFacts:
    return dataclasses.replace(GroupFacts(), **changes)


def codes(changes: dict) -> set[str]:
    return {f.code for f in findings(make(changes))}


@pytest.mark.parametrize(("code", "severity", "changes", "words"), CASES)
def test_each_guard_has_its_sentence(code, severity, changes, words):
    found = {f.code: f for f in findings(make(changes))}
    assert code in found, f"found {sorted(found)}"
    assert found[code].severity == severity
    lines = found[code].text.splitlines()
    assert [line.strip().split(":")[0] for line in lines[1:]] == ["found", "expected", "fix"]
    for word in words:
        assert word in found[code].text


def test_every_rule_is_covered():
    from fsdp_symm.guards.advice import DEGRADES, WARNS
    from fsdp_symm.guards.blocks import BLOCKS

    assert len({case[0] for case in CASES}) == len(BLOCKS) + len(DEGRADES) + len(WARNS)


def test_nothing_stands_in_the_way_of_a_good_group():
    assert findings(GroupFacts()) == ()
    assert expected_engine(GroupFacts(), "all_gather")[0] == "copy engine"
    assert expected_engine(GroupFacts(), "reduce_scatter")[0] == "symmetric kernel"


@pytest.mark.parametrize(
    "changes",
    [
        {"nvls": "off"},
        nccl(2, 31, 2),
        nccl(2, 28, 9),
        {"policies": ("default", "default")},
        {"driver_version": (12, 4)},
        {"ranks": (0, 1, 2), "hosts": ("a",) * 3, "devices": ("x", "y", "z"), "policies": ("zero",) * 3},
    ],
)
def test_two_rank_groups_are_blocked_only_where_they_can_hang(changes):
    assert "two_rank_nvls_hang" in codes(TWO)
    assert "two_rank_nvls_hang" not in codes({**TWO, **changes})


def test_blackwell_takes_copy_engines_without_the_policy_so_two_ranks_can_hang():
    assert "two_rank_nvls_hang" in codes({**TWO, "policies": ("default",) * 2, "capability": (10, 0)})


def test_the_allocator_hook_is_off_under_expandable_segments():
    env = {HOOK: "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}
    assert codes({"environment": env}) == {"expandable_segments"}
    assert codes({"environment": {HOOK: "0"}}) == set()


def test_ranks_may_share_a_gpu_when_nccl_was_told():
    env = {**TOLD, "NCCL_MAX_CTAS": "8"}
    assert codes({**SHARED, "environment": env}) == set()
    assert "shared_gpu_refused" in codes({**SHARED, "environment": env, **nccl(2, 29, 7)})
    two = {"ranks": (0, 1), "hosts": ("a",) * 2, "devices": ("GPU-0",) * 2, "policies": ("zero",) * 2}
    assert codes({**two, "environment": TOLD}) == set()  # the kernels of two fit


def test_a_backend_that_nobody_needs_is_no_finding():
    assert codes({"symm_backend": "CUDA"}) == set()


@pytest.mark.parametrize(
    ("changes", "engine", "word"),
    [
        ({}, "copy engine", "zero-CTA policy"),
        (nccl(2, 28, 9), "copy engine", "both buffers"),
        (nccl(2, 27, 7), "symmetric kernel", "too old"),
        ({"driver_version": (12, 4)}, "symmetric kernel", "12.4"),
        ({"policies": ("default",) * 4}, "symmetric kernel", "policy"),
        ({"policies": ("default",) * 4, "capability": (10, 0)}, "symmetric kernel", "8388608 elements"),
        ({"hosts": ("a", "b", "c", "d")}, "plain kernel", "4 hosts"),
        ({"one_nvlink_domain": False}, "plain kernel", "NVLink"),
        (TWO, "plain kernel", "can hang"),
        (nccl(2, 26, 2), "plain kernel", "too old"),
    ],
)
def test_engine_of_all_gathers(changes, engine, word):
    found, reason = expected_engine(make(changes), "all_gather")
    assert (found, word in reason) == (engine, True), reason


@pytest.mark.parametrize(
    ("changes", "op", "engine", "word"),
    [
        ({}, "sum", "symmetric kernel", "cannot add"),
        ({}, "avg", "symmetric kernel", "cannot add"),
        ({"policies": ("default",) * 4}, "sum", "symmetric kernel", "cannot add"),
        (nccl(2, 29, 7), "sum", "symmetric kernel", "cannot add"),
        (nccl(2, 29, 7), "avg", "plain kernel", "2.30.3"),
        (nccl(2, 28, 9), "sum", "plain kernel", "input and output"),
        ({}, "premul_sum", "plain kernel", "PREMUL_SUM"),
        ({"hosts": ("a", "b", "c", "d")}, "sum", "plain kernel", "hosts"),
    ],
)
def test_engine_of_reduce_scatters(changes, op, engine, word):
    found, reason = expected_engine(make(changes), "reduce_scatter", op=op)
    assert (found, word in reason) == (engine, True), reason


VERSION = st.tuples(st.just(2), st.integers(25, 33), st.integers(0, 9))
ENV = st.dictionaries(st.sampled_from(guards.ENVIRONMENT), st.sampled_from(["0", "1", "2", "", "ZERO", "x:y"]))


@st.composite
def any_facts(draw) -> GroupFacts:
    size = draw(st.integers(1, 9))
    per_rank = lambda values: tuple(draw(st.lists(st.sampled_from(values), min_size=size, max_size=size)))  # noqa: E731
    return GroupFacts(
        ranks=tuple(range(size)),
        nccl_version=draw(st.none() | VERSION),
        nccl_built=draw(st.none() | VERSION),
        driver_version=draw(st.none() | st.tuples(st.integers(11, 13), st.integers(0, 9))),
        capability=draw(st.none() | st.tuples(st.integers(7, 12), st.integers(0, 9))),
        hosts=per_rank(["a", "b"]),
        devices=per_rank(["GPU-0", "GPU-1", "GPU-2"]),
        policies=per_rank(["zero", "default", "efficiency"]),
        policy_source=draw(st.sampled_from(["config", "env"])),
        nvls=draw(st.sampled_from(["on", "off", "unknown"])),
        peer_access=draw(st.none() | st.booleans()),
        one_nvlink_domain=draw(st.none() | st.booleans()),
        current_device=draw(st.none() | st.integers(0, 3)),
        model_device=draw(st.none() | st.integers(0, 3)),
        capturing=draw(st.booleans()),
        symm_backend=draw(st.sampled_from([None, "CUDA", "NCCL"])),
        wanted_symm_backend=draw(st.sampled_from([None, "CUDA", "NCCL"])),
        environment=draw(ENV),
        nccl_libraries=draw(st.sampled_from([(), ("/a/libnccl.so.2",), ("/a/libnccl.so.2", "/b/libnccl.so")])),
    )


@given(any_facts())
def test_any_facts_give_well_formed_findings(group):
    found = findings(group)
    assert len({f.code for f in found}) == len(found)
    order = [["blocks", "degrades", "warns"].index(f.severity) for f in found]
    assert order == sorted(order)
    for finding in found:
        lines = finding.text.split("\n")
        assert len(lines) == 4
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["found", "expected", "fix"]
        assert all(line.split(":", 1)[1].strip() for line in lines[1:])
        assert "\n" not in first_line(finding)
    gather, reason = expected_engine(group, "all_gather")
    assert reason
    assert gather != "copy engine" or not any(f.severity == "blocks" for f in found)
    for op in ("sum", "avg", "premul_sum"):
        assert expected_engine(group, "reduce_scatter", op=op)[0] != "copy engine"


def collected(device: str) -> list[dict]:
    import torch.distributed as dist

    found = guards.collect(dist.group.WORLD, torch.device(device), timeout_s=20)
    return [dataclasses.asdict(found)]


def test_collect_exchanges_what_the_ranks_run_on(ranks2):
    first, second = (rows[0] for rows in ranks2.run(collected, "cpu"))
    assert first["ranks"] == (0, 1)
    assert first["hosts"] == second["hosts"]
    assert len(set(first["hosts"])) == 1
    assert first["policies"] == ("default", "default")
    assert first["peer_access"] is None


@pytest.mark.parametrize(
    ("hosts", "devices", "links", "expected"),
    [
        (("a", "a"), ("GPU-x", "GPU-x"), None, True),  # one GPU
        (("a", "a"), ("GPU-x", "y"), {"x": 18, "y": 18}, None),  # whom they join is not said
        (("a", "a"), ("x", "y"), {"x": 18, "y": 0}, False),
        (("a", "a"), ("x", "MIG-y"), {"x": 0}, None),  # NVML lists other names
        (("a", "a"), ("x", "y"), None, None),  # no NVML
        (("a", "b"), ("x", "y"), {"x": 0}, None),
    ],
)
def test_gpus_without_links_are_in_no_nvlink_domain(monkeypatch, hosts, devices, links, expected):
    monkeypatch.setattr(facts, "active_nvlinks", lambda: links)
    assert facts.one_nvlink_domain(hosts, devices) is expected


def test_many_ranks_are_named_by_the_first_and_the_last():
    text = next(f.text for f in findings(make({"ranks": tuple(range(9)), "capturing": True})))
    assert "ranks 0 to 8 (9 in all)" in text


def test_several_nccl_libraries_are_seen_in_the_maps():
    maps = (
        "7f-80 r-xp 0 08:01 5 /x/nvidia/nccl/lib/libnccl.so.2\n81-82 r--p 0 08:01 5 /x/nvidia/nccl/lib/libnccl.so.2\n"
    )
    assert facts.nccl_libraries(maps) == ("/x/nvidia/nccl/lib/libnccl.so.2",)
    assert len(facts.nccl_libraries(maps + "83-84 r-xp 0 08:01 6 /usr/lib/libnccl.so.2.28.9\n")) == 2


def test_a_host_has_one_name_and_nccl_hostid_wins(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert facts.host_id() == facts.host_id() != ""
    monkeypatch.setenv("NCCL_HOSTID", "rack7")
    assert facts.host_id() == "rack7"
