"""README tables of ways side by side: unsharding, reduce-scatter, training steps. Made from CSV lines alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def _number(text: Any, digits: int) -> str:
    """A number of the CSV, ``-`` where nothing was measured."""
    return "-" if text in ("", None) else f"{float(text):.{digits}f}"


def _ms(line: Line, name: str, digits: int = 3) -> str:
    """A column of microseconds as milliseconds."""
    value = line.get(name, "")
    return _number("" if value in ("", None) else float(value) / 1e3, digits)


def _time(line: Line, digits: int = 3) -> str:
    return f"{_ms(line, 'median_us', digits)} ({_ms(line, 'min_us', digits)}-{_ms(line, 'max_us', digits)})"


def _spread(line: Line, name: str, digits: int) -> str:
    """Median and extremes, ``-`` without samples."""
    middle = _number(line.get(name, ""), digits)
    if middle == "-":
        return middle
    return f"{middle} ({_number(line[f'{name}_min'], digits)}-{_number(line[f'{name}_max'], digits)})"


def _slowdown(line: Line) -> str:
    """A slowdown in percent with its extremes; these may be negative, so words stand between them."""
    middle = _number(line.get("gemm_slowdown_pct", ""), 1)
    if middle == "-":
        return middle
    low, high = (_number(line[f"gemm_slowdown_pct_{end}"], 1) for end in ("min", "max"))
    return f"{middle} % ({low} to {high})"


def _mib(line: Line) -> str:
    return f"{int(line['bytes']) / 2**20:.0f} MiB"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], first: Line, *notes: str) -> str:
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    where = f"{first['ranks']} ranks on {first['hardware']}; {first['versions']}; `{first['command']}`."
    return "\n".join([*table, "", *notes, where])


def unshard_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a size and way."""
    header = (
        "shards of a rank", "way", "engine", "call, ms: median (min-max)", "GB/s a rank",
        "time / direct's (min-max)", "host us (min-max)", "of it the pull", "call under a GEMM, ms", "GEMM slower by",
        "SM-ms a call",
    )  # fmt: skip
    rows = [
        (
            _mib(x), x["variant"], x["engine"] or "-", _time(x), _number(x["gb_per_s"], 0),
            _spread(x, "vs_direct", 2), _spread(x, "host_us", 0), _number(x["host_pull_us"], 0),
            _ms(x, "under_gemm_us"), _slowdown(x), _ms(x, "sm_us", 2),
        )
        for x in lines
    ]  # fmt: skip
    note = f"{lines[0]['parameters']} parameters of a Llama block, bf16; all but `direct` end with FSDP2's copy-out."
    return _markdown(header, rows, lines[0], note)


def _by_task(lines: Sequence[Line]) -> dict[tuple[str, str, str], dict[str, Line]]:
    """(bytes, dtype, op) -> variant -> line."""
    found: dict[tuple[str, str, str], dict[str, Line]] = {}
    for x in lines:
        found.setdefault((str(x["bytes"]), x["dtype"], x["op"]), {})[x["variant"]] = x
    return found


def _usual(ways: Mapping[str, Line]) -> Line:
    """The copy-engine way as the package takes it; the first one measured where that was not."""
    pulls = [x for name, x in ways.items() if name.startswith("copy engine")]
    return next((x for x in pulls if int(x["usual"])), pulls[0])


