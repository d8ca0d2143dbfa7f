"""The one CSV schema of all benchmarks, so that tables are generated and runs compare."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_symm.errors import SymmMemConfigError


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


def gpu_versions() -> str:
    """Versions that matter to a GPU measurement: torch, NCCL, the driver's CUDA, python."""
    import torch

    from fsdp_symm import compat_nccl

    nccl = ".".join(map(str, compat_nccl.nccl_runtime_version()))
    return f"torch {torch.__version__}; NCCL {nccl}; CUDA {torch.version.cuda}; python {platform.python_version()}"


def gpu_hardware() -> str:
    """Number and name of the GPUs that this process sees."""
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines that have columns beside the schema's; the schema's come first."""
    first = [f.name for f in fields(Row)]
    further = [name for name in dict.fromkeys(k for line in lines for k in line) if name not in first]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*first, *further], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with a header; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def refuse_unwritable(path: Path, option: str = "--csv", *, appends: bool = False) -> None:
    """Find out before anything is measured whether the CSV can be written, and read if it is to grow.

    Raises:
        SymmMemConfigError: one line: found, expected, fix.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise SymmMemConfigError(
            f"{option}: found {path} ({error.strerror}), expected a file that can be written, fix: {option} x.csv"
        ) from error
    if appends and not new:
        read_lines(path)


_MOST = 2**63  # no benchmark measures more
# columns of every CSV that are numbers
_KINDS: dict[str, type] = {"ranks": int, "bytes": int, "n": int, "median_us": float, "min_us": float, "max_us": float}


def read_lines(path: Path) -> list[dict[str, str]]:
    """Every column as text.

    Raises:
        SymmMemConfigError: not a CSV of this schema; one line.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise SymmMemConfigError(
            f"{path}: found {error.strerror}, expected a CSV that can be read, fix: another file"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SymmMemConfigError(
            f"{path}: found no CSV ({error}), expected one of a benchmark, fix: another file"
        ) from error
    if any(None in line or None in line.values() for line in lines):
        raise SymmMemConfigError(
            f"{path}: found a line that is longer or shorter than the header, expected a file that a benchmark wrote "
            "to its end, fix: remove it and run the benchmark again"
        )
    missing = [f.name for f in fields(Row) if lines and f.name not in lines[0]]
    if missing:
        raise SymmMemConfigError(
            f"{path}: found columns {list(lines[0])}, expected {missing} among them, fix: a file that a benchmark wrote"
        )
    for number, line in enumerate(lines, 2):
        for name, kind in _KINDS.items():
            try:
                if not abs(kind(line[name])) < _MOST:
                    raise ValueError
            except ValueError as error:
                raise SymmMemConfigError(
                    f"{path}, line {number}: found {name} {line[name]!r}, expected a number, "
                    "fix: run the benchmark again"
                ) from error
    return lines


def read_measured(path: Path) -> list[dict[str, str]]:
    """:func:`read_lines`, at least one.

    Raises:
        SymmMemConfigError: as there, or a header alone.
    """
    if lines := read_lines(path):
        return lines
    raise SymmMemConfigError(f"{path}: found no line, expected at least one, fix: run the benchmark again")


def read(path: Path) -> list[Row]:
    """Read what :func:`write` wrote; further columns are left out."""
    return [Row(**{f.name: _KINDS.get(f.name, str)(line[f.name]) for f in fields(Row)}) for line in read_measured(path)]
