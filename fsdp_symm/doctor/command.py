"""Arguments, process group and exit status of ``fsdp-symm doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_symm.doctor.machine import examine
from fsdp_symm.doctor.probe import PROBE_ERRORS, WATCHDOG_FACTOR, Probe, one_line
from fsdp_symm.doctor.report import DoctorReport, GroupRow
from fsdp_symm.doctor.view import show
from fsdp_symm.limits import LONGEST_TIMEOUT_S
from fsdp_symm.output import OutputError, pipe
from fsdp_symm.zero_cta import zero_cta_options

_LARGEST = {"RANK": 99_999, "WORLD_SIZE": 100_000, "LOCAL_RANK": 99_999, "MASTER_PORT": 65_535}
_ALONE = "no process group: run it under torchrun to probe (torchrun --nproc-per-node 2 -m fsdp_symm.cli doctor)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``fsdp-symm doctor``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--no-probe", action="store_true", help="look only: no process group, no communication")
    parser.add_argument(
        "--policy",
        choices=("zero", "default"),
        default="zero",
        help="CTA policy of the probe's NCCL communicator (default zero); NCCL_CTA_POLICY overrides it",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="longest wait for ranks or devices (default 60)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what to probe (default: cuda where there is one)")


def run(args: argparse.Namespace) -> int:
    """Examine, probe, print on rank 0.

    Returns:
        0 if everything that was tried works, 1 if a probe failed or gave a wrong result, 2 for bad usage or an output
        that cannot be written.
    """
    if (complaint := _bad_argument(args)) is not None:
        print(f"fsdp-symm doctor: {complaint}", file=sys.stderr)
        return 2
    device = _device(args.device)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]) if _launched() else 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines, between the tables
    report = examine()
    hung = False
    if args.no_probe:
        report.notes.append("no probe: --no-probe")
    elif _launched():
        hung = _probe_world(report, device, args)
    else:
        report.notes.append(_ALONE)
    status = 0 if report.status == "ok" else 1
    try:
        if rank == 0:
            _print(report, as_json=args.json)
        else:
            _print_errors(report, rank)
    except OutputError as error:
        print(f"fsdp-symm doctor: {error}", file=sys.stderr)
        status = 2
    if hung:
        # Destroying the group, or the interpreter's exit, would wait for the collective that never ends.
        os._exit(status)
    return status


def _print(report: DoctorReport, *, as_json: bool) -> None:
    with pipe():
        if as_json:
            print(json.dumps(report.to_json(), indent=2))
        else:
            show(report)


def _print_errors(report: DoctorReport, rank: int) -> None:
    """What rank 0, which prints the tables, may not have lived to hear."""
    for group in report.groups:
        if group.error:
            print(f"fsdp-symm doctor: rank {rank}: {group.error}", file=sys.stderr)


def _bad_argument(args: argparse.Namespace) -> str | None:
    if not (0 < args.timeout <= LONGEST_TIMEOUT_S):
        return f"--timeout: found {args.timeout:g}, expected seconds, 0 to {LONGEST_TIMEOUT_S:.0f}, fix: --timeout 60"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: found no CUDA device, expected one, fix: --device cpu"
    # Kubernetes sets MASTER_PORT, to an address, for any service called "master": it matters to a launch only.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *(["MASTER_PORT"] if _launched() else [])):
        found = os.environ.get(name, "0")
        if not (found.isascii() and found.isdigit() and int(found) <= _LARGEST[name]):
            return (
                f"{name}: found {found!r}, expected a number up to {_LARGEST[name]}, fix: start ranks with torchrun, "
                f"or unset {name}"
            )
    if _launched() and not dist.is_initialized() and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        return (
            f"RANK: found {os.environ['RANK']}, expected one below WORLD_SIZE={os.environ['WORLD_SIZE']}, fix: start "
            "ranks with torchrun, or unset RANK"
        )
    return None


def _device(wanted: str | None) -> torch.device:
    """This rank's device, made current; ranks share GPUs where there are more ranks."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _launched() -> bool:
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def _probe_world(report: DoctorReport, device: torch.device, args: argparse.Namespace) -> bool:
    """Probe the world's group; True if a collective hangs. Leaves a process group that it found as it was."""
    found = dist.is_initialized()
    probe: Probe | None = None
    try:
        if not found:
            _init(device, args)
        group = dist.group.WORLD
        if group is not None:
            probe = Probe(group, device, args.timeout)
            report.groups.append(_row(probe))
    except PROBE_ERRORS as error:
        row = GroupRow("default", _world(), str(device), "", "", "", error=one_line(error))
        report.groups.append(row)
    hung = probe is not None and probe.hung
    if not found and dist.is_initialized() and not hung:
        dist.destroy_process_group()
    return hung


def _row(probe: Probe) -> GroupRow:
    if probe.device.type != "cuda":
        return probe.row()
    # NCCL before 2.29.7 cannot copy on the legacy default stream (NVIDIA/nccl#2003).
    with torch.cuda.stream(torch.cuda.Stream(probe.device)):
        return probe.row()


def _init(device: torch.device, args: argparse.Namespace) -> None:
    timeout = timedelta(seconds=args.timeout)
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        # Without device_id the communicator is made at the first collective, that is after the guards have spoken.
        # torch's watchdog ends the process at its timeout: late enough for the probe to tell what hung.
        timeout *= WATCHDOG_FACTOR
        options = zero_cta_options(timeout) if args.policy == "zero" else None
        dist.init_process_group("nccl", timeout=timeout, pg_options=options)


def _world() -> list[int]:
    return list(range(int(os.environ.get("WORLD_SIZE", "1"))))
