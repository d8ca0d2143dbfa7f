"""What will move each planned group's bytes, and what stands in the way: facts of the live groups, judged by guards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_symm import guards
from fsdp_symm.compat import ROLES
from fsdp_symm.errors import problem
from fsdp_symm.memory.nccl_library import peer_addresses_known
from fsdp_symm.plan import LANES, GroupPlan, Lane

# Conditions that concern NCCL's all-gathers on copy engines and nothing else.
STAGED_ONLY = frozenset(
    ("policy_not_zero", "policy_differs", "two_rank_nvls_hang", "nccl_no_copy_engine", "driver_too_old")
)
# Settings that leave the engine as it is, but take away what it is for, or endanger other symmetric memory of the
# process: errors under ``strict`` all the same.
_UNDONE_BY_SETTINGS = frozenset(("max_connections", "register_allocator_hook", "expandable_segments"))
# Conditions that concern NCCL's collectives: our own copies need peer access, whatever it runs over.
_NCCL_ONLY = ("no_nvlink_domain",)
# All that stands in the way of torch's peer memory, which needs no NCCL, and what else concerns it.
PEER_MEMORY_BLOCKS = (
    "no_peer_access", "several_hosts", "capture_in_progress", "device_mismatch", "symm_backend_taken",
)  # fmt: skip
_PEER_MEMORY_WARNS = ("max_connections", "expandable_segments", "shared_gpu_time_slicing", "launch_blocking")
_PLACED = ("copy engine", "peer copies; placed directly")
_PULLED = ("copy engine", "peer copies, summed here by one kernel in rank order")

# What "auto" pulls, by the chunk of a rank in the type of the sum: from here on copies and a local sum take about as
# long as NCCL's symmetric kernel or less. Over NVLink they slow down GEMMs less, too
# (profiles/nvlink/reduce_scatter_w2.csv). Where ranks share a GPU all traffic goes to one memory
# (profiles/reduce_scatter_w2.csv and _w4): of more than two on one, only gradients that travel in a narrower type gain.
AUTO_PULL_BYTES = 32 << 20
AUTO_PULL_SHARED_BYTES = 64 << 20


def reduce_way(plans: Sequence[GroupPlan], ranks_per_gpu: int, asked: str) -> str:
    """Who reduces for one process group: ``"copy_engine"`` or ``"nccl"``.

    Args:
        plans: all plans of the group.
        ranks_per_gpu: most ranks of the group on one GPU.
        asked: one of them, or ``"auto"``: pulled if there is a chunk that gains, and none of those large ones loses.
    """
    if asked != "auto":
        return asked
    enough = AUTO_PULL_BYTES if ranks_per_gpu <= 1 else AUTO_PULL_SHARED_BYTES
    needs = [need for plan in plans for need in plan.needs if need.lane == "reduce_scatter"]
    large = [need for need in needs if need.nbytes // len(need.ranks) >= enough]
    gain = ranks_per_gpu <= 2 or all(need.narrow for need in large)
    return "copy_engine" if large and gain else "nccl"


@dataclass(frozen=True)
class Verdict:
    """The judgement on one process group.

    Attributes:
        engines: by lane, who will move the bytes and why.
        blocked: why the group must stay on the plain path, ``None`` if it need not.
        downgrades: texts about groups that work, but not by the engine that was asked for, or not beside the model.
        advice: texts that a user should know.
        staged: why shards cannot be placed directly, ``None`` if they can.
        reduce_way: who reduces where there is a choice: ``"copy_engine"`` or ``"nccl"``.
        widens: whether gradients of a narrower type than the sum's may travel as they are.
    """

    engines: dict[Lane, tuple[str, str]]
    blocked: str | None = None
    downgrades: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    staged: str | None = None
    reduce_way: str = "nccl"
    widens: bool = False


def judge_all(
    plans: Sequence[GroupPlan], *, dedicated: bool, timeout_s: float, reduce_scatter: str = "auto"
) -> dict[str, Verdict]:
    """Judge every planned process group once, by name. Collective over the groups that are not the host's.

    Args:
        plans: what is to be served.
        dedicated: whether all-gathers will run on communicators of their own, made with the zero-CTA policy.
        timeout_s: seconds to wait for the other ranks.
        reduce_scatter: how reduce-scatters were asked for: ``"auto"``, ``"copy_engine"`` or ``"nccl"``.

    Raises:
        SymmMemTimeoutError: a rank did not come.
    """
    by_name: dict[str, list[GroupPlan]] = {}
    for plan in plans:
        by_name.setdefault(plan.name, []).append(plan)
    return {name: _judge(some, dedicated, timeout_s, reduce_scatter) for name, some in by_name.items()}


def _judge(plans: list[GroupPlan], dedicated: bool, timeout_s: float, reduce_scatter: str) -> Verdict:
    plan = plans[0]
    if plan.backend == "host":
        engines = dict.fromkeys(LANES, ("host", "shared memory, one host"))
        engines["unshard"] = ("host", "shared memory; placed directly")
        return Verdict(engines, widens=True)
    if plan.backend == "cuda":
        return _judge_peer_memory(plan, timeout_s)
    facts = guards.collect(plan.group, plan.device, timeout_s=timeout_s)
    if dedicated and facts.policy_source == "config":  # NCCL_CTA_POLICY would beat the dedicated one's options too
        facts = dataclasses.replace(facts, policies=("zero",) * len(facts.policies))
    # Only NCCL's own copy-engine all-gathers need a policy, and can hang in pairs.
    staged = why_staged(facts)
    gathers = any(
        ring.role == "all_gather" or (staged and ring.role == "unshard") for plan in plans for ring in plan.rings
    )
    way = "nccl" if staged else reduce_way(plans, facts.ranks_per_gpu, reduce_scatter)
    nccl = gathers or (way == "nccl" and any(ring.role == "reduce_scatter" for plan in plans for ring in plan.rings))
    unconcerned = (*(() if gathers else STAGED_ONLY), *(() if nccl else _NCCL_ONLY))
    findings = [f for f in guards.findings(facts) if f.code not in unconcerned]
    blocks = [f.text for f in findings if f.severity == "blocks"]
    engines: dict[Lane, tuple[str, str]] = {role: guards.expected_engine(facts, role) for role in ROLES}
    engines["unshard"] = _PLACED
    if way == "copy_engine":
        engines["reduce_scatter"] = _PULLED
    undone, advice = _by_weight([f for f in findings if f.severity == "warns"])
    downgrades = [f.text for f in findings if f.severity == "degrades"] + undone
    if staged and reduce_scatter == "copy_engine":
        downgrades.append(
            problem(
                f"group {plan.name}, ranks {list(plan.ranks)}: reduce-scatters are not pulled",
                found=staged,
                expected="every peer's memory within reach",
                fix="reduce_scatter='auto' or 'nccl'",
            )
        )
    return Verdict(
        engines=engines,
        blocked="\n".join(blocks) or None,
        downgrades=tuple(downgrades),
        advice=tuple(advice),
        staged=staged,
        reduce_way=way,
        widens=way == "copy_engine",
    )


def _judge_peer_memory(plan: GroupPlan, timeout_s: float) -> Verdict:
    """Torch's peer memory needs no NCCL: only what keeps GPUs apart stands in its way."""
    facts = guards.collect(plan.group, plan.device, timeout_s=timeout_s, wanted_symm_backend="CUDA")
    findings = guards.findings(facts)
    blocks = [f.text for f in findings if f.code in PEER_MEMORY_BLOCKS]
    undone, advice = _by_weight([f for f in findings if f.code in _PEER_MEMORY_WARNS])
    return Verdict(
        engines={
            "unshard": _PLACED,
            "all_gather": ("copy engine", "peer copies into a staging buffer"),
            "reduce_scatter": _PULLED,
        },
        blocked="\n".join(blocks) or None,
        downgrades=tuple(undone),
        advice=tuple(advice),
        widens=True,
    )


def _by_weight(warned: Sequence[guards.Finding]) -> tuple[list[str], list[str]]:
    """Texts of the settings that are errors under ``strict``, and of mere advice."""
    undone = [f.text for f in warned if f.code in _UNDONE_BY_SETTINGS]
    return undone, [f.text for f in warned if f.code not in _UNDONE_BY_SETTINGS]


def why_staged(facts: guards.GroupFacts) -> str | None:
    """Why copy engines cannot reach every peer's memory from here."""
    if facts.num_hosts > 1:
        return f"the group spans {facts.num_hosts} hosts"
    if not peer_addresses_known():
        return "this NCCL does not tell peers' addresses (ncclGetPeerDevicePointer, 2.29)"
    return None
