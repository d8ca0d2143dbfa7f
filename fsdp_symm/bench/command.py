"""``fsdp-symm bench``: run a benchmark and write its CSV, or renew the tables that are made from the CSVs."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdp_symm.bench import expert_tables, schema, summary, tables, train_command, way_tables


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``fsdp-symm bench``."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    host = kinds.add_parser("host", help="host backend against gloo, CPU ranks of this machine")
    host.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    host.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    host.add_argument("--max-mib", type=float, default=256, help="largest chunk of a rank in MiB (default 256)")
    host.add_argument("--seconds", type=float, default=1.0, help="timed seconds a line (default 1)")
    _add_ways(kinds.add_parser("unshard", help="a Llama block's parameters: direct placement, NCCL and copy-out"))
    reduce = kinds.add_parser("reduce-scatter", help="copy engines and a local sum, NCCL's kernels")
    _add_ways(reduce)
    reduce.add_argument("--pieces", default=None, help="MiB of a piece, comma-separated, beside the package's own rule")
    step = kinds.add_parser("fsdp-step", help="a training step: plain FSDP2, torch's switch, ours, no communication")
    step.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    step.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    step.add_argument("--widths", default="2048x4,4096x4", help="WIDTHxBLOCKS, comma-separated (default %(default)s)")
    step.add_argument("--tokens", type=int, default=4096, help="tokens a rank, a multiple of 1024 (default 4096)")
    step.add_argument("--steps", type=int, default=10, help="timed steps of each variant (default 10)")
    step.add_argument("--profiled-steps", type=int, default=5, help="profiled steps of each variant (default 5)")
    step.add_argument(
        "--alive",
        type=int,
        default=4,
        help="variants alive at once, torch's switch and the floor included: fewer take less memory (default 4)",
    )
    step.add_argument("--traces", type=Path, default=None, metavar="DIR", help="keep a trace of each variant")
    _add_experts(kinds.add_parser("experts", help="expert parallelism: dispatch, combine, forward and backward"))
    train_command.configure(
        kinds.add_parser("train", help="train.py: with the switch, plain, with torchtitan's switch")
    )
    total = kinds.add_parser("summary", help="a short table of every CSV of a folder; exit 1 if losses differ")
    total.add_argument("folder", type=Path, metavar="FOLDER", help="where the CSVs are")
    renew = kinds.add_parser("tables", help="renew the README's tables from the CSVs in profiles/")
    renew.add_argument("--root", type=Path, default=Path("."), help="the repository (default: this folder)")
    renew.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """What the two benchmarks of ways have in common."""
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--mib", default="8,32,64,128,256", help="MiB of one rank, comma-separated (default %(default)s)"
    )
    parser.add_argument("--traces", type=Path, default=None, metavar="DIR", help="keep the profile of each size")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help="where the rows go")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is a GPU")
    parser.add_argument(
        "--experts", default="8x2,64x6,128x8,256x8", help="EXPERTSxTOPK, comma-separated (default %(default)s)"
    )
    parser.add_argument("--tokens", default="4096", help="tokens of a rank, comma-separated (default %(default)s)")
    parser.add_argument("--hidden", default="2048", help="widths, comma-separated (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which all take turns (default 5)")
    parser.add_argument("--traces", type=Path, default=None, metavar="DIR", help="keep the profile of each line")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    alone: dict[str, Callable[[], int]] = {
        "tables": lambda: tables.renew(args.root, check=args.check),
        "train": lambda: train_command.run(args),
        "summary": lambda: summary.run(args.folder),
        "host": lambda: _run_host(args),
    }
    if args.bench in alone:
        return alone[args.bench]()
    gpu: dict[str, Callable[[argparse.Namespace], tuple[list[dict[str, Any]], list[str]]]] = {
        "fsdp-step": _fsdp_step,
        "unshard": _unshard,
        "reduce-scatter": _reduce_scatter,
        "experts": _experts,
    }
    from fsdp_symm.errors import SymmMemError

    try:
        schema.refuse_unwritable(args.csv)
        lines, texts = gpu[args.bench](args)
    except (SymmMemError, argparse.ArgumentTypeError) as error:
        # A rank's own words may hold brackets, which are no markup.
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            f"fsdp-symm bench {args.bench}: {error}"
        )
        return 2
    schema.write_lines(args.csv, lines)
    Console(soft_wrap=True, highlight=False, markup=False).print("\n\n".join(texts))
    return 0


def _fsdp_step(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    widths = _step_widths(args)
    from fsdp_symm.bench.fsdp_step import StepBench, measure

    bench = StepBench(args.ranks, widths, args.tokens, args.steps, args.traces, args.profiled_steps, args.alive)
    lines = measure(bench, _command(args))
    return lines, [way_tables.step_table(lines)]


def _unshard(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    mib = _sizes(args, "mib")
    from fsdp_symm.bench.unshard import UnshardBench, measure

    lines = measure(UnshardBench(args.ranks, mib, _command(args), args.traces))
    return lines, [way_tables.unshard_table(lines)]


def _reduce_scatter(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    mib = _sizes(args, "mib")
    pieces = () if args.pieces is None else _sizes(args, "pieces")
    from fsdp_symm.bench.reduce_scatter import ReduceBench, measure

    lines = measure(ReduceBench(args.ranks, mib, pieces, _command(args), args.traces))
    texts = [way_tables.reduce_table(lines)]
    return lines, [*texts, way_tables.pieces_table(lines)] if pieces else texts


def _experts(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    pairs = _expert_pairs(args)
    tokens, hidden = _counts(args, "tokens", 1, 4096), _counts(args, "hidden", 8, 2048)
    if not 3 <= args.rounds <= 100:
        raise argparse.ArgumentTypeError(f"--rounds: found {args.rounds}, expected 3 to 100, fix: --rounds 5")
    import torch

    from fsdp_symm.bench.experts import ExpertsBench, measure

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = measure(
        ExpertsBench(args.ranks, pairs, tokens, hidden, _command(args), args.traces, args.rounds, args.device)
    )
    return lines, [expert_tables.experts_table(lines), expert_tables.experts_costs_table(lines)]


def _expert_pairs(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The (experts, top-k) pairs.

    Raises:
        argparse.ArgumentTypeError: a number that the benchmark cannot use; one line.
    """
    if args.ranks < 2:
        raise argparse.ArgumentTypeError(f"--ranks: found {args.ranks}, expected at least 2, fix: --ranks 2")
    matches = [re.fullmatch(r"(\d+)x(\d+)", item) for item in args.experts.split(",")]
    pairs = tuple((int(m[1]), int(m[2])) for m in matches if m)
    good = all(1 <= k <= e <= 4096 and e % args.ranks == 0 for e, k in pairs)
    if len(set(pairs)) != len(matches) or not good:
        raise argparse.ArgumentTypeError(
            f"--experts: found {args.experts}, expected different EXPERTSxTOPK with experts that {args.ranks} ranks "
            f"divide, fix: --experts {4 * args.ranks}x2"
        )
    return pairs


