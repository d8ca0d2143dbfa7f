"""What keeps a group from symmetric windows or copy engines, each as one sentence with a fix.

:func:`collect` gathers the facts of a living group; everything else is a pure function of them, so that every sentence
can be produced without the hardware.
"""

from __future__ import annotations

from fsdp_symm.guards.common import Finding, Severity
from fsdp_symm.guards.facts import ENVIRONMENT, GroupFacts, collect, local_facts
from fsdp_symm.guards.judge import Engine, expected_engine, findings, first_line

__all__ = [
    "ENVIRONMENT",
    "Engine",
    "Finding",
    "GroupFacts",
    "Severity",
    "collect",
    "expected_engine",
    "findings",
    "first_line",
    "local_facts",
]
