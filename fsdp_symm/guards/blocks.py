"""Conditions under which symmetric windows and copy engines must not be used for a group."""

from __future__ import annotations

from fsdp_symm.errors import problem
from fsdp_symm.guards.common import (
    COPY_ENGINE_DRIVER,
    ONE_SIDED_SINCE,
    TWO_RANK_HANG,
    WINDOWS_SINCE,
    Finding,
    Rule,
    before,
    dots,
    group_text,
    nccl_text,
)
from fsdp_symm.guards.facts import GroupFacts


def _no_nccl(facts: GroupFacts) -> Finding | None:
    if facts.nccl_version is not None:
        return None
    text = problem(
        "symmetric windows: there is no NCCL",
        found="a torch build without NCCL",
        expected=f"NCCL {dots(WINDOWS_SINCE)} or newer",
        fix="install a CUDA build of torch; CPU ranks use backend='host'",
    )
    return Finding("no_nccl", "blocks", text)


def _no_windows(facts: GroupFacts) -> Finding | None:
    if not before(facts, WINDOWS_SINCE):
        return None
    text = problem(
        "symmetric windows: NCCL is too old",
        found=nccl_text(facts),
        expected=f"NCCL {dots(WINDOWS_SINCE)} or newer; {dots(ONE_SIDED_SINCE)} for everything here",
        fix="install torch 2.14 or newer, which brings NCCL 2.30",
    )
    return Finding("nccl_no_windows", "blocks", text)


def _two_rank_hang(facts: GroupFacts) -> Finding | None:
    """NVIDIA/nccl#2241 and #2290, fixed in 2.31.2: with NVLS the copy-engine barrier multicasts (v2.30.7
    src/ce_coll.cc:242-253), but the multicast team is only made for more than two ranks (src/sym_kernels.cc:443).
    Blackwell takes copy engines for large all-gathers without the policy as well (src/enqueue.cc:3110)."""
    low, high = TWO_RANK_HANG
    version = facts.nccl_version
    if version is None or not low <= version < high or facts.world_size != 2 or facts.nvls == "off":
        return None
    blackwell = facts.capability is not None and facts.capability >= (10, 0)
    no_copy_engine = facts.driver_version is not None and facts.driver_version < COPY_ENGINE_DRIVER
    if ("zero" not in facts.policies and not blackwell) or no_copy_engine:
        return None
    state = {"on": "NVLS on", "unknown": "NVLS not switched off"}[facts.nvls]
    text = problem(
        f"{group_text(facts)}: a copy-engine all-gather between two ranks can hang",
        found=f"{nccl_text(facts)}, two ranks, {state}, CTA policy {facts.policy}",
        expected=f"NCCL {dots(high)} or newer, or NVLS off, or a group of more than two ranks",
        fix="export NCCL_NVLS_ENABLE=0 before the process starts (NVIDIA/nccl#2241)",
    )
    return Finding("two_rank_nvls_hang", "blocks", text)


def _capture(facts: GroupFacts) -> Finding | None:
    if not facts.capturing:
        return None
    text = problem(
        f"{group_text(facts)}: a CUDA graph is being captured",
        found="a capture in progress on the current stream",
        expected="no capture while symmetric memory is allocated and registered",
        fix="call set_symm_mem_for_comm before torch.cuda.graph(...), and leave graphs off for switched modules",
    )
    return Finding("capture_in_progress", "blocks", text)


def _device(facts: GroupFacts) -> Finding | None:
    if facts.model_device is None or facts.current_device == facts.model_device:
        return None
    text = problem(
        f"{group_text(facts)}: the current CUDA device is not the model's",
        found=f"current device cuda:{facts.current_device}, model on cuda:{facts.model_device}",
        expected=f"current device cuda:{facts.model_device}",
        fix=f"torch.cuda.set_device({facts.model_device}) before init_process_group",
    )
    return Finding("device_mismatch", "blocks", text)


