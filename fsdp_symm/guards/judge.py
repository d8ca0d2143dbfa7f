"""From facts to findings, and to the engine that NCCL will use. Pure functions."""

from __future__ import annotations

from typing import Literal

from fsdp_symm.guards.advice import DEGRADES, WARNS
from fsdp_symm.guards.blocks import BLOCKS
from fsdp_symm.guards.common import AVG_SINCE, ONE_SIDED_SINCE, Finding, before, dots, nccl_text
from fsdp_symm.guards.facts import GroupFacts

Engine = Literal["copy engine", "symmetric kernel", "plain kernel"]


def findings(facts: GroupFacts) -> tuple[Finding, ...]:
    """All that stands in the way, worst first; within a severity in the order in which NCCL would meet it."""
    found = (rule(facts) for rule in (*BLOCKS, *DEGRADES, *WARNS))
    return tuple(f for f in found if f is not None)


def first_line(finding: Finding) -> str:
    """What failed and what was found, on one line, for tables."""
    lines = finding.text.splitlines()
    return f"{lines[0]} ({lines[1].strip().removeprefix('found: ')})"


def expected_engine(
    facts: GroupFacts,
    role: Literal["all_gather", "reduce_scatter"],
    *,
    op: Literal["sum", "avg", "premul_sum"] = "sum",
) -> tuple[Engine, str]:
    """What NCCL will use for buffers of our arenas, and why: the first unmet condition, or the rule that applies.

    All-gathers run in place in a window (both buffers registered); reduce-scatters have only their input in one.

    Args:
        op: the reduction as NCCL sees it; where AVG is not implemented our wire sends SUM and scales.
    """
    found = findings(facts)
    blocking = next((f for f in found if f.severity == "blocks"), None)
    if blocking is not None:
        return "plain kernel", first_line(blocking)
    if role == "reduce_scatter":
        return _reduce_scatter_engine(facts, found, op)
    return _all_gather_engine(facts, found)


def _all_gather_engine(facts: GroupFacts, found: tuple[Finding, ...]) -> tuple[Engine, str]:
    apart = next((f for f in found if f.code in ("several_hosts", "no_nvlink_domain")), None)
    if apart is not None:
        return "plain kernel", first_line(apart)
    unmet = next((f for f in found if f.severity == "degrades" and f.code != "one_sided_registration"), None)
    if unmet is None:
        return "copy engine", f"zero-CTA policy, {nccl_text(facts)}, both buffers in one window"
    reason = first_line(unmet)
    # v2.30.7 src/enqueue.cc:31,3110: elements, not bytes
    blackwell = facts.capability is not None and facts.capability >= (10, 0) and not before(facts, ONE_SIDED_SINCE)
    if blackwell and unmet.code == "policy_not_zero":
        limit = facts.environment.get("NCCL_SYM_CE_THRESHOLD", str(8 * 2**20))
        reason += f"; on Blackwell gathers of more than {limit} elements a rank use copy engines all the same"
    return "symmetric kernel", reason


def _reduce_scatter_engine(facts: GroupFacts, found: tuple[Finding, ...], op: str) -> tuple[Engine, str]:
    apart = next((f for f in found if f.code in ("several_hosts", "no_nvlink_domain")), None)
    if apart is not None:
        return "plain kernel", first_line(apart)
    if op == "premul_sum":
        return "plain kernel", "PREMUL_SUM has no symmetric kernel in any NCCL"
    if before(facts, ONE_SIDED_SINCE):
        # v2.28.9 src/scheduler/symmetric_sched.cc:30, v2.27.7 src/enqueue.cc:348
        return "plain kernel", f"{nccl_text(facts)} wants input and output in windows; ours registers the input"
    if op == "avg" and before(facts, AVG_SINCE):
        return "plain kernel", f"{nccl_text(facts)} has no symmetric AVG (since {dots(AVG_SINCE)}); send SUM and scale"
    return "symmetric kernel", "a copy engine cannot add; the input is in a window"
