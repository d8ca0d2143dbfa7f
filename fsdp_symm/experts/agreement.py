"""Ranks compare what they were called with before they set anything up: later each would wait for the others, and for
another reason."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.experts.config import refuse
from fsdp_symm.rendezvous import exchange


def agree(group: dist.ProcessGroup, subject: str, mine: Mapping[str, str], *, timeout_s: float) -> None:
    """Compare this rank's arguments with those of the group's other ranks. Collective.

    Args:
        subject: what is set up, for errors.
        mine: arguments as text, by name.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        SymmMemConfigError: the first argument that differs, and every rank's value; on all ranks.
        SymmMemTimeoutError: names the ranks that did not come.
    """
    answers = exchange(
        group,
        json.dumps(dict(mine)).encode(),
        what=f"comparing the ranks' arguments of {subject}",
        timeout_s=timeout_s,
        fix="do the same on every rank of the group, in the same order",
    )
    theirs = dict(zip(compat.group_ranks(group), (json.loads(answer) for answer in answers), strict=True))
    for name in mine:
        found = {rank: arguments.get(name, "nothing") for rank, arguments in theirs.items()}
        if len(set(found.values())) > 1:
            refuse(
                f"{subject}: the ranks pass different arguments",
                found=", ".join(f"{name} {value} on rank {rank}" for rank, value in found.items()),
                expected=f"the same {name} on every rank of group {list(found)}",
                fix="pass the same arguments on all ranks",
            )
