"""The one CSV schema of all benchmarks, so that tables are generated and runs compare."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured line.

    Attributes:
        name: what was measured (``"all_gather"``).
        variant: who did it (``"host"``, ``"gloo"``).
        ranks: number of ranks.
        bytes: bytes a rank contributes.
        dtype: element type.
        median_us, min_us, max_us: microseconds over ``n`` calls; a call lasts until its slowest rank is done.
        n: timed calls.
        versions: software, ``;``-separated.
        hardware: processor, cores.
        command: what to type to measure it again.
    """

    name: str
    variant: str
    ranks: int
    bytes: int
    dtype: str
    median_us: float
    min_us: float
    max_us: float
    n: int
    versions: str
    hardware: str
    command: str


def summarize(samples_us: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and count of samples, as :class:`Row` fields."""
    return {
        "median_us": round(statistics.median(samples_us), 1),
        "min_us": round(min(samples_us), 1),
        "max_us": round(max(samples_us), 1),
        "n": len(samples_us),
    }


def versions() -> str:
    """Versions that matter to a CPU measurement."""
    import torch

    return f"torch {torch.__version__}; python {platform.python_version()}; linux {platform.release()}"


def hardware() -> str:
    """Processor and usable cores, from ``/proc/cpuinfo``."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}; {len(os.sched_getaffinity(0))} cores"


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with a header; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(path: Path) -> list[Row]:
    """Read what :func:`write` wrote; further columns are left out."""
    kinds = {"ranks": int, "bytes": int, "n": int, "median_us": float, "min_us": float, "max_us": float}
    with path.open(newline="") as file:
        return [
            Row(**{f.name: kinds.get(f.name, str)(line[f.name]) for f in fields(Row)}) for line in csv.DictReader(file)
        ]
