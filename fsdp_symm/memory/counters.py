"""What was moved, by whom, and how long ranks waited: plain numbers that only grow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fsdp_symm.compat import ROLES, Role


@dataclass
class Counters:
    """Calls and bytes by role and engine, since the switch.

    Bytes are those that this rank received from its peers: ``(W - 1) / W`` of an all-gather's output and of a
    reduce-scatter's input.
    """

    calls: dict[Role, defaultdict[str, int]] = field(default_factory=lambda: {r: defaultdict(int) for r in ROLES})
    bytes_moved: dict[Role, defaultdict[str, int]] = field(default_factory=lambda: {r: defaultdict(int) for r in ROLES})

    def add(self, role: Role, engine: str, nbytes: int) -> None:
        """Count one collective."""
        self.calls[role][engine] += 1
        self.bytes_moved[role][engine] += nbytes
