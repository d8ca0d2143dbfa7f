"""Training runs side by side, from CSV lines alone: the README's table, and whether the losses agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fsdp_symm.bench.way_tables import Line, number, time

# Forward passes of the same weights: bf16 rounds a mixture's sums in another order, nothing else may differ.
FIRST_TOLERANCE = 1e-3
# Later ones: gradients are summed in another order, attention's backward in a random one, and steps multiply that.
TOLERANCE = 2e-2


def _models(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """(name, ranks) -> lines, in their order."""
    found: dict[tuple[str, str], list[Line]] = {}
    for x in lines:
        found.setdefault((str(x["name"]), str(x["ranks"])), []).append(x)
    return found


def reference(lines: Sequence[Line]) -> Line:
    """What the others of a model are compared with: plain FSDP2, or the first line where that was not run."""
    return next((x for x in lines if str(x["variant"]).split("+")[0] == "plain"), lines[0])


def losses(line: Line) -> list[float]:
    """The losses of a line, from step 1."""
    return [float(text) for text in str(line["losses"]).split("; ")]


def difference(line: Line, other: Line) -> tuple[float, float]:
    """The relative difference of the first losses, and the largest one of the others; not finite is infinite."""
    apart = [
        abs(mine - theirs) / abs(theirs) if math.isfinite(mine) and math.isfinite(theirs) else math.inf
        for mine, theirs in zip(losses(line), losses(other), strict=True)
    ]
    return apart[0], max(apart[1:], default=0.0)


def wrong_losses(lines: Sequence[Line], variants: Sequence[str] | None = None) -> list[str]:
    """One sentence for each line whose losses are not its reference's, or cannot be compared with them.

    Args:
        lines: of any models.
        variants: only lines of these, ``None`` for all.
    """
    wrong = []
    for (name, ranks), mine in _models(lines).items():
        base = reference(mine)
        for x in (x for x in mine if x is not base and (variants is None or x["variant"] in variants)):
            what = f"{name}, {ranks} ranks: {x['variant']} against {base['variant']}"
            if (reason := _not_comparable(x, base)) is not None:
                wrong.append(f"{what}: {reason}")
                continue
            first, later = difference(x, base)
            if not (first <= FIRST_TOLERANCE and later <= TOLERANCE):
                wrong.append(
                    f"{what}: losses differ by {first:.2g} in the first step and {later:.2g} later, expected at most "
                    f"{FIRST_TOLERANCE:g} and {TOLERANCE:g}"
                )
    return wrong


def _not_comparable(line: Line, base: Line) -> str | None:
    for column in ("parameters", "overrides", "dtype"):
        if (mine := str(line[column])) != (theirs := str(base[column])):
            return f"{column}: found {mine!r} and {theirs!r}, expected the same, fix: run both again"
    if (here := len(losses(line))) != (there := len(losses(base))):
        return f"steps: found {here} and {there}, expected the same, fix: run both again"
    return None


def train_table(lines: Sequence[Line]) -> str:
    """Markdown: one line a model and variant; it ends with what the losses say and where the lines come from."""
    header = (
        "model", "parameters", "variant", "step, ms: median (min-max)", "step / plain's", "tokens/s a rank",
        "peak + symmetric, GiB", "communication, ms: exposed, all", "SM-ms", "engines", "loss: first, last",
    )  # fmt: skip
    rows = []
    for mine in _models(lines).values():
        base = reference(mine)
        for x in mine:
            steps = losses(x)
            rows.append(
                (
                    str(x["name"]).removeprefix("train_"), _count(int(x["parameters"])), x["variant"],
                    time(x, 1), number(float(x["median_us"]) / float(base["median_us"]), 3),
                    number(x["tokens_per_s"], 0), memory(x),
                    f"{number(x['exposed_ms'], 1)}, {number(x['comm_ms'], 1)}", number(x["sm_ms"], 1),
                    x["engines"] or "-", f"{steps[0]:.5f}, {steps[-1]:.5f}",
                )
            )  # fmt: skip
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    timed = " or ".join(dict.fromkeys(str(x["n"]) for x in lines))
    note = (
        f"Whole runs of train.py, one after another, each in fresh processes; rank 0's figures. {timed} steps are "
        "timed; communication, SM-ms and engines (share of a collective's bytes) are the traced step's."
    )
    return "\n".join([*table, "", note, *_loss_notes(lines), *_sources(lines)])


def _count(parameters: int) -> str:
    """Parameters as 8.03e9 or 6.16e6."""
    unit = 9 if parameters >= 10**9 else 6
    return f"{parameters / 10**unit:.2f}e{unit}"


def memory(line: Line) -> str:
    """The allocator's peak and the symmetric bytes, in GiB."""
    symmetric = int(line["symmetric_bytes"]) / 2**30
    digits = 3 if 0.0 < symmetric < 0.01 else 2  # a small model's slots are not nothing
    return f"{int(line['peak_bytes']) / 2**30:.2f} + {symmetric:.{digits}f}"


def _loss_notes(lines: Sequence[Line]) -> list[str]:
    wrong = wrong_losses(lines)
    notes = []
    for (name, _), mine in _models(lines).items():
        base = reference(mine)
        others = [x for x in mine if x is not base and _not_comparable(x, base) is None]
        if not others:
            continue
        said = "; ".join(f"{x['variant']} {_apart(x, base)}" for x in others)
        notes.append(f"Losses of {name.removeprefix('train_')} against {base['variant']}, relative: {said}.")
    return notes + [f"**Wrong**: {text}." for text in wrong]


def _apart(line: Line, base: Line) -> str:
    if losses(line) == losses(base):
        return "the same in every digit"
    return f"within {_ceil(max(difference(line, base)))}"


def _ceil(value: float) -> str:
    """One significant digit, rounded up: 1.42e-5 becomes 2e-05."""
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    digit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / digit) * digit:.1g}"


def _sources(lines: Sequence[Line]) -> list[str]:
    """Where the lines come from: each machine once, with its commands."""
    machines: dict[tuple[str, str, str], dict[str, None]] = {}
    for x in lines:
        key = str(x["ranks"]), str(x["hardware"]), str(x["versions"])
        machines.setdefault(key, {})[f"`{x['command']}`"] = None
    return [
        f"{ranks} ranks on {hardware}; {versions}; {', '.join(commands)}."
        for (ranks, hardware, versions), commands in machines.items()
    ]


def merge(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a CSV with one more; it takes the place of an older one of the same name, ranks and variant."""

    def key(line: Line) -> tuple[str, ...]:
        return tuple(str(line[column]) for column in ("name", "ranks", "variant"))

    if key(new) not in [key(line) for line in old]:
        return [*old, new]
    return [new if key(line) == key(new) else line for line in old]
