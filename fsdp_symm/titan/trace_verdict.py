"""After the last step: which trace files this run wrote, and what they say about its communication."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fsdp_symm.errors import SymmMemPeerError, SymmMemTimeoutError
from fsdp_symm.guards.facts import host_id
from fsdp_symm.rendezvous import exchange
from fsdp_symm.titan.overlay import one_line
from fsdp_symm.trace import TraceError, TraceSummary, summarize

logger = logging.getLogger(__name__)

# More paths than this are named by the first, the last and their number.
_PATHS_SHOWN = 4


@dataclass(frozen=True)
class RankTraces:
    """The complete trace files that one rank of this run wrote."""

    host: str
    paths: tuple[str, ...]


def share(group: dist.ProcessGroup, mine: Sequence[Path], timeout_s: float) -> list[RankTraces] | None:
    """Tell every rank which files each rank wrote, so that files of an earlier run are never taken for this one's.

    Collective over ``group``; every rank comes when its own files are complete, and waits ``timeout_s`` at most. The
    ranks meet in the CPU store: no collective may hang behind a rank that is still writing.

    Returns:
        One entry a rank, in group order; ``None``, with a warning on rank 0 that names the ranks, if any did not come.
    """
    payload = json.dumps([host_id(), [str(path) for path in mine]]).encode()
    try:
        answers = exchange(
            group, payload, what="trace", timeout_s=timeout_s, fix="raise comm.train_timeout_seconds, or see their logs"
        )
    except (SymmMemTimeoutError, SymmMemPeerError) as error:
        if group.rank() == 0:
            logger.warning("no trace verdict: %s", one_line(error))
        return None
    return [RankTraces(host, tuple(paths)) for host, paths in map(json.loads, answers)]


def inspect(traces: Sequence[RankTraces]) -> TraceSummary | None:
    """What the traces of the first rank's host say; other hosts' files need not be visible here.

    Returns:
        ``None`` where nothing was written on that host, or, with one warning line, where a file cannot be used.
    """
    paths = [path for rank in traces if rank.host == traces[0].host for path in rank.paths]
    if not paths:
        return None
    try:
        return summarize(paths)
    except TraceError as error:
        logger.warning("no trace verdict: %s", one_line(error))
        return None


def scalars(summary: TraceSummary) -> dict[str, float]:
    """The TensorBoard scalars: milliseconds a step and rank, and each engine's share of a collective's bytes."""
    values = {
        "fsdp_symm/trace/exposed_ms": summary.exposed_ms,
        "fsdp_symm/trace/comm_ms": summary.comm_ms,
        "fsdp_symm/trace/sm_ms": summary.sm_ms,
    }
    for kind, shares in summary.engine_shares.items():
        for engine, share_of_bytes in shares.items():
            values[f"fsdp_symm/trace/engine_share/{kind}/{engine}"] = share_of_bytes
    return values


def describe_files(traces: Sequence[RankTraces], *, start_step: int, last_step: int) -> str:
    """The files, or why there are none, for the summary of a run whose last step was ``last_step``."""
    paths = [path for rank in traces for path in rank.paths]
    if not paths:
        return f"no trace: the run {'ended before' if last_step < start_step else 'started after'} step {start_step}"
    if len(paths) <= _PATHS_SHOWN:
        return f"traces: {', '.join(paths)}"
    return f"traces: {paths[0]} .. {paths[-1]} ({len(paths)} files)"
