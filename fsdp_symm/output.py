"""An end to output that nobody reads: what the commands share when they write to standard output."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class OutputError(Exception):
    """Standard output cannot be written; the text says why."""


class PipeConsole(Console):
    """Leaves it to :func:`pipe` to end quietly; rich itself would exit with status 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader has left."""
        raise BrokenPipeError


@contextmanager
def pipe() -> Iterator[None]:
    """Stop writing without a traceback when the reader of standard output, such as ``head``, has left.

    Raises:
        OutputError: it cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:  # started with a closed descriptor
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # stays open like any stdout
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard()
    except OSError as error:  # a full disk
        _discard()
        raise OutputError(f"standard output: {error.strerror or error}; expected a writable file") from error


def _discard() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the final flush stays quiet