def _counts(args: argparse.Namespace, option: str, step: int, usual: int) -> tuple[int, ...]:
    """The whole numbers of a comma-separated option.

    Raises:
        argparse.ArgumentTypeError: no number, or not a multiple of ``step``; one line.
    """
    text = getattr(args, option)
    items = text.split(",")
    numbers = tuple(int(item) for item in items if re.fullmatch(r"\d{1,6}", item))
    if len(set(numbers)) != len(items) or any(n < 1 or n % step for n in numbers):
        raise argparse.ArgumentTypeError(
            f"--{option}: found {text}, expected different multiples of {step}, fix: --{option} {usual}"
        )
    return numbers


def _sizes(args: argparse.Namespace, option: str) -> tuple[float, ...]:
    """The numbers of a comma-separated option, in MiB.

    Raises:
        argparse.ArgumentTypeError: a number that the benchmark cannot use; one line.
    """
    if args.ranks < 2:
        raise argparse.ArgumentTypeError(f"--ranks: found {args.ranks}, expected at least 2, fix: --ranks 2")
    text = getattr(args, option)
    items = text.split(",")
    good = all(re.fullmatch(r"\d+(\.\d+)?", item) and 0.125 <= float(item) <= 4096 for item in items)
    sizes = tuple(float(item) for item in items) if good else ()
    # pieces and chunks begin on whole elements, and copy engines like whole 256-byte lines
    if not sizes or len(set(sizes)) < len(sizes) or any(size * 2**20 % 4096 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"--{option}: found {text}, expected different MiB from 0.125 to 4096, of whole 4 KiB, fix: --{option} 8,64"
        )
    return sizes


def _step_widths(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The (width, blocks) pairs.

    Raises:
        argparse.ArgumentTypeError: a number that the benchmark cannot use; one line.
    """
    if args.ranks < 2 or args.steps < 1:
        raise argparse.ArgumentTypeError(
            f"--ranks {args.ranks} --steps {args.steps}: expected at least 2 ranks, 1 step, fix: --ranks 2 --steps 10"
        )
    if not 1 <= args.profiled_steps <= 50:
        raise argparse.ArgumentTypeError(
            f"--profiled-steps: found {args.profiled_steps}, expected 1 to 50, fix: --profiled-steps 5"
        )
    if args.alive < 3:
        raise argparse.ArgumentTypeError(f"--alive: found {args.alive}, expected at least 3, fix: --alive 4")
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
    from fsdp_symm.errors import SymmMemError

    problem = _bad_host_argument(args)
    try:
        schema.refuse_unwritable(args.csv)
    except SymmMemError as error:
        problem = problem or str(error)
    if problem is not None:
        Console(stderr=True, soft_wrap=True, markup=False).print(f"fsdp-symm bench host: {problem}", highlight=False)
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
    if not 0.0625 <= args.max_mib <= 2**20:
        return f"--max-mib: found {args.max_mib:g}, expected 0.0625 (64 KiB) to 1048576, fix: --max-mib 1"
    if not 0 < args.seconds < math.inf:
        return f"--seconds: found {args.seconds:g}, expected more than 0, and an end, fix: --seconds 1"
    return None
