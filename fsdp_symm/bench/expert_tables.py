"""README tables of the experts benchmark, made from CSV lines alone: what is faster, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_symm.bench.way_tables import Line, markdown, ms, number, slowdown, spread, time

BASE = "copy_engine"
STATIC = "copy_engine, static"
_OURS_TOO = (STATIC, "copy_engine, graph")  # the same transport; not what it loses to
_Ways = dict[str, Line]


def _by_task(lines: Sequence[Line]) -> dict[tuple[str, str, str], _Ways]:
    """(layer, routing, task) -> variant -> line."""
    found: dict[tuple[str, str, str], _Ways] = {}
    for x in lines:
        key = _layer(x), x["routing"], x["name"].removeprefix("experts_").replace("_", " + ")
        found.setdefault(key, {})[x["variant"]] = x
    return found


def _layer(line: Line) -> str:
    return f"{line['experts']} experts, top {line['topk']}, {line['tokens']} x {line['hidden']}"


def _best_other(ways: Mapping[str, Line]) -> Line:
    """The fastest that is not padded copy engines; those that are faster in every round before all others."""
    others = [x for name, x in ways.items() if name not in (BASE, *_OURS_TOO)]
    return min(others, key=lambda x: (float(x["vs_copy_engine_max"]) >= 1, float(x["vs_copy_engine"])))


def loses(other: Line) -> str:
    """``"yes"`` where copy_engine is slower than the other in every round, ``"no"`` where it is as fast or faster in
    the median round, else ``"unclear"``."""
    if float(other["vs_copy_engine"]) >= 1:
        return "no"
    return "yes" if float(other["vs_copy_engine_max"]) < 1 else "unclear"


def _verdict(ways: Mapping[str, Line]) -> str:
    """copy_engine against the best other, as how many times its time."""
    other = _best_other(ways)
    middle, low, high = (1 / float(other[f"vs_copy_engine{end}"]) for end in ("", "_max", "_min"))
    times = f"{middle:.2f} ({low:.2f}-{high:.2f}) of {other['variant']}"
    words = {"yes": f"**loses**: {times}", "unclear": f"loses within the spread: {times}", "no": times}
    return words[loses(other)]


def experts_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a layer, routing and task; it ends with a list of where copy_engine loses."""
    tasks = _by_task(lines)
    variants = list(dict.fromkeys(x["variant"] for x in lines if x["variant"] != BASE))
    header = ("layer", "routing", "task", "copy_engine, ms: median (min-max)")
    header += tuple(f"{name} / copy_engine (min-max)" for name in variants)
    header += ("copy_engine takes, of the best other's time",)
    rows = []
    for (layer, routing, task), ways in tasks.items():
        ratios = [spread(ways[name], "vs_copy_engine", 2) if name in ways else "-" for name in variants]
        rows.append((layer, routing, task, time(ways[BASE]), *ratios, _verdict(ways)))
    return markdown(header, rows, lines[0], *_losses(tasks), *_auto(tasks))


def _losses(tasks: Mapping[tuple[str, str, str], _Ways]) -> list[str]:
    """Where copy_engine loses, in sentences."""
    lost: dict[str, list[str]] = {"yes": [], "unclear": [], "no": []}
    for key, ways in tasks.items():
        lost[loses(_best_other(ways))].append(f"{', '.join(key)} (to {_best_other(ways)['variant']})")
    plain = "; ".join(lost["yes"]) or "nowhere"
    notes = [f"`copy_engine` loses in {len(lost['yes'])} of {len(tasks)} lines, slower in every round: {plain}."]
    if lost["unclear"]:
        notes.append(f"It is slower in the median round but not in every one in {len(lost['unclear'])} more.")
    return notes


def _auto(tasks: Mapping[tuple[str, str, str], _Ways]) -> list[str]:
    """Where the rule of "auto" takes the slower one of its two for a whole step."""
    choices = ("copy_engine", "all_to_all")
    wrong, seen = [], 0
    for (layer, routing, task), ways in tasks.items():
        if task != "forward + backward" or not all(name in ways for name in choices):
            continue
        seen += 1
        rounds = ways["all_to_all"]
        picked = next((name for name in choices if int(ways[name]["auto"])), choices[0])
        slower = float(rounds["vs_copy_engine"]) < 1 if picked == BASE else float(rounds["vs_copy_engine"]) > 1
        if slower:
            wrong.append(
                f"{layer}, {routing} (takes {picked}; all_to_all / copy_engine {spread(rounds, 'vs_copy_engine', 2)})"
            )
    if not seen:
        return []
    where = "; ".join(wrong) or "nowhere"
    return [
        f'`"auto"` takes the slower of copy_engine and all_to_all for forward + backward: {where}.',
        *_static(tasks),
    ]


def _static(tasks: Mapping[tuple[str, str, str], _Ways]) -> list[str]:
    """What reading nothing on the host costs, where "auto" has no choice."""
    costs = []
    for (layer, routing, task), ways in tasks.items():
        if task == "forward + backward" and STATIC in ways and "all_to_all" in ways:
            static, other = (float(ways[name]["vs_copy_engine"]) for name in (STATIC, "all_to_all"))
            costs.append(f"{static / other:.2f} ({layer}, {routing})")
    if not costs:
        return []
    return [
        'With `overflow="drop"` and a capacity `"auto"` takes the static way, the only one that reads nothing on the '
        f"host; forward + backward then take, in this table, of all_to_all's time: {'; '.join(costs)}."
    ]


def experts_costs_table(lines: Sequence[Line]) -> str:
    """Markdown: what forward and backward cost beside time, one line a layer, routing and implementation."""
    header = (
        "layer", "routing", "implementation", "forward + backward, ms (min-max)", "under a GEMM, ms", "GEMM slower by",
        "engine", "SM-ms", "host: reads, waits", "host us", "MiB from peers", "peak + symmetric, MiB",
    )  # fmt: skip
    chosen = [x for x in lines if x["name"] == "experts_forward_backward"]
    rows = [
        (
            _layer(x), x["routing"], x["variant"], time(x), ms(x, "under_gemm_us"), slowdown(x),
            x["engine"] or "-", ms(x, "sm_us", 2),
            f"{number(x['host_reads'], 0)}, {number(x['host_waits'], 0)}", number(x["host_us"], 0),
            _mib(x, "moved_bytes"), f"{_mib(x, 'peak_bytes')} + {_mib(x, 'symmetric_bytes')}",
        )
        for x in chosen
    ]  # fmt: skip
    note = (
        "Host reads are copies from the device, waits are calls that end when a stream has; both from a profile of "
        "three calls. A local copy counts as copy engine too. MiB from peers are counted from the routing, on the rank "
        "with the most; peak is ordinary memory of a call."
    )
    return markdown(header, rows, lines[0], note)


def _mib(line: Line, name: str) -> str:
    value = line[name]
    return "-" if value in ("", None) else f"{int(value) / 2**20:.1f}"
