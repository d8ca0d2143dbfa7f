"""What the switch decided, as data and as a table: one row for each process group and role, and one for each reason
why modules were left on the plain path."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from fsdp_symm.memory.counters import Counters


@dataclass(frozen=True)
class ReportRow:
    """One decision.

    Attributes:
        role: ``"all_gather"``, ``"reduce_scatter"``, or ``"all_reduce"`` (HSDP's, which FSDP2 issues itself).
        group: name of the process group, ``""`` where there is none.
        ranks: its global ranks.
        modules: FQNs that the row covers.
        slots: slots of the ring, 0 on the plain path.
        nbytes: bytes of all slots of the ring.
        engine: who moves the bytes: ``"host"``, ``"copy engine"``, ``"symmetric kernel"``, ``"plain"``; ``"kept"`` for
            an earlier handle's or a user's comm in symmetric memory, ``"none"`` when nothing moves.
        reason: why this engine.
    """

    role: str
    group: str
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    slots: int
    nbytes: int
    engine: str
    reason: str


@dataclass(frozen=True)
class SymmMemReport:
    """All decisions of one switch, served groups first.

    Attributes:
        rows: the decisions.
        findings: what the guards found about the groups, each with what was found, expected, and the fix.
    """

    rows: tuple[ReportRow, ...]
    findings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join((render(self.rows), *self.findings))


@dataclass(frozen=True)
class SymmMemStats:
    """Cumulative numbers since the switch.

    Attributes:
        arena_bytes: symmetric bytes that this rank holds; constant after the switch.
        calls: collectives by role and engine.
        bytes_moved: bytes received from peers by role and engine.
        wait_s: seconds this rank has waited for its peers.
    """

    arena_bytes: int
    calls: dict[str, dict[str, int]]
    bytes_moved: dict[str, dict[str, int]]
    wait_s: float

    @staticmethod
    def of(counters: Counters, *, arena_bytes: int, wait_s: float) -> SymmMemStats:
        """Freeze the counters of this moment."""
        return SymmMemStats(
            arena_bytes=arena_bytes,
            calls={role: dict(by_engine) for role, by_engine in counters.calls.items()},
            bytes_moved={role: dict(by_engine) for role, by_engine in counters.bytes_moved.items()},
            wait_s=float(wait_s),
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """``(0, 1, 2, 3)`` as ``0-3``, ``(0, 2)`` as ``0,2``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def bytes_text(nbytes: int) -> str:
    """Bytes with a binary unit, three digits."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _modules_text(modules: tuple[str, ...]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]} ({len(modules)})"


def render(rows: Sequence[ReportRow]) -> str:
    """The rows as a plain-text table, as wide as the terminal, and at least 100 columns."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title="symmetric memory for FSDP2",
        title_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("group", "ranks", "role", "modules", "slots", "bytes", "engine", "reason"):
        numeric, wrapping = name in ("slots", "bytes"), name in ("modules", "reason")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=not wrapping)
    for row in rows:
        table.add_row(
            row.group or "-",
            ranks_text(row.ranks) or "-",
            row.role,
            _modules_text(row.modules),
            str(row.slots) if row.slots else "-",
            bytes_text(row.nbytes) if row.slots else "-",
            row.engine,
            row.reason,
        )
    out = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    Console(file=out, width=max(width, 100), color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