def _windows_off(facts: GroupFacts) -> Finding | None:
    """symmetricSupport = all CUDA P2P, NCCL_WIN_ENABLE and cuMem (2.28.9 src/init.cc:1376; 2.30.7 :1674)."""
    env = facts.environment
    wrong = [f"{n}=0" for n in ("NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE") if env.get(n) == "0"]
    wrong += ["NCCL_P2P_DISABLE=1"] if env.get("NCCL_P2P_DISABLE") == "1" else []
    if not wrong:
        return None
    text = problem(
        "symmetric windows: switched off by the environment",
        found=", ".join(wrong),
        expected="NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE not 0, NCCL_P2P_DISABLE not 1",
        fix=f"unset {' '.join(w.split('=')[0] for w in wrong)}",
    )
    return Finding("windows_disabled", "blocks", text)


def _peer_access(facts: GroupFacts) -> Finding | None:
    if facts.peer_access is not False:
        return None
    text = problem(
        f"{group_text(facts)}: the GPUs cannot address each other",
        found="torch.cuda.can_device_access_peer is False for a pair of the group's GPUs",
        expected="peer access between all GPUs of the group",
        fix="use GPUs joined by NVLink (see the matrix of fsdp-symm doctor)",
    )
    return Finding("no_peer_access", "blocks", text)


def _shared_refused(facts: GroupFacts) -> Finding | None:
    """2.30.7 src/init.cc:1055-1060; older releases fail with 'Duplicate GPU detected'."""
    allowed = facts.environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and not before(facts, (2, 30, 0))
    if facts.nccl_version is None or not facts.shared_gpus or allowed:
        return None
    text = problem(
        f"{group_text(facts)}: several ranks use one GPU",
        found=f"{len(facts.devices)} ranks on {len(set(facts.devices))} GPUs, {nccl_text(facts)}, "
        f"NCCL_MULTI_RANK_GPU_ENABLE={facts.environment.get('NCCL_MULTI_RANK_GPU_ENABLE', 'unset')}",
        expected="one GPU a rank; or NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1",
        fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or export NCCL_MULTI_RANK_GPU_ENABLE=1",
    )
    return Finding("shared_gpu_refused", "blocks", text)


def _policy_differs(facts: GroupFacts) -> Finding | None:
    if len(set(facts.policies)) <= 1:
        return None
    found = ", ".join(f"rank {r}: {p}" for r, p in list(zip(facts.ranks, facts.policies, strict=False))[:8])
    text = problem(
        f"{group_text(facts)}: the ranks have different CTA policies",
        found=found,
        expected="the same policy on every rank: one would copy while the other waits in a kernel",
        fix="pass the same options on every rank, and export NCCL_CTA_POLICY on all hosts or on none",
    )
    return Finding("policy_differs", "blocks", text)


def _symm_backend(facts: GroupFacts) -> Finding | None:
    """``symm_mem.set_backend`` is process-wide and frozen after the first allocation."""
    wanted = facts.wanted_symm_backend
    if wanted is None or facts.symm_backend in (None, wanted):
        return None
    text = problem(
        "torch's symmetric-memory backend of this process is another one",
        found=f"{facts.symm_backend}, chosen by TORCH_SYMMMEM={facts.environment['TORCH_SYMMMEM']}"
        if "TORCH_SYMMMEM" in facts.environment
        else f"{facts.symm_backend}, chosen by an earlier set_backend or allocation, or torch's default",
        expected=wanted,
        fix=f"backend='nccl' of this package needs none; else torch...symm_mem.set_backend({wanted!r}) first of all",
    )
    return Finding("symm_backend_taken", "blocks", text)


BLOCKS: tuple[Rule, ...] = (
    _no_nccl, _no_windows, _windows_off, _peer_access, _two_rank_hang, _policy_differs, _capture, _device,
    _shared_refused, _symm_backend,
)  # fmt: skip
