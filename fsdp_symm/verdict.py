"""What will move each planned group's bytes, and what stands in the way: facts of the live groups, judged by guards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_symm import guards
from fsdp_symm.compat import ROLES, Role
from fsdp_symm.plan import GroupPlan


@dataclass(frozen=True)
class Verdict:
    """The judgement on one process group.

    Attributes:
        engines: by role, who will move the bytes and why.
        blocked: why the group must stay on the plain path, ``None`` if it need not.
        downgrades: texts about groups that work, but not by the engine that was asked for.
        advice: texts that a user should know.
    """

    engines: dict[Role, tuple[str, str]]
    blocked: str | None = None
    downgrades: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def judge_all(plans: Sequence[GroupPlan], *, dedicated: bool, timeout_s: float) -> dict[str, Verdict]:
    """Judge every planned process group once, by name. Collective over the groups that are not the host's.

    Args:
        plans: what is to be served.
        dedicated: whether all-gathers will run on communicators of their own, made with the zero-CTA policy.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        SymmMemTimeoutError: a rank did not come.
    """
    by_name: dict[str, list[GroupPlan]] = {}
    for plan in plans:
        by_name.setdefault(plan.name, []).append(plan)
    return {name: _judge(some, dedicated, timeout_s) for name, some in by_name.items()}


def _judge(plans: list[GroupPlan], dedicated: bool, timeout_s: float) -> Verdict:
    plan = plans[0]
    if plan.backend == "host":
        return Verdict(dict.fromkeys(ROLES, ("host", "shared memory, one host")))
    facts = guards.collect(plan.group, plan.device, timeout_s=timeout_s)
    if dedicated and facts.policy_source == "config":  # NCCL_CTA_POLICY would beat the dedicated one's options too
        facts = dataclasses.replace(facts, policies=("zero",) * len(facts.policies))
    # A reduce-scatter never runs on copy engines: its group needs no policy.
    gathers = any(ring.role == "all_gather" for plan in plans for ring in plan.rings)
    findings = [f for f in guards.findings(facts) if gathers or f.code != "policy_not_zero"]
    blocks = [f.text for f in findings if f.severity == "blocks"]
    return Verdict(
        engines={role: guards.expected_engine(facts, role) for role in ROLES},
        blocked="\n".join(blocks) or None,
        downgrades=tuple(f.text for f in findings if f.severity == "degrades"),
        advice=tuple(f.text for f in findings if f.severity == "warns"),
    )