def reduce_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a size, dtype and op; copy engines with the package's piece size."""
    header = (
        "chunk of a rank", "dtype", "op", "plain, ms", "symmetric kernel, ms: median (min-max)",
        "copy engine, ms: median (min-max)", "copy engine / symmetric (min-max)", "under a GEMM, ms",
        "GEMM slower by", "SM-ms", "host us",
    )  # fmt: skip
    rows = []
    for (_, dtype, op), ways in _by_task(lines).items():
        plain, symmetric, pulls = ways["plain NCCL"], ways["symmetric kernel"], _usual(ways)
        three = (plain, symmetric, pulls)
        rows.append(
            (
                _mib(symmetric), dtype, op, _ms(plain, "median_us"), _time(symmetric), _time(pulls),
                _spread(pulls, "vs_symmetric", 2),
                ", ".join(_ms(x, "under_gemm_us") for x in three),
                ", ".join(_slowdown(x) for x in three),
                ", ".join(_ms(x, "sm_us", 2) for x in three),
                ", ".join(_number(x["host_us"], 0) for x in three),
            )
        )  # fmt: skip
    engines = dict.fromkeys(f"{x['variant']}: {x['engine']}" for x in lines if x["engine"])
    note = f"Three numbers are plain, symmetric, copy engine ({_usual(next(iter(_by_task(lines).values())))['variant']}"
    note += "). Seen in the profile: " + "; ".join(engines) + "." if engines else ")."
    return _markdown(header, rows, lines[0], note)


def pieces_table(lines: Sequence[Line]) -> str:
    """Markdown: the copy-engine way by piece size, for AVG, which FSDP2 issues."""
    tasks = {key: ways for key, ways in _by_task(lines).items() if key[2] == "AVG"}
    pieces = list(dict.fromkeys(name for ways in tasks.values() for name in ways if name.startswith("copy engine")))
    header = ("chunk of a rank", "dtype", *(f"{name.removeprefix('copy engine, ')}, ms" for name in pieces))
    rows = [
        (_mib(next(iter(ways.values()))), dtype, *(_time(ways[name]) for name in pieces))
        for (_, dtype, _), ways in tasks.items()
    ]
    return _markdown(header, rows, lines[0], "Results are equal bit by bit for all piece sizes, checked in the run.")


def step_table(lines: Sequence[Line]) -> str:
    """Markdown: training steps side by side; the tax is what a step takes beyond the floor's of the same round."""
    header = (
        "step", "variant", "step, ms: median (min-max)", "tax, ms: median (min-max)", "tax / native's",
        "all-gather: ms, kernels", "reduce-scatter: ms, kernels, local sums", "copy-outs: number, ms",
        "GEMMs beside it, ms: here / floor's", "SM-ms", "host us: all-gather, reduce-scatter", "peak + symmetric, MiB",
    )  # fmt: skip
    rows = []
    for x in lines:
        floor = x["variant"] == "floor"
        rows.append(
            (
                x["name"].removeprefix("fsdp_step_"), x["variant"], _time(x, 1),
                "-" if floor else f"{_ms(x, 'tax_us', 1)} ({_ms(x, 'tax_min_us', 1)} to {_ms(x, 'tax_max_us', 1)})",
                "-" if floor else _number(x["tax_vs_native"], 2),
                f"{_ms(x, 'all_gather_us', 2)}, {x['gather_kernels']}",
                f"{_ms(x, 'reduce_scatter_us', 2)}, {x['reduce_kernels']}, {x['local_sums']}",
                f"{x['copy_outs']}, {_ms(x, 'copy_out_us', 2)}",
                f"{_ms(x, 'gemm_overlapped_us', 2)} / {_ms(x, 'gemm_alone_us', 2)}",
                _ms(x, "sm_us", 1), f"{_number(x['host_all_gather_us'], 0)}, {_number(x['host_reduce_scatter_us'], 0)}",
                f"{int(x['peak_bytes']) / 2**20:.0f} + {int(x['symmetric_bytes']) / 2**20:.0f}",
            )
        )  # fmt: skip
    return _markdown(header, rows, lines[0], *_losses(lines))


def _losses(lines: Sequence[Line]) -> list[str]:
    """One sentence a model: the losses, and whose differ."""
    notes = []
    for name in dict.fromkeys(x["name"] for x in lines):
        of_all = {x["variant"]: x["losses"] for x in lines if x["name"] == name and x["variant"] != "floor"}
        others = [f"{variant} {losses}" for variant, losses in of_all.items() if losses != of_all["plain"]]
        verdict = "other losses: " + ", ".join(others) if others else "all variants the same in every digit"
        notes.append(f"Losses of {name.removeprefix('fsdp_step_')}: plain {of_all['plain']}; {verdict}.")
    return notes
