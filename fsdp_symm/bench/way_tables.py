"""README tables of ways side by side: unsharding, reduce-scatter, training steps. Made from CSV lines alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def number(text: Any, digits: int) -> str:
    """A number of the CSV, ``-`` where nothing was measured."""
    return "-" if text in ("", None) else f"{float(text):.{digits}f}"


def ms(line: Line, name: str, digits: int = 3) -> str:
    """A column of microseconds as milliseconds."""
    value = line.get(name, "")
    return number("" if value in ("", None) else float(value) / 1e3, digits)


def time(line: Line, digits: int = 3) -> str:
    """Median and extremes of a line's own time, in milliseconds."""
    return f"{ms(line, 'median_us', digits)} ({ms(line, 'min_us', digits)}-{ms(line, 'max_us', digits)})"


def spread(line: Line, name: str, digits: int) -> str:
    """Median and extremes, ``-`` without samples."""
    middle = number(line.get(name, ""), digits)
    if middle == "-":
        return middle
    return f"{middle} ({number(line[f'{name}_min'], digits)}-{number(line[f'{name}_max'], digits)})"


def _spread_ms(line: Line, name: str) -> str:
    """Median and extremes of a column of microseconds, as milliseconds; ``-`` without samples."""
    if line.get(name, "") in ("", None):
        return "-"
    return f"{ms(line, name)} ({ms(line, f'{name}_min')}-{ms(line, f'{name}_max')})"


def slowdown(line: Line, name: str = "gemm_slowdown_pct") -> str:
    """A slowdown in percent with its extremes; these may be negative, so words stand between them."""
    middle = number(line.get(name, ""), 1)
    if middle == "-":
        return middle
    low, high = (number(line[f"{name}_{end}"], 1) for end in ("min", "max"))
    return f"{middle} % ({low} to {high})"


def _mib(line: Line) -> str:
    return f"{int(line['bytes']) / 2**20:.0f} MiB"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], first: Line, *notes: str) -> str:
    """A table, its notes, and where its lines come from."""
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    where = f"{first['ranks']} ranks on {first['hardware']}; {first['versions']}; `{first['command']}`."
    return "\n".join([*table, "", *notes, where])


def unshard_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a size and way."""
    header = (
        "shards of a rank", "way", "engine", "whole unshard, ms: median (min-max)", "whole / direct's (min-max)",
        "placing, ms (min-max)", "placing / direct's (min-max)", "placing under a GEMM, ms", "GEMM slower by",
        "exchange alone, ms (min-max)", "exchange / direct's (min-max)", "GB/s a rank in it",
        "host us: whole, placing", "SM-ms a whole",
    )  # fmt: skip
    rows = [
        (
            _mib(x), x["variant"], x["engine"] or "-", time(x), spread(x, "vs_direct", 2),
            _spread_ms(x, "place_us"), spread(x, "place_vs_direct", 2), ms(x, "place_under_gemm_us"),
            slowdown(x, "place_gemm_slowdown_pct"),
            _spread_ms(x, "exchange_us"), spread(x, "exchange_vs_direct", 2), number(x["gb_per_s"], 0),
            f"{number(x['host_us'], 0)}, {number(x.get('place_host_us', ''), 0)}", ms(x, "sm_us", 2),
        )
        for x in lines
    ]  # fmt: skip
    note = (
        f"{lines[0]['parameters']} parameters of a Llama block: fp32 shards, bf16 parameters. A whole unshard is the "
        "copy-in with its cast (direct: into the slot and this rank's own places in the parameters; all others: into "
        "this rank's chunk of the gathered buffer), the exchange, and FSDP2's copy-out in all but `direct`. The "
        "exchange alone is the pull or the all-gather, without either copy. Placing leads from shards that are copied "
        "in to complete parameters: the all-gather and the copy-out, for `direct` the exchange itself, since its "
        "copy-in has placed this rank's own shards. Engine and SM columns: the whole; GEMM columns: the placing."
    )
    return markdown(header, rows, lines[0], note)


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


def _rate(line: Line) -> str:
    """GB/s that a rank takes from the others; CSVs from before types could differ know one size of a chunk."""
    received = int(line.get("wire_bytes") or line["bytes"]) * (int(line["ranks"]) - 1)
    return number(received / float(line["median_us"]) / 1e3, 0)


def reduce_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a size, kind and op; copy engines with the pieces of the package's rule."""
    header = (
        "chunk of a rank", "dtype", "op", "plain, ms", "symmetric kernel, ms: median (min-max)",
        "copy engine, ms: median (min-max)", "copy engine / symmetric (min-max)", "GB/s a rank", "under a GEMM, ms",
        "GEMM slower by", "SM-ms", "host us",
    )  # fmt: skip
    rows = []
    for (_, dtype, op), ways in _by_task(lines).items():
        plain, symmetric, pulls = ways["plain NCCL"], ways["symmetric kernel"], _usual(ways)
        three = (plain, symmetric, pulls)
        rows.append(
            (
                _mib(symmetric), dtype, op, ms(plain, "median_us"), time(symmetric), time(pulls),
                spread(pulls, "vs_symmetric", 2),
                ", ".join(_rate(x) for x in three),
                ", ".join(ms(x, "under_gemm_us") for x in three),
                ", ".join(slowdown(x) for x in three),
                ", ".join(ms(x, "sm_us", 2) for x in three),
                ", ".join(number(x["host_us"], 0) for x in three),
            )
        )  # fmt: skip
    return markdown(header, rows, lines[0], _reduce_note(lines))


