"""Which files are meant: paths, folders and globs to traces."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from fsdp_symm.trace.scan import TraceError

_SUFFIXES = (".json", ".json.gz")


def find_traces(paths: Iterable[str | Path]) -> dict[Path, bool]:
    """Files for a mix of files, folders and globs, each once; folders are searched at all depths.

    Returns:
        Path -> whether it was named itself: one that a search has found may turn out to be no trace.

    Raises:
        TraceError: a path that is empty, cannot be looked up, or matches nothing.
    """
    found: dict[Path, tuple[Path, bool]] = {}
    for given in paths:
        if not str(given):
            raise TraceError("found an empty path; expected a trace; check the variable that it comes from")
        path = Path(given)
        for match in _matches(path):
            first, named = found.get(match.resolve(), (match, False))
            found[match.resolve()] = (first, named or match == path)
    return dict(found.values())


def _matches(path: Path) -> list[Path]:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # too long, or below a folder without permission
        raise TraceError(f"{path}: {error.strerror}; expected a trace; check the path") from error
    if is_folder:
        matches = sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file())
        if not matches:
            raise TraceError(f"{path}: no .json or .json.gz inside; expected a folder of traces; check the path")
        return matches
    if exists:  # a file, or a pipe
        return [path]
    matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    if not matches:
        raise TraceError(f"{path}: no such file, folder or match; expected a trace; check the path")
    return matches
