"""What a profile of training steps says about communication; every figure is of one step of rank 0."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Call
from fsdp_symm.trace.classify import Classified, classify
from fsdp_symm.trace.intervals import Union
from fsdp_symm.trace.load import load_trace
from fsdp_symm.trace.report import report_rank

_TOUCHED = 0.01  # of a matrix product's time: from here on communication runs beside it
_COPY_OUT = "split_with_sizes"
_Product = tuple[str, tuple[int, ...] | None, str]  # kernel, grid, input shapes


@dataclass(frozen=True)
class StepTrace:
    """A judged trace of several equal steps.

    Attributes:
        figures: columns of the variant's line.
        products: durations of every matrix product that communication touches, by kernel, grid and shapes.
        medians: median duration of every matrix product, touched or not, by the same.
        steps: how many steps the trace holds.
    """

    figures: dict[str, Any]
    products: dict[_Product, list[float]]
    medians: dict[_Product, float]
    steps: int

    def against(self, floor: StepTrace) -> dict[str, Any]:
        """Time of the products that communication touches, and what the floor's took for the same ones.

        The difference is what the step pays; it is small where communication touches a short part of a long product.
        Products that the floor does not have are left out.
        """
        known = [(us, floor.medians[key]) for key, some in self.products.items() if key in floor.medians for us in some]
        beside, alone = sum(us for us, _ in known), sum(us for _, us in known)
        return {
            "gemm_overlapped_us": round(beside / self.steps, 1),
            "gemm_alone_us": round(alone / self.steps, 1),
            "gemm_slowdown_pct": round((beside / alone - 1.0) * 100.0, 2) if alone else "",
            "gemms_beside": len(known),
        }


def judge_trace(path: Path, steps: int = 1) -> dict[str, Any]:
    """:func:`read_steps`, the figures alone."""
    return read_steps(path, steps).figures


def read_steps(path: Path, steps: int) -> StepTrace:
    """Judge a one-rank trace that holds ``steps`` equal steps.

    Raises:
        TraceError: the file cannot be used.
    """
    judged = classify(load_trace(path))
    report = report_rank(judged)
    gathers = [c for c in report.calls if c.kind == "all_gather"]
    reduces = [c for c in report.calls if c.kind == "reduce_scatter"]
    local_sums = [r for c in reduces for r in c.rows if names.is_sum_kernel(r.name)]
    copy_outs = [r for r in judged.compute_rows if _COPY_OUT in r.name]
    totals: dict[str, float] = {
        "all_gather_us": sum(c.duration_us for c in gathers),
        "reduce_scatter_us": sum(c.duration_us for c in reduces),
        "sm_us": report.sm_ms * 1e3,
        "exposed_us": report.exposed_ms * 1e3,
        "copy_out_us": sum(r.end_us - r.start_us for r in copy_outs),
        "local_sum_us": sum(r.end_us - r.start_us for r in local_sums),
        "gemm_us": sum(r.end_us - r.start_us for r in judged.compute_rows if names.is_gemm_kernel(r.name)),
    }
    counts = {
        "gathers": len(gathers),
        "copy_engine_gathers": _by(gathers, "copy_engine"),
        "gather_kernels": _kernels(gathers),
        "reduces": len(reduces),
        "symmetric_reduces": _by(reduces, "symmetric_kernel"),
        "copy_engine_reduces": _by(reduces, "copy_engine"),
        "reduce_kernels": _kernels(reduces),
        "local_sums": len(local_sums),
        "copy_outs": len(copy_outs),
    }
    figures = {name: round(value / steps, 1) for name, value in totals.items()}
    figures |= {name: _each(value, steps) for name, value in counts.items()} | {"profiled_steps": steps}
    return StepTrace(figures, *_products(judged, report.calls), steps)


def _each(count: int, steps: int) -> int | float:
    """A count of one step: a whole number, unless the steps differ."""
    return count // steps if count % steps == 0 else round(count / steps, 2)


def _by(calls: list[Call], engine: str) -> int:
    return sum(c.engine == engine for c in calls)


def _kernels(calls: list[Call]) -> int:
    return sum(row.what == "kernel" and not names.is_sum_kernel(row.name) for c in calls for row in c.rows)


def _products(judged: Classified, calls: tuple[Call, ...]) -> tuple[dict[_Product, list[float]], dict[_Product, float]]:
    """Durations of the products that communication touches, and the median of all."""
    busy = Union.of((c.start_us, c.end_us) for c in calls)
    touched: dict[_Product, list[float]] = defaultdict(list)
    every: dict[_Product, list[float]] = defaultdict(list)
    for index, shapes in judged.gemm_shapes.items():
        row = judged.compute_rows[index]
        key, length = (row.name, row.grid, shapes), row.end_us - row.start_us
        every[key].append(length)
        if busy.overlap_us((row.start_us, row.end_us)) > _TOUCHED * length:
            touched[key].append(length)
    return dict(touched), {key: statistics.median(some) for key, some in every.items()}
