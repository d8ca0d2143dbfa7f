"""Why the copy engine was not used: what the trace shows, what that means, what to check outside of it.

A trace cannot prove a cause, so each reason quotes the rows that it rests on and lists checks in the order of how
often they turned out to be it. Conditions are NCCL's own (src/ce_coll.cc and src/enqueue.cc of 2.28 to 2.32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_symm.trace.verdict import plural

if TYPE_CHECKING:
    from fsdp_symm.trace.calls import Call
    from fsdp_symm.trace.report import RankReport

COPY_ENGINE_KINDS = ("all_gather", "all_to_all", "gather", "scatter")  # what NCCL can give to copy engines
_MIN_DRIVER = 12050  # cudaDriverGetVersion below which NCCL refuses copy-engine collectives


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding."""

    topic: str  # stable key, see docs/inspect.md
    evidence: str
    meaning: str
    checks: tuple[str, ...]


def _versions(ranks: Sequence[RankReport]) -> str:
    nccl = sorted({r.nccl_version for r in ranks if r.nccl_version})
    driver = sorted({r.driver_version for r in ranks if r.driver_version})
    parts = [f"NCCL {', '.join(nccl)}"] if nccl else []
    parts += [f"driver API {', '.join(f'{d // 1000}.{d % 1000 // 10}' for d in driver)}"] if driver else []
    return f" [{'; '.join(parts)}]" if parts else ""


def _where(calls: Sequence[Call]) -> str:
    modules = sorted({c.module for c in calls if c.module})
    shown = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    groups = sorted({c.group for c in calls if c.group})
    text = f" in {shown}" if shown else ""
    return text + (f", group {', '.join(groups[:3])}" if groups else "")


def _count(calls: Sequence[Call], kind: str) -> str:
    kernels = sorted({k for c in calls for k in c.kernels})
    grids = sorted({c.sms for c in calls})
    counted = f"{len(calls)} {plural(kind, len(calls))}{_where(calls)}"
    return f"{counted}: {', '.join(kernels)}, {'/'.join(map(str, grids))} SMs"