def _reduce_note(lines: Sequence[Line]) -> str:
    usual = _usual(next(iter(_by_task(lines).values())))["variant"]
    pieces = "pieces as the package cuts them" if usual == "copy engine" else usual.removeprefix("copy engine, ")
    note = f"Three numbers are plain, symmetric, copy engine ({pieces}). GB/s: the chunks that a rank takes from the "
    note += "others, ranks - 1 of them, in the type in which they travel, over the whole time, sums included."
    if any(" in " in x["dtype"] for x in lines):
        note += (
            " `bfloat16 in float32` are bf16 gradients that are summed in fp32; a chunk's size is that of the sum. "
            "NCCL's ways get and send fp32, as FSDP2 gives it to them, without the time of that cast; the copy "
            "engine's gets and sends bf16."
        )
    engines = dict.fromkeys(f"{x['variant']}: {x['engine']}" for x in lines if x["engine"])
    return note + (" Seen in the profile: " + "; ".join(engines) + "." if engines else "")


def pieces_table(lines: Sequence[Line]) -> str:
    """Markdown: the copy-engine way by piece size, for AVG, which FSDP2 issues; one sentence without such ways."""
    tasks = {key: ways for key, ways in _by_task(lines).items() if key[2] == "AVG"}
    pieces = list(dict.fromkeys(name for ways in tasks.values() for name in ways if name.startswith("copy engine")))
    if pieces == ["copy engine"]:
        return "Copy engines with pieces of other sizes: not measured."
    names = [name.removeprefix("copy engine, ").replace("copy engine", "the package's rule") for name in pieces]
    header = ("chunk of a rank", "dtype", *(f"{name}, ms" for name in names))
    rows = [
        (_mib(next(iter(ways.values()))), dtype, *(time(ways[name]) for name in pieces))
        for (_, dtype, _), ways in tasks.items()
    ]
    return markdown(header, rows, lines[0], "Results are equal bit by bit for all piece sizes, checked in the run.")


def step_table(lines: Sequence[Line]) -> str:
    """Markdown: training steps side by side; the tax is what a step takes beyond the floor's of the same round."""
    header = (
        "step", "variant", "step, ms: median (min-max)", "tax, ms: median (min-max)", "tax / native's",
        "all-gather: ms, kernels", "reduce-scatter: ms, kernels, local sums", "copy-outs: number, ms",
        "GEMMs beside it, ms: here / floor's", "SM-ms", "host us: unshard, wait for it, reduce",
        "peak + symmetric, MiB", "reserved + symmetric, MiB",
    )  # fmt: skip
    rows = []
    for x in lines:
        floor = x["variant"] == "floor"
        rows.append(
            (
                _step_name(x, lines), x["variant"], time(x, 1),
                "-" if floor else f"{ms(x, 'tax_us', 1)} ({ms(x, 'tax_min_us', 1)} to {ms(x, 'tax_max_us', 1)})",
                "-" if floor else number(x["tax_vs_native"], 2),
                f"{ms(x, 'all_gather_us', 2)}, {x['gather_kernels']}",
                f"{ms(x, 'reduce_scatter_us', 2)}, {x['reduce_kernels']}, {x['local_sums']}",
                f"{x['copy_outs']}, {ms(x, 'copy_out_us', 2)}",
                f"{ms(x, 'gemm_overlapped_us', 2)} / {ms(x, 'gemm_alone_us', 2)}",
                ms(x, "sm_us", 1),
                ", ".join(number(x[f"host_{part}_us"], 0) for part in ("unshard", "wait", "reduce")),
                _and_symmetric(x, "peak_bytes"), _and_symmetric(x, "reserved_bytes"),
            )
        )  # fmt: skip
    note = "Host us: FSDP2's whole `unshard()`, `wait_for_unshard()` and `foreach_reduce()`, timed from outside. "
    note += "Peak: allocated from torch at once; reserved: taken from the GPU by torch, with what a pool keeps for its "
    note += "own use (`native` holds its symmetric memory in one)."
    if any("group" in _step_name(x, lines) for x in lines):
        note += " The steps of one group alternate; taxes and ratios never compare two groups."
    return markdown(header, rows, lines[0], note, *_losses(lines))


def _and_symmetric(line: Line, column: str) -> str:
    """Bytes of torch's allocator and of the arenas, which it does not count, in MiB; ``-`` where not measured."""
    if line.get(column, "") in ("", None):
        return "-"
    return f"{int(line[column]) / 2**20:.0f} + {int(line['symmetric_bytes']) / 2**20:.0f}"


def _step_name(line: Line, lines: Sequence[Line]) -> str:
    """The model, and the group where there are several."""
    name = line["name"].removeprefix("fsdp_step_")
    several = len({str(x["group"]) for x in lines if x["name"] == line["name"]}) > 1
    return f"{name}, group {line['group']}" if several else name


def _losses(lines: Sequence[Line]) -> list[str]:
    """One sentence a model: the losses, what was demanded of them, and whose differ."""
    notes = []
    for name in dict.fromkeys(x["name"] for x in lines):
        mine = [x for x in lines if x["name"] == name and x["variant"] != "floor"]
        plain = next(x["losses"] for x in mine if x["variant"] == "plain")
        others = dict.fromkeys(f"{x['variant']} {x['losses']}" for x in mine if x["losses"] != plain)
        verdict = "other losses: " + ", ".join(others) if others else "all variants the same in every digit"
        rule = f"Ours were held to {mine[0]['losses_within']}."
        notes.append(f"Losses of {name.removeprefix('fsdp_step_')}: plain {plain}; {verdict}. {rule}")
    return notes
