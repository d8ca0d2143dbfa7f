"""The doctor's answer as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_symm.doctor.report import CollectiveRow, DoctorReport, FindingRow, GroupRow
from fsdp_symm.output import PipeConsole

_MIB, _GIB = 2**20, 2**30


def show(report: DoctorReport, console: Console | None = None) -> None:
    """Print the report."""
    out = console if console is not None else PipeConsole(highlight=False)
    out.print(_versions(report))
    if report.gpus:
        out.print(_gpus(report))
        _links(report, out)
    out.print(_backends(report))
    if report.environment:
        out.print(_environment(report))
    for path in report.nccl_libraries:
        out.print(f"NCCL library: {path}", soft_wrap=True, markup=False)
    for group in report.groups:
        _group(group, out)
    if not report.groups:  # each names its own
        _findings(report.findings, out)
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"status: {report.status}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions(report: DoctorReport) -> Table:
    table = _table("machine", "what", "found")
    v = report.versions
    for name, value in (
        ("python, torch", f"{v.python}, {v.torch}"),
        ("fsdp_symm", v.fsdp_symm),
        ("CUDA of torch", v.cuda),
        ("NCCL built, loaded", f"{v.nccl_built}, {v.nccl_loaded}" if v.nccl_built else None),
        ("driver (CUDA API)", v.driver_api),
        (report.shm.path, _shm(report)),
    ):
        table.add_row(name, "none" if value is None else value)
    return table


def _shm(report: DoctorReport) -> str | None:
    size, free = report.shm.size_bytes, report.shm.free_bytes
    return None if size is None or free is None else f"{free / _MIB:.0f} of {size / _MIB:.0f} MiB free"


def _gpus(report: DoctorReport) -> Table:
    table = _table("GPUs", "#", "name", "capability", "SMs", "memory", "peers")
    for gpu in report.gpus:
        access = report.peer_access[gpu.index]
        peers = " ".join("." if j == gpu.index else "y" if ok else "n" for j, ok in enumerate(access))
        memory = f"{gpu.memory_bytes / _GIB:.0f} GiB"
        table.add_row(str(gpu.index), gpu.name, gpu.capability, str(gpu.num_sms), memory, peers)
    return table


def _links(report: DoctorReport, out: Console) -> None:
    link = report.nvlink
    if link.source == "pynvml":
        out.print(f"NVLink (pynvml), active links a GPU: {' '.join(map(str, link.active_links))}")
    elif link.source == "nvidia-smi":
        out.print("NVLink (nvidia-smi topo -m):")
        for line in link.topology:
            out.print(f"  {line.expandtabs(6)}", markup=False, overflow="ellipsis", no_wrap=True)
    else:
        out.print("NVLink: unknown (neither pynvml nor nvidia-smi)")


def _backends(report: DoctorReport) -> Table:
    table = _table("backends", "backend", "tensors", "usable", "first unmet condition")
    for row in report.backends:
        table.add_row(row.backend, row.serves, "yes" if row.usable else "no", escape(row.unmet))
    return table


def _environment(report: DoctorReport) -> Table:
    table = _table("environment", "variable", "value")
    for name, value in report.environment.items():
        table.add_row(name, escape(value))
    return table


def _group(group: GroupRow, out: Console) -> None:
    policy = f", CTA policy {group.policy} ({group.policy_source})" if group.policy else ""
    title = f"group {group.name}: ranks {group.ranks} on {group.device}, backend {group.backend or 'none'}{policy}"
    if group.collectives:
        table = _table(escape(title), "collective", "result", "moved by", "us", "expected, and why")
        for row in group.collectives:
            table.add_row(*_cells(row))
        out.print(table)
    else:
        out.print(title, markup=False)
    _findings(group.findings, out)
    if group.error:
        out.print(f"error: {group.error}", markup=False)


def _findings(findings: Sequence[FindingRow], out: Console) -> None:
    for finding in findings:
        out.print(f"{finding.severity} ({finding.code}): {finding.text}", markup=False)


def _cells(row: CollectiveRow) -> tuple[str, str, str, str, str]:
    result = "not run" if row.correct is None else "right" if row.correct else "WRONG"
    engine = row.engine.replace("_", " ")
    if row.kernels:
        engine += f": {', '.join(row.kernels)} ({row.sms} SMs)"
    elif row.copies:
        sums = f", summed on {row.sms} SMs" if row.sms and row.kind == "reduce_scatter" else ""
        engine += f" ({row.copies} {'copy' if row.copies == 1 else 'copies'}{sums})"
    expected = row.expected.replace("_", " ")
    why = ": ".join(part for part in (expected, row.reason) if part)
    if row.error:
        result, why = "FAILED", f"{row.error}; {why}"
    elif row.engine not in ("not_run", "unknown", row.expected) and row.expected:
        why += " (differs)"
    time_us = "" if row.time_us is None else f"{row.time_us:.0f}"
    name = row.kind.replace("_", "-") + (f" ({row.way})" if row.way else "")
    return name, result, escape(engine), time_us, escape(why)
