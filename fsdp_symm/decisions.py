"""The report of a switch, made from what was selected, planned and judged."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_symm import compat
from fsdp_symm.plan import GroupPlan, Member
from fsdp_symm.report import ReportRow, SymmMemReport
from fsdp_symm.selection import Skip
from fsdp_symm.verdict import Verdict


def make_report(
    members: list[Member], plans: tuple[GroupPlan, ...], skips: list[Skip], verdicts: dict[str, Verdict]
) -> SymmMemReport:
    """Served groups first, then what was left alone by reason, then HSDP's all-reduces."""
    rows = [row for plan in plans for row in _plan_rows(plan, verdicts[plan.name], members)]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for skip in skips:
        reasons.setdefault((skip.role, skip.engine, skip.reason), []).append(skip.group.label)
    for (role, engine, reason), labels in reasons.items():
        rows.append(ReportRow(role, "", (), tuple(labels), 0, 0, engine, reason))
    return SymmMemReport((*rows, *_all_reduce_rows(members)), tuple(dict.fromkeys(_findings(verdicts))))


def _findings(verdicts: dict[str, Verdict]) -> Iterator[str]:
    for verdict in verdicts.values():
        yield from (*([verdict.blocked] if verdict.blocked else []), *verdict.downgrades, *verdict.advice)


def _plan_rows(plan: GroupPlan, verdict: Verdict, members: list[Member]) -> list[ReportRow]:
    rows = []
    for ring in plan.rings:
        labels = tuple(n.label for n in plan.needs if n.lane == ring.role)
        role = "all_gather" if ring.role == "unshard" else ring.role
        if verdict.blocked is not None:
            rows.append(ReportRow(role, plan.name, plan.ranks, labels, 0, 0, "plain", verdict.blocked.splitlines()[0]))
            continue
        engine, reason = verdict.engines[ring.role]
        own = dict.fromkeys(m.note for m in members if m.note and m.lane == ring.role and m.group.label in labels)
        reason = "; ".join([reason, *(f"staged: {note}" for note in own)])
        rows.append(ReportRow(role, plan.name, plan.ranks, labels, ring.slots, ring.nbytes, engine, reason))
    return rows


def _all_reduce_rows(members: list[Member]) -> list[ReportRow]:
    """HSDP's all-reduce: FSDP2 calls ``dist.all_reduce`` itself (torch 2.13-2.15), so nothing can take its place."""
    found: dict[str, tuple[tuple[int, ...], list[str]]] = {}
    for item in members:
        group = compat.replicate_group(item.group)
        if item.role == "reduce_scatter" and group is not None:
            found.setdefault(compat.group_name(group), (compat.group_ranks(group), []))[1].append(item.group.label)
    return [
        ReportRow("all_reduce", name, ranks, tuple(labels), 0, 0, "plain", "FSDP2 issues HSDP's all-reduce itself")
        for name, (ranks, labels) in found.items()
    ]
