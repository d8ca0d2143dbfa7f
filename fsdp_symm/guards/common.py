"""What every guard uses: the finding, the versions at which NCCL changed, and how facts are worded.

Version facts were read in NCCL's sources at the tags v2.27.7-1, v2.28.9-1, v2.29.2-1, v2.29.7-1 and v2.30.7-1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fsdp_symm.guards.facts import GroupFacts

Severity = Literal["blocks", "degrades", "warns"]

WINDOWS_SINCE = (2, 27, 0)  # ncclCommWindowRegister
COPY_ENGINE_SINCE = (2, 28, 3)  # src/ce_coll.cc came with the first 2.28 release
ONE_SIDED_SINCE = (2, 29, 2)  # ncclSymRegType_t: one registered buffer is enough
AVG_SINCE = (2, 30, 3)  # reduce-scatter: AVG becomes SumPostDiv (src/scheduler/symmetric_sched.cc)
HIERARCHICAL_SINCE = (2, 30, 6)  # copy engines across hosts (ncclHierCeAvailable)
TWO_RANK_HANG = ((2, 29, 0), (2, 31, 2))
COPY_ENGINE_DRIVER = (12, 5)  # src/ce_coll.cc:98: driverVersion >= 12050
FALSE = ("0", "false", "f", "no", "n", "off", "")


@dataclass(frozen=True)
class Finding:
    """One thing in the way.

    Attributes:
        code: stable key; each guard's own.
        severity: ``"blocks"``: symmetric windows and copy engines must not be used for this group; ``"degrades"``:
            it works, but not by copy engine; ``"warns"``: advice.
        text: what, found, expected, fix.
    """

    code: str
    severity: Severity
    text: str


def dots(version: tuple[int, ...] | None) -> str:
    """``(2, 30, 7)`` -> ``"2.30.7"``."""
    return "none" if version is None else ".".join(map(str, version))


def nccl_text(facts: GroupFacts) -> str:
    """``NCCL 2.30.7``."""
    return f"NCCL {dots(facts.nccl_version)}"


def group_text(facts: GroupFacts) -> str:
    """The group's name and ranks."""
    ranks = list(facts.ranks)
    shown = str(ranks) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} in all)"
    return f"group {facts.name or 'default'}, ranks {shown}"


def before(facts: GroupFacts, version: tuple[int, int, int]) -> bool:
    """Whether the loaded NCCL is older; False without NCCL, which is a finding of its own."""
    return facts.nccl_version is not None and facts.nccl_version < version


Rule = Callable[[GroupFacts], Finding | None]
