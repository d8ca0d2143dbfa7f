"""``fsdp-symm bench``: run a benchmark and write its CSV, or renew the tables that are made from the CSVs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fsdp_symm.bench import schema, tables


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``fsdp-symm bench``."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    host = kinds.add_parser("host", help="host backend against gloo, CPU ranks of this machine")
    host.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    host.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    host.add_argument("--max-mib", type=float, default=256, help="largest chunk of a rank in MiB (default 256)")
    host.add_argument("--seconds", type=float, default=1.0, help="timed seconds a line (default 1)")
    renew = kinds.add_parser("tables", help="renew the README's tables from the CSVs in profiles/")
    renew.add_argument("--root", type=Path, default=Path("."), help="the repository (default: this folder)")
    renew.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    if args.bench == "tables":
        return tables.renew(args.root, check=args.check)
    problem = _bad_host_argument(args)
    if problem is not None:
        Console(stderr=True).print(f"fsdp-symm bench host: {problem}", highlight=False)
        return 2
    from fsdp_symm.bench.host import HostBench, measure

    bench = HostBench(ranks=args.ranks, max_bytes=int(args.max_mib * 2**20), seconds=args.seconds)
    rows = measure(bench, f"fsdp-symm bench host --csv {args.csv}")
    schema.write(args.csv, rows)
    Console(soft_wrap=True, highlight=False).print(tables.host_table(rows))
    return 0


def _bad_host_argument(args: argparse.Namespace) -> str | None:
    if args.ranks < 2:
        return f"--ranks: found {args.ranks}, expected at least 2, fix: --ranks 2"
    if args.max_mib * 2**20 < 64 * 1024:
        return f"--max-mib: found {args.max_mib:g}, expected at least 0.0625 (64 KiB), fix: --max-mib 1"
    if args.seconds <= 0:
        return f"--seconds: found {args.seconds:g}, expected more than 0, fix: --seconds 1"
    return None
