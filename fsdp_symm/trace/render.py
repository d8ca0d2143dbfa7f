"""The report as text: rich tables that fit 80 columns, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_symm.trace import names
from fsdp_symm.trace.report import CollectiveRow, RankReport, Report

SHORT_ENGINES = {
    **names.ENGINE_LABELS,
    "symmetric_kernel": "symm. kernel",
    "symm_mem_kernel": "torch symm.",
}
_ENGINE_STYLES = {"copy_engine": "green", "plain_kernel": "yellow", "mixed": "yellow", "none_seen": "red"}
_MAX_FULL_RANKS = 4


def size_text(num_bytes: float) -> str:
    """Decimal units, three digits: ``268 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}" if num_bytes else "0 B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def ms_text(ms: float | None) -> str:
    """Milliseconds with two decimals below 100."""
    if ms is None:
        return "-"
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def share_text(share: float | None) -> str:
    """Percent, or ``-``."""
    return "-" if share is None else f"{share:.0%}"


def make_table(*columns: tuple[str, str]) -> Table:
    """A borderless table from (title, "l" or "r") pairs; long cells wrap instead of losing text."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "r" else "left", overflow="fold")
    return table


def _engine(engine: str) -> Text:
    return Text(SHORT_ENGINES[engine], style=_ENGINE_STYLES.get(engine, ""))


def _engines(rank: RankReport) -> RenderableType:
    table = make_table(
        ("engine", "l"), ("calls", "r"), ("bytes", "r"), ("ms", "r"), ("SMs", "r"), ("SM-ms", "r"),
        ("exposed ms", "r"), ("GEMM slowdown", "r"),
    )  # fmt: skip
    for row in rank.engines:
        slow = f"{row.gemm_slowdown:.2f}x" if row.gemm_slowdown else "few samples"
        table.add_row(
            _engine(row.engine), str(row.num_calls), size_text(row.bytes), ms_text(row.time_ms), str(row.sms),
            ms_text(row.sm_ms), ms_text(row.exposed_ms), slow,
        )  # fmt: skip
    return table


def _collective_tables(rank: RankReport) -> list[RenderableType]:
    parts: list[RenderableType] = []
    groups: dict[tuple[str, str, int | None], list[CollectiveRow]] = {}
    for row in rank.collectives:
        groups.setdefault((row.kind, row.group, row.group_size), []).append(row)
    for (kind, group, size), rows in groups.items():
        ranks = f"{size} ranks" if size else "unknown size"
        about = "~" if any(r.group_size_assumed for r in rows) else ""
        title = f"{kind.replace('_', '-')} · group {group or '?'} · {about}{ranks}"
        parts += [Text(title, style="bold"), Padding(_collective_table(rows), (0, 0, 1, 0))]
    return parts


def _collective_table(rows: Sequence[CollectiveRow]) -> Table:
    table = make_table(
        ("module", "l"), ("engine", "l"), ("n", "r"), ("bytes", "r"), ("SMs", "r"), ("SM-ms", "r"), ("ms", "r"),
        ("wait", "r"), ("bus", "r"), ("ovl", "r"), ("exp", "r"),
    )  # fmt: skip
    for row in sorted(rows, key=lambda r: r.module):
        about = "~" if row.group_size_assumed else ""
        bus = f"{about}{row.busbw_gbps:.3g}" if row.busbw_gbps is not None else "-"
        guess = "?" if row.num_guesses else ""
        table.add_row(
            (row.module or "-") + guess, _engine(row.engine), str(row.num_calls),
            size_text(row.bytes) if row.bytes_known else "?", str(row.sms), ms_text(row.sm_ms), ms_text(row.time_ms),
            ms_text(row.wait_ms), bus, share_text(row.overlap), ms_text(row.exposed_ms),
        )  # fmt: skip
    return table


def _steps(rank: RankReport) -> RenderableType:
    table = make_table(
        ("step", "l"), ("ms", "r"), ("calls", "r"), ("comm ms", "r"), ("exposed ms", "r"), ("SM-ms", "r"),
        ("of all SMs", "r"),
    )  # fmt: skip
    for row in rank.steps:
        table.add_row(
            "all" if row.number is None else str(row.number), ms_text(row.time_ms), str(row.num_calls),
            ms_text(row.comm_ms), ms_text(row.exposed_ms), ms_text(row.sm_ms),
            "-" if row.sm_share is None else f"{row.sm_share:.2%}",
        )  # fmt: skip
    return table


def _gemms(rank: RankReport) -> RenderableType | None:
    usable = [row for row in rank.gemms if row.slowdown is not None]
    if not usable:
        return None
    table = make_table(
        ("GEMM beside communication", "l"), ("engine", "l"), ("beside", "r"), ("alone", "r"), ("slower", "r")
    )
    for row in usable[:8]:
        table.add_row(
            row.name, _engine(row.engine), str(row.num_overlapped), str(row.num_alone), f"{row.slowdown:.2f}x"
        )
    return table


def _heading(rank: RankReport) -> Text:
    of = f"/{rank.world_size}" if rank.world_size and rank.rank is not None else ""
    sms = f"{rank.num_sms} SMs" if rank.num_sms else ""
    nccl = f"NCCL {rank.nccl_version}" if rank.nccl_version else ""
    head = "  ".join(part for part in (rank.label + of, rank.device, sms, nccl) if part)
    text = Text(head, style="bold")
    text.append(
        f"\ncommunication {ms_text(rank.comm_ms)} ms, exposed {ms_text(rank.exposed_ms)} ms "
        f"({share_text(1 - rank.overlap if rank.overlap is not None else None)}), {ms_text(rank.sm_ms)} SM-ms, "
        f"{size_text(rank.bytes)}; {rank.num_local_copies} local copies",
        style="not bold",
    )
    return text


def _rank(rank: RankReport) -> list[RenderableType]:
    parts: list[RenderableType] = [_heading(rank), ""]
    if rank.calls:
        parts += [Padding(_engines(rank), (0, 0, 1, 0)), *_collective_tables(rank)]
    parts.append(Padding(_steps(rank), (0, 0, 1, 0)))
    gemms = _gemms(rank)
    return [*parts, Padding(gemms, (0, 0, 1, 0))] if gemms else parts


def _rank_overview(report: Report) -> list[RenderableType]:
    table = make_table(
        ("rank", "l"), ("comm ms", "r"), ("exposed ms", "r"), ("SM-ms", "r"), ("waited ms", "r"), ("last in", "r"),
        ("worst skew ms", "r"),
    )  # fmt: skip
    by_rank = {s.rank: s for s in report.stragglers}
    for rank in report.ranks:
        late = by_rank.get(rank.rank) if rank.rank is not None else None
        table.add_row(
            rank.label, ms_text(rank.comm_ms), ms_text(rank.exposed_ms), ms_text(rank.sm_ms),
            ms_text(late.waited_ms) if late else "-", f"{late.num_last}/{late.num_matched}" if late else "-",
            ms_text(late.worst_skew_us / 1e3) if late else "-",
        )  # fmt: skip
    return [Padding(table, (0, 0, 1, 0))]


def _why(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for reason in report.reasons:
        text = Text("why  ", style="bold")
        text.append(f"{reason.evidence}\n", style="not bold")
        text.append(f"     {reason.meaning}", style="not bold")
        for number, check in enumerate(reason.checks, 1):
            text.append(f"\n     check {number}: {check}", style="not bold dim")
        parts.append(text)
    return parts


def render(report: Report, console: Console) -> None:
    """Print the whole report; above four ranks, only the rank with the most exposed time in full."""
    parts: list[RenderableType] = []
    ranks = list(report.ranks)
    if len(ranks) > 1:
        parts += _rank_overview(report)
    if len(ranks) > _MAX_FULL_RANKS:
        worst = max(ranks, key=lambda r: r.exposed_ms)
        parts.append(Text(f"most exposed of {len(ranks)} ranks, all others with --rank:\n"))
        ranks = [worst]
    for rank in ranks:
        parts += _rank(rank)
    parts += _why(report)
    parts += [Text(f"warning  {warning}", style="yellow") for warning in report.warnings]
    parts.append(Text(f"verdict  {report.verdict}", style="bold"))
    console.print(Group(*parts))


CSV_COLUMNS = (
    "path", "rank", "kind", "group", "group_size", "module", "engine", "wire", "num_calls", "num_guesses", "bytes",
    "bytes_known", "kernels", "sms", "sm_ms", "time_ms", "median_us", "transfer_ms", "wait_ms", "algbw_gbps",
    "busbw_gbps", "overlap", "exposed_ms",
)  # fmt: skip


def to_csv(report: Report) -> str:
    """The collective rows of all ranks as CSV with a header; unknown values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for rank in report.ranks:
        for row in rank.collectives:
            cells = {"path": rank.path, "rank": rank.rank}
            values = [cells[c] if c in cells else getattr(row, c) for c in CSV_COLUMNS]
            writer.writerow(["+".join(v) if isinstance(v, tuple) else "" if v is None else v for v in values])
    return out.getvalue()
