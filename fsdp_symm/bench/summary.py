"""A short table of a folder of CSVs, for the end of a script: one line a name and variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fsdp_symm.bench import schema, train_tables
from fsdp_symm.bench.way_tables import Line, time
from fsdp_symm.errors import SymmMemConfigError


def run(folder: Path) -> int:
    """Print the table.

    Returns:
        0, 1 if the losses of training runs differ, 2 where nothing was measured.
    """
    err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        csvs = {path: schema.read_lines(path) for path in sorted(folder.glob("*.csv"))}
    except SymmMemConfigError as error:
        err.print(f"fsdp-symm bench summary: {error}")
        return 2
    lines = [x for rows in csvs.values() for x in last_of_each(rows)]
    if not lines:
        err.print(
            f"fsdp-symm bench summary: found no measured line in {folder}, expected CSVs, fix: run benchmarks first"
        )
        return 2
    Console(soft_wrap=True, highlight=False, markup=False).print(summary_table(lines))
    wrong = [text for rows in csvs.values() for text in train_tables.wrong_losses([x for x in rows if _trains(x)])]
    if wrong:
        err.print("\n".join(wrong))
    return 1 if wrong else 0


def _trains(line: Line) -> bool:
    return str(line["name"]).startswith("train_")


def last_of_each(lines: Sequence[Line]) -> list[Line]:
    """The last line of each name and variant: the largest size, where benchmarks measure several."""
    return list({(x["name"], x["ranks"], x["variant"]): x for x in lines}.values())


def summary_table(lines: Sequence[Line]) -> str:
    """Markdown: what, by whom, how long; memory and losses of training runs."""
    header = ("what", "ranks", "MiB", "variant", "ms: median (min-max)", "peak + symmetric, GiB", "loss: first, last")
    rows = []
    for x in lines:
        steps = train_tables.losses(x) if _trains(x) else []
        memory = train_tables.memory(x) if _trains(x) else "-"
        about = (str(x["name"]), str(x["ranks"]), f"{int(x['bytes']) / 2**20:.0f}", str(x["variant"]))
        rows.append((*about, time(x), memory, f"{steps[0]:.5f}, {steps[-1]:.5f}" if steps else "-"))
    table = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    machines = dict.fromkeys(f"{x['hardware']}; {x['versions']}" for x in lines)
    return "\n".join([*table, "", "The last line of each name and variant; MiB are one rank's.", *machines])