def _symmetric(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    mine = [c for c in calls if c.kind in COPY_ENGINE_KINDS and c.engine == "symmetric_kernel"]
    if not mine:
        return None
    drivers = [r.driver_version for r in ranks if r.driver_version and r.driver_version < _MIN_DRIVER]
    checks = ["the CTA policy of that very communicator is ZERO (sub-groups of a mesh do not inherit it)"]
    low = f"the driver is too old: {drivers[0]}, NCCL needs {_MIN_DRIVER}" if drivers else "the driver is 12.5 or newer"
    checks.insert(0 if drivers else 1, low)
    checks += ["NCCL 2.28: input and output are both registered", "all ranks share one NVLink domain"]
    return Reason(
        "symmetric_kernel_instead",
        _count(mine, mine[0].kind) + _versions(ranks),
        "the buffers are registered windows, but NCCL did not take its copy-engine branch",
        tuple(checks),
    )


def _too_old(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    """Kernels named ``ncclKernel_`` belong to NCCL 2.18 and older; symmetric windows came with 2.27."""
    mine = [c for c in calls if any(k.startswith("ncclKernel_") for k in c.kernels)]
    if not mine:
        return None
    return Reason(
        "nccl_too_old",
        _count(mine, mine[0].kind) if len({c.kind for c in mine}) == 1 else f"{len(mine)} calls by ncclKernel_*",
        "kernels of this name belong to NCCL 2.18 or older, which has neither windows nor copy-engine collectives",
        ("use NCCL 2.28 or newer",),
    )


def _is_new(call: Call) -> bool:
    return not any(k.startswith("ncclKernel_") for k in call.kernels)


def _plain(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    kinds = ("all_gather", "gather", "scatter")
    mine = [c for c in calls if _is_new(c) and c.kind in kinds and c.engine == "plain_kernel"]
    if not mine:
        return None
    return Reason(
        "no_window",
        _count(mine, mine[0].kind) + _versions(ranks),
        "NCCL found no symmetric window for the buffers",
        (
            "the buffers come from symmetric memory and were rendezvoused for this group's name",
            "NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE are not 0",
            "peer access works between the ranks (P2P over NVLink)",
            "window registration did not silently return NULL (NCCL 2.29 and newer)",
        ),
    )


def _send_recv(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    mine = [c for c in calls if _is_new(c) and c.kind == "all_to_all" and c.engine == "plain_kernel"]
    if not mine:
        return None
    uneven = [c for c in mine if c.split]
    if uneven:
        return Reason(
            "uneven_all_to_all",
            f"{_count(uneven, 'all_to_all')}; split lists in {len(uneven)} of {len(mine)}",
            "torch sends uneven splits as grouped send and receive, which never reaches the copy engine",
            ("use equal splits, padded or dropless per rank",),
        )
    return Reason(
        "all_to_all_send_recv",
        _count(mine, "all_to_all") + "; no split lists" + _versions(ranks),
        "equal splits can reach the copy engine, but this call ran as send and receive kernels",
        (
            "the group's CTA policy is ZERO",
            "both buffers are registered windows",
            "torch is built with NCCL 2.28 or newer",
        ),
    )


def _reduce_scatter(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    mine = [c for c in calls if c.kind == "reduce_scatter" and c.engine == "plain_kernel"]
    symmetric = any(c.engine in ("copy_engine", "symmetric_kernel") for c in calls)
    if not mine or not symmetric:
        return None
    return Reason(
        "reduce_scatter_plain",
        _count(mine, "reduce_scatter") + _versions(ranks),
        "other collectives of this trace use symmetric memory, this one does not",
        ("the op is SUM, or AVG with NCCL 2.30.3 or newer", "the input buffer is a registered window"),
    )


def _adds(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    kinds = ("reduce_scatter", "all_reduce", "reduce")
    mine = [c for c in calls if c.kind in kinds and c.engine == "symmetric_kernel"]
    if not mine:
        return None
    return Reason(
        "arithmetic_needs_sms",
        _count(mine, mine[0].kind),
        "expected: a copy engine cannot add, so a symmetric kernel is the best that NCCL has for this",
        (),
    )


def _unbatched(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    waiting = [c for c in calls if c.wait_us is not None and c.duration_us > 0 and c.wait_us > 0.5 * c.duration_us]
    if len(waiting) < 2:
        return None
    waited = sum(c.wait_us or 0.0 for c in waiting) / 1e3
    return Reason(
        "waiting",
        f"{len(waiting)} copy-engine calls spend over half of their time in barriers: {waited:.2f} ms",
        "the peers were late, or the calls are small; bandwidth is not the limit",
        ("inspect all ranks together: the straggler table names the late one",),
    )


def _none_seen(calls: Sequence[Call], ranks: Sequence[RankReport]) -> Reason | None:
    mine = [c for c in calls if c.engine == "none_seen" and c.bytes != 0]
    if not mine:
        return None
    notes = sorted({n for c in mine for n in c.notes if not n.startswith("group size")})
    return Reason(
        "no_device_rows",
        f"{len(mine)} calls without device rows; {'; '.join(notes)}",
        "the trace cannot say what moved these bytes",
        ("record CUDA activities", "leave warm-up steps before the recorded ones"),
    )


_RULES: tuple[Callable[[Sequence[Call], Sequence[RankReport]], Reason | None], ...] = (
    _too_old, _symmetric, _plain, _send_recv, _reduce_scatter, _adds, _unbatched, _none_seen,
)  # fmt: skip


def reasons(ranks: Sequence[RankReport]) -> tuple[Reason, ...]:
    """Findings in the order of the rules."""
    calls = [c for r in ranks for c in r.calls]
    found = (rule(calls, ranks) for rule in _RULES)
    return tuple(reason for reason in found if reason is not None)
