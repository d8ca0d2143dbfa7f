"""Tables in the README and docs, generated from the committed CSVs between two marker comments; never by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdp_symm.bench import expert_tables, nvlink_tables, schema, train_tables, way_tables
from fsdp_symm.bench.schema import Row
from fsdp_symm.errors import SymmMemConfigError


def _size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"


def _time(row: Row) -> str:
    return f"{row.median_us / 1000:.2f} ms ({row.min_us / 1000:.2f}-{row.max_us / 1000:.2f})"


def host_table(rows: Sequence[Row]) -> str:
    """Markdown: the host backend beside gloo, one line a collective, dtype and size; the ratio is of the medians."""
    by_key = {(r.name, r.dtype, r.bytes, r.variant): r for r in rows}
    lines = [
        "| collective | dtype | bytes a rank | gloo, median (min-max) | host, median (min-max) | gloo / host |",
        "|---|---|---|---|---|---|",
    ]
    for name, dtype, nbytes in dict.fromkeys((r.name, r.dtype, r.bytes) for r in rows):
        gloo, host = by_key[name, dtype, nbytes, "gloo"], by_key[name, dtype, nbytes, "host"]
        ratio = gloo.median_us / host.median_us
        lines.append(f"| {name} | {dtype} | {_size(nbytes)} | {_time(gloo)} | {_time(host)} | {ratio:.1f}x |")
    first = rows[0]
    lines.append("")
    lines.append(f"{first.ranks} ranks on {first.hardware}; {first.versions}; `{first.command}`.")
    return "\n".join(lines)


def inspect_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: how fast traces are read, and how much memory that takes."""
    table = ["| who | trace | MB/s (median of n) | n | peak memory |", "|---|---|---|---|---|"]
    for x in lines:
        table.append(
            f"| {x['variant']} | {int(x['bytes']) / 1e6:.0f} MB | {float(x['mb_per_s']):.0f} | {x['n']} "
            f"| {int(x['peak_bytes']) / 1e6:.0f} MB |"
        )
    first = lines[0]
    return "\n".join([*table, "", f"{first['hardware']}; {first['versions']}; `{first['command']}`."])


def _host(path: Path) -> str:
    return host_table(schema.read(path))


def _steps(path: Path) -> str:
    return way_tables.step_table(schema.read_measured(path))


def _unshard(path: Path) -> str:
    return way_tables.unshard_table(schema.read_measured(path))


def _reduce(path: Path) -> str:
    return way_tables.reduce_table(schema.read_measured(path))


def _pieces(path: Path) -> str:
    return way_tables.pieces_table(schema.read_measured(path))


def _experts(path: Path) -> str:
    return expert_tables.experts_table(schema.read_measured(path))


def _expert_costs(path: Path) -> str:
    return expert_tables.experts_costs_table(schema.read_measured(path))


def _train(path: Path) -> str:
    return train_tables.train_table(schema.read_measured(path))


def _inspect(path: Path) -> str:
    return inspect_table(schema.read_measured(path))


# marker -> (CSV below the repository, or a folder of them, how it becomes a table)
TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "host_vs_gloo": ("profiles/host_vs_gloo.csv", _host),
    "fsdp_step_w2": ("profiles/fsdp_step_w2.csv", _steps),
    "fsdp_step_w4": ("profiles/fsdp_step_w4.csv", _steps),
    "fsdp_step_d2048_w2": ("profiles/fsdp_step_d2048_w2.csv", _steps),
    "unshard_w2": ("profiles/unshard_w2.csv", _unshard),
    "unshard_w4": ("profiles/unshard_w4.csv", _unshard),
    "reduce_scatter_w2": ("profiles/reduce_scatter_w2.csv", _reduce),
    "reduce_scatter_w4": ("profiles/reduce_scatter_w4.csv", _reduce),
    "reduce_pieces_w2": ("profiles/reduce_scatter_w2.csv", _pieces),
    "reduce_pieces_w4": ("profiles/reduce_scatter_w4.csv", _pieces),
    "experts_cpu_w2": ("profiles/experts_cpu_w2.csv", _experts),
    "experts_w2": ("profiles/experts_w2.csv", _experts),
    "experts_w4": ("profiles/experts_w4.csv", _experts),
    "expert_costs_w2": ("profiles/experts_w2.csv", _expert_costs),
    "expert_costs_w4": ("profiles/experts_w4.csv", _expert_costs),
    "train_w2": ("profiles/train_w2.csv", _train),
    "inspect": ("profiles/inspect.csv", _inspect),
    "nvlink": (nvlink_tables.FOLDER, nvlink_tables.section),
}
# files that may hold tables; a table is in one of them
DOCUMENTS = ("README.md", "docs/experts.md")
# measured, but shown only where a document asks for it: these tables are long
OPTIONAL = {name for name in TABLES if name.startswith("expert")}


def _replace(text: str, marker: str, table: str) -> str | None:
    begin, end = f"<!-- table:{marker} -->", f"<!-- /table:{marker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        return None
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{table}\n{end}{tail}"


def renew(root: Path, *, check: bool) -> int:
    """Put every table between its markers. A table with neither a CSV nor a marker is left out.

    Args:
        root: the repository.
        check: change nothing; report tables that differ from their CSV.

    Returns:
        0, 1 if ``check`` found a difference, 2 for a missing CSV or marker.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not (root / DOCUMENTS[0]).is_file():
        console.print(
            f"fsdp-symm bench tables: found no {root / DOCUMENTS[0]}, expected the repository, fix: --root FOLDER"
        )
        return 2
    try:
        old = {name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS if (root / name).is_file()}
    except (OSError, UnicodeDecodeError) as error:
        console.print(
            f"fsdp-symm bench tables: found a document that cannot be read ({error}), expected UTF-8 text, "
            "fix: restore it"
        )
        return 2
    new = dict(old)
    for marker in TABLES:
        if (problem := _renew_one(root, marker, new)) is not None:
            console.print(f"fsdp-symm bench tables: {problem}")
            return 2
    changed = [name for name, text in new.items() if text != old[name]]
    if changed and check:
        names = ", ".join(changed).replace("README.md", "a README")
        console.print(f"fsdp-symm bench tables: found {names} that differs from its CSVs, fix: fsdp-symm bench tables")
        return 1
    for name in changed:
        (root / name).write_text(new[name])
    return 0


def _renew_one(root: Path, marker: str, documents: dict[str, str]) -> str | None:
    """Put one table into the document that has its markers; what is missing for that, or ``None``."""
    csv_path, make = TABLES[marker]
    path = root / csv_path
    wanted = [name for name, text in documents.items() if f"<!-- table:{marker} -->" in text]
    if not path.exists():
        return f"found no {path}, expected a CSV, fix: run the benchmark first" if wanted else None
    if not wanted and marker in OPTIONAL:
        return None
    name = wanted[0] if len(wanted) == 1 else DOCUMENTS[0]
    try:
        table = make(path)
    except SymmMemConfigError as error:
        return str(error)
    except (LookupError, ValueError, TypeError, ZeroDivisionError, StopIteration) as error:  # of whatever a cell lacks
        return (
            f"found {path} without what its table needs ({type(error).__name__}: {error}), expected what this "
            "version's benchmark writes, fix: run the benchmark again"
        )
    replaced = _replace(documents[name], marker, table) if len(wanted) == 1 else None
    if replaced is None:
        return (
            f"found no single pair of markers for {marker!r} in {root / name}, expected <!-- table:{marker} --> and "
            f"<!-- /table:{marker} -->, fix: put them where the table belongs"
        )
    documents[name] = replaced
    return None
