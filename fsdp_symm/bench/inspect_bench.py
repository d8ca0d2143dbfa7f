"""How fast the trace inspector loads, and in how much memory, against other ways to read the same file.

``python -m fsdp_symm.bench.inspect_bench --csv profiles/inspect.csv [--hta-python PYTHON]``

A recorded trace is repeated with shifted times and ids until it has the wanted size, in the indentation that Kineto
writes. Every variant reads it in a fresh process, variants alternate, and each result is checked before its time
counts. Peak memory is the whole process (``ru_maxrss``), libraries included. MB are 1e6 bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from fsdp_symm.bench import schema

_TEMPLATE = Path(__file__).parents[2] / "tests" / "trace" / "fixtures" / "h200_fsdp_symm_w2_fp32.json.gz"
_STEP_US = 100_000.0
_CALLS = 12  # collectives in the template

# Each prints the number it is checked by: collective calls for the inspectors, rows for the readers.
_VARIANTS = {
    "fsdp_symm inspect": "from fsdp_symm.trace import inspect_traces; n = len(inspect_traces(p).ranks[0].calls)",
    "fsdp_symm load": "from fsdp_symm.trace.load import load; n = load([p])[0].num_rows",
    "json.load": "import json; n = len(json.load(open(p))['traceEvents'])",
    "orjson.loads": "import orjson; n = len(orjson.loads(open(p, 'rb').read())['traceEvents'])",
    "msgspec whole file": (
        "import msgspec; from fsdp_symm.trace.scan import Row; from typing import Any;"
        "T = msgspec.defstruct('T', [('traceEvents', list[Row])]);"
        "n = len(msgspec.json.decode(open(p, 'rb').read(), type=T).traceEvents)"
    ),
    "ijson": "import ijson; n = sum(1 for _ in ijson.items(open(p, 'rb'), 'traceEvents.item'))",
    "HolisticTraceAnalysis": (
        "import logging, os; logging.disable(logging.CRITICAL); from hta.trace_analysis import TraceAnalysis;"
        "t = TraceAnalysis(trace_files={0: os.path.basename(p)}, trace_dir=os.path.dirname(p));"
        "n = len(t.t.get_trace(0))"
    ),
}
_LIBRARIES = {
    "fsdp_symm inspect": "msgspec",
    "fsdp_symm load": "msgspec",
    "json.load": "",
    "orjson.loads": "orjson",
    "msgspec whole file": "msgspec",
    "ijson": "ijson",
    "HolisticTraceAnalysis": "HolisticTraceAnalysis",
}
_TIMED = (
    "import resource, sys, time; p = sys.argv[1]; begin = time.perf_counter()\n{body}\n"
    "took = time.perf_counter() - begin\n"
    "peak = max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
    "print(n, took, peak * 1024, file=sys.stderr)"
)


@dataclass(frozen=True)
class InspectRow(schema.Row):
    """A row of the common schema; ``bytes`` is the size of the file.

    Attributes:
        peak_bytes: largest resident memory of the process over the runs.
        mb_per_s: file size over the median time.
    """

    peak_bytes: int
    mb_per_s: float


def _shifted(row: dict[str, Any], copy: int) -> dict[str, Any]:
    """The row in repetition ``copy``: later, and with ids of its own."""
    out = dict(row)
    if isinstance(row.get("ts"), int | float):
        out["ts"] = row["ts"] + copy * _STEP_US
    if isinstance(row.get("args"), dict):
        out["args"] = {
            k: v + copy * 1_000_000 if k in ("correlation", "External id", "Ev Idx", "Seq") and v else v
            for k, v in row["args"].items()
        }
    if isinstance(row.get("id"), int):
        out["id"] = row["id"] + copy * 1_000_000
    return out


def _row_texts(rows: list[dict[str, Any]]) -> Iterator[str]:
    copy = 0
    while True:
        for row in rows:
            yield json.dumps(_shifted(row, copy), indent=2)
        copy += 1


def write_trace(path: Path, size_bytes: int, template: Path = _TEMPLATE) -> tuple[int, int]:
    """Write a trace of whole repetitions with at least ``size_bytes``.

    Returns:
        Its rows and its collective calls.
    """
    data = json.loads(gzip.decompress(template.read_bytes()))
    rows = [row for row in data.pop("traceEvents") if row.get("cat") != "Trace"]
    texts = _row_texts(rows)
    copies = written = 0
    with path.open("w") as file:
        file.write(json.dumps(data, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        while written < size_bytes:
            block = ",\n".join(next(texts) for _ in rows)
            written += file.write((",\n" if copies else "") + block)
            copies += 1
        file.write("\n]}\n")
    return copies * len(rows), copies * _CALLS


def _run(python: str, variant: str, path: Path) -> tuple[int, float, int]:
    """(check number, seconds, peak bytes) of one fresh process."""
    code = _TIMED.format(body=_VARIANTS[variant])
    done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant}: found exit status {done.returncode}; expected 0: {done.stderr[-300:]}")
    n, seconds, peak = done.stderr.split("\n")[-2].split()
    return int(n), float(seconds), int(peak)


def _check(variant: str, found: int, num_rows: int, num_calls: int) -> None:
    """HTA keeps only rows of a duration, so its count is a lower bound."""
    want = num_calls if variant == "fsdp_symm inspect" else num_rows
    right = 0.3 * want < found <= want if variant == "HolisticTraceAnalysis" else found == want
    if not right:
        raise RuntimeError(f"{variant}: found {found}; expected {want}; the reader lost or made up rows")


def measure(
    size_mb: int, variants: list[str], repeats: int, hta_python: str | None, command: str
) -> Iterator[InspectRow]:
    """Time the variants on one file, alternating."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        num_rows, num_calls = write_trace(path, size_mb * 1_000_000)
        size = path.stat().st_size
        runs: dict[str, list[tuple[float, int]]] = {variant: [] for variant in variants}
        pythons = dict.fromkeys(variants, sys.executable) | {"HolisticTraceAnalysis": hta_python or sys.executable}
        for _ in range(repeats):
            for variant, samples in runs.items():
                found, seconds, peak = _run(pythons[variant], variant, path)
                _check(variant, found, num_rows, num_calls)
                samples.append((seconds, peak))
        for variant, samples in runs.items():
            stats = schema.summarize([seconds * 1e6 for seconds, _ in samples])
            yield InspectRow(
                name="load_trace", variant=variant, ranks=1, bytes=size, dtype="json", **stats,  # type: ignore[arg-type]
                versions=_versions(pythons[variant], variant), hardware=schema.hardware(), command=command,
                peak_bytes=max(peak for _, peak in samples),
                mb_per_s=round(size / stats["median_us"], 1),
            )  # fmt: skip


