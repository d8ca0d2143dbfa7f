"""``fsdp-symm bench train``: arguments, one run after another, the CSV, the comparison of the losses."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fsdp_symm.bench import schema, train_tables
from fsdp_symm.bench.train_events import WARM_STEPS
from fsdp_symm.errors import SymmMemConfigError, SymmMemError

if TYPE_CHECKING:
    from fsdp_symm.bench.train import TrainBench

_FEWEST_STEPS = WARM_STEPS + 3  # one timed step, the one in which the profiler starts, the traced one


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``fsdp-symm bench train``."""
    parser.add_argument(
        "--csv",
        type=Path,
        required=True,
        metavar="FILE",
        help="where the rows go; rows of other names and variants stay",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="TOML file, e.g. configs/llama3_8b.toml"
    )
    parser.add_argument("--name", default=None, help="name of the rows (default: the file's, without .toml)")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--variants",
        default="symm,plain,native",
        help="comma-separated: symm, plain, native (torchtitan's own switch, GPUs only), each also with "
        "+IMPLEMENTATION of the experts, e.g. symm+copy_engine,plain+torchtitan (default %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of each run; the last one is traced (default 12)")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="any key of the TOML file, repeatable"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take (default 300)")
    parser.add_argument(
        "--traces", type=Path, default=None, metavar="DIR", help="keep rank 0's trace and log of each run"
    )


def run(args: argparse.Namespace) -> int:
    """Run the variants; each one's row is in the CSV as soon as it has ended.

    Returns:
        0, 1 if a run failed or losses differ (the others' rows are written), 2 for bad usage.
    """
    err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        bench = _bench(args)
        bench.check()
        schema.refuse_unwritable(args.csv, appends=True)
        if args.traces is not None and args.traces.exists() and not args.traces.is_dir():
            raise SymmMemConfigError(f"--traces: found the file {args.traces}, expected a folder, fix: --traces traces")
    except SymmMemConfigError as error:
        err.print(f"fsdp-symm {error}" if str(error).startswith("bench") else f"fsdp-symm bench train: {error}")
        return 2
    with _ended_by_sigterm():
        failures = _run_all(bench, args.csv)
    if not args.csv.is_file():
        err.print("\n".join(failures))
        return 1
    lines = [x for x in schema.read_lines(args.csv) if (x["name"], x["ranks"]) == _key(bench)]
    if lines:
        Console(soft_wrap=True, highlight=False, markup=False).print(train_tables.train_table(lines))
    # lines of earlier runs were compared then; the summary of a folder compares all
    failures += train_tables.wrong_losses(lines, [variant.name for variant in bench.variants])
    if failures:
        err.print("\n".join(failures))
    return 1 if failures else 0


def _key(bench: TrainBench) -> tuple[str, str]:
    return f"train_{bench.name}", str(bench.ranks)


def _run_all(bench: TrainBench, csv: Path) -> list[str]:
    """What failed, in words."""
    from fsdp_symm.bench.train import run_variant

    failures = []
    for variant in bench.variants:
        try:
            line = run_variant(bench, variant)
        except SymmMemError as error:
            failures.append(str(error))
            continue
        old: list[dict[str, Any]] = [*schema.read_lines(csv)] if csv.is_file() else []
        schema.write_lines(csv, train_tables.merge(old, line))
        print(
            f"train_{bench.name} {variant.name}: {line['median_us'] / 1e3:.1f} ms a step", file=sys.stderr, flush=True
        )
    return failures


def _bench(args: argparse.Namespace) -> TrainBench:
    """The arguments, checked.

    Raises:
        SymmMemConfigError: one that cannot be used; one line.
    """
    from fsdp_symm.bench.train import TrainBench, Variant

    name = args.name or args.config.stem
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise SymmMemConfigError(f"--name: found {name!r}, expected letters, digits and _, fix: --name llama3_8b")
    if args.ranks < 2:
        raise SymmMemConfigError(f"--ranks: found {args.ranks}, expected at least 2, fix: --ranks 2")
    if args.steps < _FEWEST_STEPS:
        raise SymmMemConfigError(
            f"--steps: found {args.steps}, expected at least {_FEWEST_STEPS}: the first {WARM_STEPS} and the last 2 "
            "are not timed, fix: --steps 12"
        )
    if not args.limit > 0:
        raise SymmMemConfigError(f"--limit: found {args.limit:g}, expected seconds above 0, fix: --limit 300")
    variants = tuple(Variant.parse(text) for text in args.variants.split(","))
    if len(set(variants)) < len(variants):
        raise SymmMemConfigError(f"--variants: found {args.variants}, expected different ones, fix: name each once")
    return TrainBench(
        args.config,
        name,
        args.ranks,
        variants,
        args.steps,
        tuple(args.override),
        args.limit,
        _command(args),
        args.traces,
    )


def _command(args: argparse.Namespace) -> str:
    """What to type to measure again, every option spelled out."""
    given: dict[str, Any] = {
        "csv": args.csv, "config": args.config, "name": args.name or args.config.stem, "ranks": args.ranks,
        "variants": args.variants, "steps": args.steps,
    }  # fmt: skip
    words = [f"--{option} {value}" for option, value in given.items()]
    return " ".join(["fsdp-symm bench train", *words, *(f"--override {text}" for text in args.override)])


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the ranks are ended too and no GPU memory stays behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
