"""The window of steps that a trace holds, in one process without ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.titan.sections import TraceSection
from fsdp_symm.titan.tracing import StepTracer


def run(folder: Path, section: TraceSection, *, first: int = 1, last: int = 5, rank: int = 0) -> StepTracer:
    tracer = StepTracer(section, str(folder), rank)
    for step in range(first, last + 1):
        tracer.begin_step(step)
        torch.ones(3).add_(step)
    tracer.close()
    tracer.close()
    return tracer


def load_steps(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return sorted(e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep#"))


@pytest.mark.parametrize(
    ("start", "steps", "first", "names"),
    [
        (1, 1, 1, ["ProfilerStep#1"]),
        (3, 1, 1, ["ProfilerStep#3"]),
        (2, 3, 1, ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]),
        (5, 1, 1, ["ProfilerStep#5"]),
        (4, 5, 1, ["ProfilerStep#4", "ProfilerStep#5"]),  # training ends inside the window
        (4, 1, 4, ["ProfilerStep#4"]),  # resumed right before the window
        (4, 1, 3, ["ProfilerStep#4"]),
    ],
)
def test_one_file_with_the_steps_of_the_window(tmp_path: Path, start: int, steps: int, first: int, names: list[str]):
    tracer = run(tmp_path, TraceSection(enable=True, start_step=start, steps=steps), first=first)
    path = tmp_path / "traces" / f"rank0_step{start}.json.gz"
    assert tracer.written == [path]
    assert load_steps(path) == names


@pytest.mark.parametrize(
    ("section", "first", "rank"),
    [
        (TraceSection(enable=False), 1, 0),
        (TraceSection(enable=True, start_step=2, ranks=(1,)), 1, 0),
        (TraceSection(enable=True, start_step=9), 1, 0),  # never reached
        (TraceSection(enable=True, start_step=2), 4, 0),  # resumed behind the window
    ],
)
def test_no_file_where_nothing_is_asked_for(tmp_path: Path, section: TraceSection, first: int, rank: int) -> None:
    assert run(tmp_path, section, first=first, rank=rank).written == []
    assert not list(tmp_path.iterdir())


def test_chosen_ranks_and_an_absolute_folder(tmp_path: Path) -> None:
    section = TraceSection(enable=True, start_step=2, ranks=(0, 3), dir=str(tmp_path / "elsewhere"))
    assert run(Path("unused"), section, rank=3).written == [tmp_path / "elsewhere" / "rank3_step2.json.gz"]
