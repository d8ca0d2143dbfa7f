"""``fsdp-symm bench``: run a benchmark and write its CSV, or renew the tables that are made from the CSVs."""

from __future__ import annotations

import argparse
import re
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
    step = kinds.add_parser("fsdp-step", help="a training step: plain FSDP2, torch's switch, ours, no communication")
    step.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    step.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    step.add_argument("--widths", default="2048x4,4096x4", help="WIDTHxBLOCKS, comma-separated (default %(default)s)")
    step.add_argument("--tokens", type=int, default=4096, help="tokens a rank, a multiple of 1024 (default 4096)")
    step.add_argument("--steps", type=int, default=12, help="timed steps of each variant (default 12)")
    step.add_argument("--traces", type=Path, default=None, metavar="DIR", help="keep a trace of each variant")
    renew = kinds.add_parser("tables", help="renew the README's tables from the CSVs in profiles/")
    renew.add_argument("--root", type=Path, default=Path("."), help="the repository (default: this folder)")
    renew.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    if args.bench == "tables":
        return tables.renew(args.root, check=args.check)
    return _run_fsdp_step(args) if args.bench == "fsdp-step" else _run_host(args)


def _run_fsdp_step(args: argparse.Namespace) -> int:
    from fsdp_symm.bench.fsdp_step import StepBench, measure
    from fsdp_symm.errors import SymmMemError

    try:
        bench = StepBench(args.ranks, _step_widths(args), args.tokens, args.steps, args.traces)
        lines = measure(bench, _command(args))
    except (SymmMemError, argparse.ArgumentTypeError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"fsdp-symm bench fsdp-step: {error}")
        return 2
    schema.write_lines(args.csv, lines)
    Console(soft_wrap=True, highlight=False).print(tables.step_table(lines))
    return 0


def _step_widths(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The (width, blocks) pairs.

    Raises:
        argparse.ArgumentTypeError: a number that the benchmark cannot use; one line.
    """
    if args.ranks < 2 or args.steps < 1:
        raise argparse.ArgumentTypeError(
            f"--ranks {args.ranks} --steps {args.steps}: expected at least 2 ranks, 1 step, fix: --ranks 2 --steps 12"
        )
    if args.tokens < 1024 or args.tokens % 1024:
        raise argparse.ArgumentTypeError(
            f"--tokens: found {args.tokens}, expected a multiple of 1024, fix: --tokens 4096"
        )
    pairs = [re.fullmatch(r"(\d+)x(\d+)", item) for item in args.widths.split(",")]
    widths = tuple((int(m[1]), int(m[2])) for m in pairs if m)
    if len(widths) != len(pairs) or any(w < 128 or w % 128 or n < 1 for w, n in widths):
        raise argparse.ArgumentTypeError(
            f"--widths: found {args.widths}, expected WIDTHxBLOCKS with widths that 128 divides, fix: --widths 2048x4"
        )
    return widths


def _command(args: argparse.Namespace) -> str:
    """What to type to measure again, every option spelled out."""
    options = [f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items() if value is not None]
    given = [o for o in options if not o.startswith(("--command", "--bench", "--traces"))]
    return f"fsdp-symm bench {args.bench} {' '.join(given)}"


def _run_host(args: argparse.Namespace) -> int:
    problem = _bad_host_argument(args)
    if problem is not None:
        Console(stderr=True).print(f"fsdp-symm bench host: {problem}", highlight=False)
        return 2
    from fsdp_symm.bench.host import HostBench, measure

    bench = HostBench(ranks=args.ranks, max_bytes=int(args.max_mib * 2**20), seconds=args.seconds)
    rows = measure(bench, _command(args))
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
