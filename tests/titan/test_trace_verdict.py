"""Which traces a run may judge, what it logs of them, and what it says when it cannot."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import MappingProxyType

import pytest
import torch.distributed as dist

from fsdp_symm.titan.trace_verdict import RankTraces, describe_files, inspect, scalars, share
from fsdp_symm.trace import TraceSummary
from tests.harness import Ranks


def write_trace(path: Path) -> str:
    row = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 10.0, "dur": 5.0, "args": {}}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [row]}))
    return str(path)


class Lines(logging.Handler):
    """The warnings of one logger, in a worker process without pytest's fixtures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _share(missing: int | None, timeout_s: float) -> tuple[list[RankTraces] | None, list[str]]:
    world, lines = dist.group.WORLD, Lines()
    assert world is not None
    if world.rank() == missing:
        return None, []
    logging.getLogger("fsdp_symm.titan.trace_verdict").addHandler(lines)
    mine = [Path(f"rank{world.rank()}_step3.json.gz")] if world.rank() else []
    return share(world, mine, timeout_s), lines.texts


def test_every_rank_learns_what_every_rank_wrote(ranks2: Ranks) -> None:
    for traces, lines in ranks2.run(_share, None, 30.0):
        assert lines == []
        assert [rank.paths for rank in traces] == [(), ("rank1_step3.json.gz",)]
        assert len({rank.host for rank in traces}) == 1


def test_a_rank_that_does_not_come_is_named_in_one_line_and_in_time(ranks2: Ranks) -> None:
    (traces, lines), _ = ranks2.run(_share, 1, 0.5)
    assert traces is None
    assert lines == [
        "no trace verdict: trace: ranks [1] of group [0, 1] did not arrive within 0.5 s; found: ranks [0];"
        " expected: ranks [0, 1]; fix: raise comm.train_timeout_seconds, or see their logs"
    ]


def test_only_this_runs_files_of_the_first_ranks_host_are_read(tmp_path: Path) -> None:
    mine = write_trace(tmp_path / "rank0_step3.json")
    (tmp_path / "rank9_step3.json").write_text("left by an earlier run")
    summary = inspect([RankTraces("a", (mine,)), RankTraces("b", ("not visible here",))])
    assert summary is not None
    assert summary.verdict == "No communication found in 1 trace."


@pytest.mark.parametrize("content", [None, "", "no trace at all"])
def test_a_trace_that_cannot_be_used_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "rank0_step3.json"
    if content is not None:
        path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert inspect([RankTraces("a", (str(path),))]) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("no trace verdict: ")
    assert "\n" not in record.getMessage()
    assert str(path) in record.getMessage()


def test_nothing_written_is_nothing_to_judge(caplog: pytest.LogCaptureFixture) -> None:
    assert inspect([RankTraces("a", ()), RankTraces("b", ("x",))]) is None
    assert not caplog.records


def test_scalars() -> None:
    shares = MappingProxyType({"all_gather": MappingProxyType({"copy_engine": 0.75, "plain_kernel": 0.25})})
    assert scalars(TraceSummary(1.5, 3.0, 0.25, shares, 1, "text", True, ())) == {
        "fsdp_symm/trace/exposed_ms": 1.5,
        "fsdp_symm/trace/comm_ms": 3.0,
        "fsdp_symm/trace/sm_ms": 0.25,
        "fsdp_symm/trace/engine_share/all_gather/copy_engine": 0.75,
        "fsdp_symm/trace/engine_share/all_gather/plain_kernel": 0.25,
    }


@pytest.mark.parametrize(
    ("counts", "last_step", "text"),
    [
        ((1, 1), 20, "traces: r0n0, r1n0"),
        ((0, 1), 20, "traces: r1n0"),
        ((1, 1, 1, 1, 1), 20, "traces: r0n0 .. r4n0 (5 files)"),
        ((0, 0), 9, "no trace: the run ended before step 10"),
        ((0, 0), 20, "no trace: the run started after step 10"),
    ],
)
def test_the_summary_names_the_files_or_says_why_there_are_none(
    counts: tuple[int, ...], last_step: int, text: str
) -> None:
    traces = [RankTraces("a", tuple(f"r{r}n{n}" for n in range(count))) for r, count in enumerate(counts)]
    assert describe_files(traces, start_step=10, last_step=last_step) == text
