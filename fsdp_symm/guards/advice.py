"""Conditions that keep a group from the copy engine, and advice: nothing here forbids symmetric windows."""

from __future__ import annotations

from fsdp_symm.errors import problem
from fsdp_symm.guards.common import (
    COPY_ENGINE_DRIVER,
    COPY_ENGINE_SINCE,
    FALSE,
    HIERARCHICAL_SINCE,
    ONE_SIDED_SINCE,
    WINDOWS_SINCE,
    Finding,
    Rule,
    before,
    dots,
    group_text,
    nccl_text,
)
from fsdp_symm.guards.facts import GroupFacts


def _policy(facts: GroupFacts) -> Finding | None:
    if facts.nccl_version is None or set(facts.policies) == {"zero"}:
        return None
    env = facts.environment.get("NCCL_CTA_POLICY")
    forced = facts.policy_source == "env"
    text = problem(
        f"{group_text(facts)}: the CTA policy is not zero, so NCCL keeps to SM kernels",
        found=f"policy {facts.policy}, " + (f"from NCCL_CTA_POLICY={env}" if forced else "from the group's options"),
        expected="policy zero on this very group; the groups of a device mesh do not inherit it",
        fix="unset NCCL_CTA_POLICY or set it to 2"
        if forced
        else "fsdp_symm.zero_cta_mesh(...), or pg_options=fsdp_symm.zero_cta_options(), or NCCL_CTA_POLICY=2",
    )
    return Finding("policy_not_zero", "degrades", text)


def _driver(facts: GroupFacts) -> Finding | None:
    if facts.driver_version is None or facts.driver_version >= COPY_ENGINE_DRIVER:
        return None
    text = problem(
        "copy engine: the driver is too old",
        found=f"a driver that reports CUDA {dots(facts.driver_version)}",
        expected=f"CUDA {dots(COPY_ENGINE_DRIVER)} or newer (NCCL src/ce_coll.cc:98)",
        fix="install driver 555 or newer, or the forward-compatibility package of a newer CUDA",
    )
    return Finding("driver_too_old", "degrades", text)


def _no_copy_engine(facts: GroupFacts) -> Finding | None:
    if not before(facts, COPY_ENGINE_SINCE) or before(facts, WINDOWS_SINCE):
        return None
    text = problem(
        "copy engine: NCCL is too old",
        found=nccl_text(facts),
        expected=f"NCCL {dots(COPY_ENGINE_SINCE)} or newer",
        fix="install torch 2.14 or newer, which brings NCCL 2.30",
    )
    return Finding("nccl_no_copy_engine", "degrades", text)


def _one_sided(facts: GroupFacts) -> Finding | None:
    """v2.28.9 src/enqueue.cc:2580 and src/scheduler/symmetric_sched.cc:30 ask for both windows; 2.29.2 brought
    ncclSymRegType_t."""
    if not before(facts, ONE_SIDED_SINCE) or before(facts, WINDOWS_SINCE):
        return None
    text = problem(
        "symmetric windows: this NCCL wants both buffers registered",
        found=nccl_text(facts),
        expected=f"NCCL {dots(ONE_SIDED_SINCE)} or newer, where one registered buffer is enough",
        fix="upgrade NCCL; until then in-place all-gathers are served, reduce-scatters take plain kernels",
    )
    return Finding("one_sided_registration", "degrades", text)


def _several_hosts(facts: GroupFacts) -> Finding | None:
    """2.28: nNodes == 1. 2.29.2 on: the LSA team covers the communicator (src/ce_coll.cc:118). 2.30.6 on: across
    hosts with RMA contexts and both buffers registered (ncclHierCeAvailable, src/ce_coll.cc:719-761)."""
    joined = facts.one_nvlink_domain is True and not before(facts, ONE_SIDED_SINCE)
    if facts.num_hosts <= 1 or joined:
        return None
    hint = "shard within a host (HSDP), or use a multi-node NVLink system"
    if facts.nccl_version is not None and facts.nccl_version >= HIERARCHICAL_SINCE:
        hint += "; NCCL's hierarchical copies need NCCL_NUM_RMA_CTX > 0 and RMA-capable networking"
    text = problem(
        f"{group_text(facts)}: the ranks are on several hosts",
        found=f"{facts.num_hosts} hosts, {nccl_text(facts)}, one NVLink domain: {_known(facts.one_nvlink_domain)}",
        expected="all ranks in one NVLink domain, and NCCL 2.29.2 or newer where that spans hosts",
        fix=hint,
    )
    return Finding("several_hosts", "degrades", text)


def _no_nvlink(facts: GroupFacts) -> Finding | None:
    if facts.one_nvlink_domain is not False or facts.num_hosts > 1:
        return None
    text = problem(
        f"{group_text(facts)}: the ranks are not in one NVLink domain",
        found="a GPU of the group that has no active NVLink",
        expected="direct NVLink, or NVSwitch, between all GPUs of the group",
        fix="choose GPUs of one NVLink domain with CUDA_VISIBLE_DEVICES, or shard over smaller groups",
    )
    return Finding("no_nvlink_domain", "degrades", text)


