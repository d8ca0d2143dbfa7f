"""The README's section of measurements over NVLink: every CSV of profiles/nvlink, and what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_symm.bench import expert_tables, schema, train_tables, way_tables
from fsdp_symm.bench.way_tables import Line
from fsdp_symm.errors import SymmMemConfigError

FOLDER = "profiles/nvlink"
# kind -> (what it is called, its tables)
KINDS: dict[str, tuple[str, tuple[Callable[[Sequence[Line]], str], ...]]] = {
    "unshard": ("Unsharding a Llama block", (way_tables.unshard_table,)),
    "reduce_scatter": ("Reduce-scatter", (way_tables.reduce_table, way_tables.pieces_table)),
    "fsdp_step": ("A training step of Llama-like blocks", (way_tables.step_table,)),
    "experts": ("Expert parallelism", (expert_tables.experts_table,)),
    "train": ("Training with torchtitan", (train_tables.train_table,)),
}
# KIND_wRANKS.csv, or KIND_MORE_wRANKS.csv where a kind was measured in several runs
_NAME = re.compile(rf"({'|'.join(KINDS)})(?:_(\w+))?_w(\d+)")


def section(folder: Path) -> str:
    """Markdown: the tables of every CSV in the folder, by kind and ranks, and the kinds that have none.

    Raises:
        SymmMemConfigError: a CSV whose name says of no kind or no ranks; one line.
    """
    found: dict[str, list[tuple[int, str, Path]]] = {kind: [] for kind in KINDS}
    for path in folder.glob("*.csv"):
        name = _NAME.fullmatch(path.stem)
        if name is None:
            raise SymmMemConfigError(
                f"found {path}, expected KIND_wRANKS.csv with a kind of {', '.join(KINDS)}, fix: rename or remove it"
            )
        found[name[1]].append((int(name[3]), name[2] or "", path))
    parts = []
    for kind, (title, tables) in KINDS.items():
        for ranks, more, path in sorted(found[kind]):
            lines = schema.read_measured(path)
            parts.append(f"**{title}{f' ({more})' if more else ''}**, {ranks} ranks:")
            parts += [table(lines) for table in tables]
    absent = [title for kind, (title, _) in KINDS.items() if not found[kind]]
    if absent:
        parts.append("Not measured: " + "; ".join(title[0].lower() + title[1:] for title in absent) + ".")
    return "\n\n".join(parts)