def _versions(python: str, variant: str) -> str:
    """The interpreter that ran a variant and the library that read the file."""
    library = _LIBRARIES[variant]
    code = "import platform; from importlib.metadata import version; print(platform.python_version())"
    code += f"; print(version({library!r}))" if library else ""
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    found, *rest = done.stdout.split()
    return "; ".join([f"python {found}", *(f"{library} {v}" for v in rest), f"linux {platform.release()}"])


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description="the trace inspector against other readers")
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--mb", type=int, default=200, help="size of the file that all variants read (default 200)")
    parser.add_argument("--large-mb", type=int, default=1000, help="a second size for the inspector alone; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta-python", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    args = parser.parse_args()
    variants = [v for v, library in _LIBRARIES.items() if not library or _has(library)]
    if args.hta_python:
        variants.append("HolisticTraceAnalysis")
    command = f"python -m fsdp_symm.bench.inspect_bench --csv {args.csv} --hta-python PYTHON"
    rows = list(measure(args.mb, variants, args.repeats, args.hta_python, command))
    if args.large_mb:
        rows += measure(args.large_mb, ["fsdp_symm inspect"], args.repeats, None, command)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(InspectRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for row in rows:
        size, peak = row.bytes / 1e6, row.peak_bytes / 1e6
        print(f"{row.variant:24s} {size:6.0f} MB  {row.mb_per_s:7.1f} MB/s  peak {peak:7.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