def _known(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


# --- warns -------------------------------------------------------------------------------------------------


def _connections(facts: GroupFacts) -> Finding | None:
    """NVIDIA/nccl#2238: copy-engine barriers are stream memory operations, which wait in the one hardware queue."""
    if facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    text = problem(
        "copies will not overlap with compute",
        found="CUDA_DEVICE_MAX_CONNECTIONS=1",
        expected="unset, or 8 and more: with one hardware queue kernels wait behind the collective's barrier",
        fix="unset CUDA_DEVICE_MAX_CONNECTIONS (NVIDIA/nccl#2238)",
    )
    return Finding("max_connections", "warns", text)


def _expandable(facts: GroupFacts) -> str:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    values = [f"{n}={facts.environment[n]}" for n in names if n in facts.environment]
    return next((v for v in values if "expandable_segments:true" in v.lower().replace(" ", "")), "")


def _allocator_hook(facts: GroupFacts) -> Finding | None:
    """ProcessGroupNCCL registers every segment of the caching allocator, and drops the hook by itself under
    expandable segments (ProcessGroupNCCL.cpp, constructor)."""
    name = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    value = facts.environment.get(name)
    if value is None or value.lower() in FALSE or _expandable(facts):
        return None
    text = problem(
        "torch registers all its memory with NCCL",
        found=f"{name}={value}",
        expected="unset: arenas come from ncclMemAlloc and are registered once, as symmetric windows; the hook adds "
        "ordinary registrations, which no copy engine uses, for every other segment and every communicator",
        fix=f"unset {name}",
    )
    return Finding("register_allocator_hook", "warns", text)


def _expandable_segments(facts: GroupFacts) -> Finding | None:
    """pytorch#187465, #165419: torch's own symmetric pools and expandable segments."""
    found = _expandable(facts)
    if not found:
        return None
    text = problem(
        "expandable segments are on",
        found=found,
        expected="fixed segments: our arenas, not from the caching allocator, work all the same; torch's own "
        "symmetric-memory pools and register_mem_pool are at risk (pytorch#187465)",
        fix="unset it; keep it, without strict=True, if nothing else in this process allocates torch symmetric memory "
        "from a MemPool",
    )
    return Finding("expandable_segments", "warns", text)


def _shared_gpu(facts: GroupFacts) -> Finding | None:
    if not facts.shared_gpus or "CUDA_MPS_PIPE_DIRECTORY" in facts.environment:
        return None
    text = problem(
        f"{group_text(facts)}: ranks that share a GPU take turns unless MPS runs",
        found="CUDA_MPS_PIPE_DIRECTORY is not set (a daemon with the default folder cannot be seen from here)",
        expected="the MPS daemon, so that ranks run at the same time; timings are meaningless without it",
        fix="start nvidia-cuda-mps-control -d",
    )
    return Finding("shared_gpu_time_slicing", "warns", text)


def _crowded_gpu(facts: GroupFacts) -> Finding | None:
    """Seen with four ranks on an H200 (132 SMs), NCCL 2.30.7: training hung at its first collectives, three of three
    times, and trained with NCCL_MAX_CTAS=8."""
    ranks = facts.ranks_per_gpu
    if facts.nccl_version is None or ranks <= 2 or "NCCL_MAX_CTAS" in facts.environment:
        return None
    text = problem(
        f"{group_text(facts)}: NCCL's kernels may not all fit on a GPU that several ranks share",
        found=f"{ranks} ranks on one GPU, NCCL_MAX_CTAS not set",
        expected="room for the kernels of all ranks at once: each waits on its SMs for the others', and training hangs "
        "if one cannot start",
        fix=f"export NCCL_MAX_CTAS={max(32 // ranks, 1)}",
    )
    return Finding("shared_gpu_crowded", "warns", text)


def _several_nccl(facts: GroupFacts) -> Finding | None:
    built, loaded = facts.nccl_built, facts.nccl_version
    mixed = built is not None and loaded is not None and built[:2] != loaded[:2]
    if len(facts.nccl_libraries) <= 1 and not mixed:
        return None
    text = problem(
        "NCCL: not the one library that torch was built with",
        found=f"built with {dots(built)}, loaded {dots(loaded)}; mapped: {', '.join(facts.nccl_libraries) or 'none'}",
        expected="one libnccl of the release that torch was built with: windows belong to the library that made them, "
        "and device communicators of another release are refused",
        fix="remove LD_PRELOAD and LD_LIBRARY_PATH entries that bring another libnccl",
    )
    return Finding("several_nccl", "warns", text)


def _blocking_launches(facts: GroupFacts) -> Finding | None:
    if facts.environment.get("CUDA_LAUNCH_BLOCKING") != "1":
        return None
    text = problem(
        "nothing overlaps",
        found="CUDA_LAUNCH_BLOCKING=1",
        expected="unset",
        fix="unset CUDA_LAUNCH_BLOCKING",
    )
    return Finding("launch_blocking", "warns", text)


DEGRADES: tuple[Rule, ...] = (_no_copy_engine, _driver, _several_hosts, _no_nvlink, _one_sided, _policy)
WARNS: tuple[Rule, ...] = (
    _connections, _allocator_hook, _expandable_segments, _shared_gpu, _crowded_gpu,
    _several_nccl, _blocking_launches,
)  # fmt: skip
