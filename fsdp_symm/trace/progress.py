"""What the commands share on a terminal: a progress bar for long loads, and an end to output that nobody reads."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fsdp_symm.trace.load import Progress as Callback
from fsdp_symm.trace.scan import TraceError

_LONG_BYTES = 16 << 20  # smaller files load before a bar could be read


@contextmanager
def pipe() -> Iterator[None]:
    """Stop writing without a traceback when the reader of standard output, such as ``head``, has left."""
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
        raise TraceError(f"standard output: {error.strerror or error}; expected a writable file") from error


def _discard() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the final flush stays quiet


@contextmanager
def loading() -> Iterator[Callback | None]:
    """Yield a callback for ``load``, or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[Path, TaskID] = {}

        def advance(path: Path, num_bytes: int, size: int) -> None:
            if size < _LONG_BYTES:
                return
            if path not in tasks:
                tasks[path] = bar.add_task(path.name, total=size)
            bar.advance(tasks[path], num_bytes)

        yield advance
