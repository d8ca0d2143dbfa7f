"""A progress bar for long loads, where a terminal shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fsdp_symm.trace.load import Progress as Callback

_LONG_BYTES = 16 << 20  # smaller files load before a bar could be read


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
