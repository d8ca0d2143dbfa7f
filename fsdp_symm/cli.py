"""``fsdp-symm``: one entry point, one room per command.

Each command lives in its own room and is imported only when it is asked for, so that reading a trace on a
laptop does not import torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast


class Command(Protocol):
    """What a command's module offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its own parser."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the returned integer becomes the exit status."""
        ...


# name -> (module, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("fsdp_symm.trace.inspect_command", "say what moved the bytes in Kineto traces"),
    "diff": ("fsdp_symm.trace.diff_command", "compare the communication of two traces"),
    "bench": ("fsdp_symm.bench.command", "measure a backend against the plain path"),
    "doctor": ("fsdp_symm.doctor", "say what this machine and its groups can do, and why"),
}


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(COMMANDS[name][0]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program name; ``None`` takes ``sys.argv``.

    Returns:
        The exit status: 0 for success, 1 for an expectation that was not met, 2 for bad usage or bad input.
    """
    args_in = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="fsdp-symm", description="Put FSDP2 communication in symmetric memory, and see what moves it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if args_in[:1] == [name]:
            _load(name).configure(sub)
    args = parser.parse_args(args_in)
    try:
        return _load(args.command).run(args)
    except KeyboardInterrupt:
        print(f"fsdp-symm {args.command}: interrupted", file=sys.stderr)
        return 130  # what a shell reports for SIGINT


if __name__ == "__main__":
    sys.exit(main())
