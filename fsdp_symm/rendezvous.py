"""Small exchanges between the ranks of a group over the CPU store, always with a timeout that names who is missing.

Used only at the switch and while memory is set up, never on the training path.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from datetime import timedelta

import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemTimeoutError, problem

# Keys are never reused: the counter belongs to the set of ranks and outlives a rebuilt process group, whose store
# may be the old one (torchrun's agent keeps it).
_rounds: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)


def exchange(group: dist.ProcessGroup, payload: bytes, *, what: str, timeout_s: float, fix: str) -> list[bytes]:
    """Give every rank of ``group`` everybody's payload, in group order. Collective over the group.

    Args:
        group: the ranks that take part.
        payload: this rank's bytes; a few kilobytes, since a store is no data path.
        what: the step, for the error text.
        timeout_s: seconds to wait for all ranks together.
        fix: the line that tells a user what to do when a rank does not come.

    Raises:
        SymmMemTimeoutError: names the ranks that did not arrive.
    """
    return exchange_many([(group, payload)], what=what, timeout_s=timeout_s, fix=fix)[0]


def exchange_many(
    items: list[tuple[dist.ProcessGroup, bytes]], *, what: str, timeout_s: float, fix: str
) -> list[list[bytes]]:
    """:func:`exchange` over several groups at once: all payloads are published before any is awaited, so that the
    order in which different ranks list their groups cannot deadlock."""
    store = compat.default_store()
    prefixes = []
    for group, payload in items:
        ranks = compat.group_ranks(group)
        prefix = f"fsdp_symm/{'-'.join(map(str, ranks))}/{next(_rounds[ranks])}"
        store.set(f"{prefix}/{dist.get_rank()}", payload)  # type: ignore[arg-type]  # the stub says str; bytes work
        prefixes.append((prefix, ranks))
    deadline = time.monotonic() + timeout_s
    return [_collect(store, prefix, ranks, what, timeout_s, deadline, fix) for prefix, ranks in prefixes]


def _collect(
    store: compat.Store,
    prefix: str,
    ranks: tuple[int, ...],
    what: str,
    timeout_s: float,
    deadline: float,
    fix: str,
) -> list[bytes]:
    answers: dict[int, bytes] = {}
    for rank in ranks:
        key = f"{prefix}/{rank}"
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left_s))
        except RuntimeError:  # DistStoreError; the loop goes on so that every missing rank is named
            continue
        answers[rank] = store.get(key)
    missing = [r for r in ranks if r not in answers]
    if missing:
        raise SymmMemTimeoutError(
            problem(
                f"{what}: ranks {missing} of group {list(ranks)} did not arrive within {timeout_s:g} s",
                found=f"ranks {sorted(answers)}",
                expected=f"ranks {list(ranks)}",
                fix=fix,
            )
        )
    return [answers[r] for r in ranks]
