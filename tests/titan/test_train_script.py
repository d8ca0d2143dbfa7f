"""``train.py`` as a user starts it: real ``torchrun`` processes, what they print, write and return."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPO = Path(__file__).parents[2]
STEPS = 6
EXCHANGES = ("dispatch", "combine")  # of experts
OLD_TRACE = "traces/rank0_step10.json.gz"
# Small steps; bfloat16 as shipped.
FAST = (
    *("--training.steps", str(STEPS), "--training.seq_len", "64", "--training.local_batch_size", "1"),
    *("--trace.start_step", "4"),
)
LOSS_LINE = re.compile(r"step: *(\d+) +loss: +(\S+) +grad_norm: +(\S+)")


@dataclass(frozen=True)
class Run:
    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def losses(self) -> list[tuple[str, ...]]:
        """(step, loss, grad_norm) as printed."""
        return [found.groups() for found in LOSS_LINE.finditer(self.stdout)]


def start(*words: str, folder: Path, ranks: int = 2, timeout_s: float = 400) -> Run:
    """Run train.py under torchrun (``ranks=0``: plain python)."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOG_RANK")}
    process = subprocess.Popen(
        [sys.executable, *torchrun, "train.py", *words],
        cwd=REPO,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks then, which a kill would leave behind, beside all later tests
        process.communicate(timeout=60)
        raise
    return Run(process.returncode, out, errors, folder)


class Runs:
    """Each (model, switch) is trained once and looked at by several tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[tuple[str, bool], Run] = {}

    def get(self, model: str, switch: bool) -> Run:
        key = (model, switch)
        if key not in self._done:
            folder = self._folder / f"{model}_{switch}"
            words = ["--config", f"configs/debug_{model}_cpu.toml", "--dump_folder", str(folder), *FAST]
            self._done[key] = start(*words, "--fsdp_symm.enable", str(switch).lower(), folder=folder)
        return self._done[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps that end before the window, in a folder with an old trace, with part of the model switched."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "traces").mkdir()
    (folder / OLD_TRACE).write_bytes(b"left by an earlier run")
    words = ("--training.steps", "2", "--trace.start_step", "10")
    part = ("--fsdp_symm.modules", "layers.*", "--fsdp_symm.dedicated_all_gather")
    config = ("--config", "configs/debug_dense_cpu.toml", "--dump_folder", str(folder))
    return start(*config, *FAST, *words, *part, folder=folder)


def scalar_series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    (events,) = (folder / "tb").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def trace(folder: Path, rank: int) -> dict[str, Any]:
    with gzip.open(folder / "traces" / f"rank{rank}_step4.json.gz", "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_it_trains_and_leaves_losses_events_and_a_trace_a_rank(runs: Runs, model: str, switch: bool) -> None:
    run = runs.get(model, switch)
    assert run.status == 0, run.stderr[-3000:]
    assert [int(step) for step, *_ in run.losses] == list(range(1, STEPS + 1))
    assert float(run.losses[-1][1]) < float(run.losses[0][1]) - 1

    series = scalar_series(run.folder)
    assert [step for step, _ in series["loss_metrics/global_avg_loss"]] == list(range(1, STEPS + 1))
    assert ("fsdp_symm/arena_bytes" in series) is (switch or model == "moe"), "experts hold symmetric memory as well"

    for rank in (0, 1):
        content = trace(run.folder, rank)
        assert content["distributedInfo"]["rank"] == rank
        assert "ProfilerStep#4" in {event.get("name") for event in content["traceEvents"]}
    summary, verdict = run.stdout.strip().splitlines()[-2:]
    first, last = run.losses[0][1], run.losses[-1][1]
    assert summary.startswith(f"trained {STEPS} steps: loss {first} (step 1) -> {last} (step {STEPS}); ")
    files = ", ".join(f"{run.folder}/traces/rank{rank}_step4.json.gz" for rank in (0, 1))
    assert summary.endswith(f"TensorBoard events: {run.folder}/tb; traces: {files}")
    assert verdict.startswith("verdict: ")
    assert "all-gathers were moved by the host (shared memory)" in verdict or not switch
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_nothing_asks_for_attention_in_a_run_as_shipped(runs: Runs, model: str) -> None:
    run = runs.get(model, True)
    # torch 2.14 and newer log a hint about torchtitan's own placements
    assert [line for line in run.stderr.splitlines() if "_redistribute.py" not in line] == []
    assert "WARNING" not in run.stdout
    assert "MFU" not in run.stdout
    assert "mfu" not in run.stdout


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_verdict_of_the_traced_step_is_in_tensorboard(runs: Runs, model: str, switch: bool) -> None:
    series = scalar_series(runs.get(model, switch).folder)
    traced = {tag: values for tag, values in series.items() if tag.startswith("fsdp_symm/trace/")}
    assert all([step for step, _ in values] == [4] for values in traced.values())
    value = {tag.removeprefix("fsdp_symm/trace/"): values[0][1] for tag, values in traced.items()}
    assert 0 < value["exposed_ms"] <= value["comm_ms"]
    assert value["sm_ms"] == 0
    kinds = {"all_gather", "reduce_scatter", "all_reduce", *(EXCHANGES if model == "moe" else ())}
    shares = {tag for tag in value if tag.startswith("engine_share/")}
    assert shares == {f"engine_share/{kind}/host" for kind in kinds}
    assert all(value[tag] == 1 for tag in shares)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_losses_are_the_same_to_every_digit_with_the_switch_on_and_off(runs: Runs, model: str) -> None:
    assert runs.get(model, True).losses == runs.get(model, False).losses


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_switch_reports_what_it_moves(runs: Runs, model: str) -> None:
    run = runs.get(model, True)
    assert run.stdout.count("symmetric memory for FSDP2") == 1, "one table, from rank 0"
    series = scalar_series(run.folder)
    for role in ("all_gather", "reduce_scatter"):
        moved = [value for _, value in series[f"fsdp_symm/bytes_per_step/{role}/host"]]
        assert len(moved) == STEPS
        assert min(moved) > 0
        assert len(set(moved[1:])) == 1, "every step moves the same bytes"
    assert len({value for _, value in series["fsdp_symm/arena_bytes"]}) == 1
    assert all(value >= 0 for _, value in series["fsdp_symm/wait_s_per_step"])
    experts = series.get("fsdp_symm/bytes_per_step/experts/host", [])
    assert len(experts) == (STEPS if model == "moe" else 0)
    assert all(value > 0 for _, value in experts)
    assert len({value for _, value in experts[1:]}) <= 1, "padded rows: as many in every step"
    events = [e for e in trace(run.folder, 1)["traceEvents"] if str(e.get("name")).startswith("fsdp_symm::")]
    kinds = ("all_gather", "reduce_scatter", *(EXCHANGES if model == "moe" else ()))
    assert {e["name"] for e in events} == {f"fsdp_symm::{kind}" for kind in kinds}
    assert all({"module", "bytes", "engine"} <= set(e["args"]) for e in events)


def test_a_failure_while_training_ends_every_rank_with_a_traceback(tmp_path: Path) -> None:
    before = shutil.disk_usage("/dev/shm").used  # segments have no names that a listing would show
    lr = ("--optimizer.param_groups.0.optimizer_kwargs.lr", "1e30")
    words = ("--config", "configs/debug_dense_cpu.toml", "--dump_folder", str(tmp_path), *FAST, *lr)
    run = start(*words, folder=tmp_path)
    assert run.status == 1
    assert "RuntimeError: Loss is not finite" in run.stdout + run.stderr
    assert "trained" not in run.stdout
    assert shutil.disk_usage("/dev/shm").used <= before, "a process that still runs, or a file that stayed"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "configs/none.toml"], "configs/none.toml: found No such file or directory; expected a readable"),
        (["--config", "{bad}"], "{bad}: found malformed TOML: "),
        ([], "command line: --config: found nothing; allowed: a TOML file"),
        (["--config"], "command line: argument --config: expected one argument"),
        (
            ["--config", "configs/debug_dense_cpu.toml", "--training.stepz", "1"],
            "command line: training.stepz: unknown",
        ),
        (["--config", "configs/debug_dense_cpu.toml"], "start: found no torchrun environment (RANK, WORLD_SIZE); fix:"),
    ],
)
def test_a_config_error_is_one_line_and_status_2(tmp_path: Path, words: list[str], line: str) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[training\n")
    run = start(*[word.format(bad=bad) for word in words], folder=tmp_path, ranks=0)
    assert run.status == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"config error: {line.format(bad=bad)}")


def test_a_run_that_ends_before_the_window_claims_no_trace_and_judges_no_old_one(short: Run) -> None:
    assert short.status == 0, short.stderr[-3000:]
    assert short.stdout.strip().splitlines()[-1].endswith("; no trace: the run ended before step 10")
    assert "verdict" not in short.stdout
    assert (short.folder / OLD_TRACE).read_bytes() == b"left by an earlier run"


def test_modules_and_dedicated_all_gather_reach_the_switch(short: Run) -> None:
    assert short.status == 0, short.stderr[-3000:]
    table = " ".join(short.stdout.split())
    assert re.search(r"all_gather +layers.0 \.\. layers.5 +\d .* host ", table)
    assert "plain not selected by" in table
    assert short.stdout.count("fsdp_symm.dedicated_all_gather = true has no effect on CPU") == 1


def test_no_room_under_raise_ends_every_rank_with_the_reason(tmp_path: Path) -> None:
    bound = ("--expert_parallel.overflow", "raise", "--expert_parallel.recv_capacity_per_rank", "8")
    run = start(
        "--config", "configs/debug_moe_cpu.toml", "--dump_folder", str(tmp_path), *FAST, *bound, folder=tmp_path
    )
    assert run.status == 1
    text = run.stdout + run.stderr
    assert "SymmMemError: ep_prepare: a rank receives more rows than recv_capacity_per_rank" in text
    assert "expected: at most 8" in text
    assert "trained" not in run.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trace.ranks", "7"], "trace.ranks: found 7; allowed: 0 to 1 (this run's ranks)"),
        (
            ["--fsdp_symm.modules", "no.*"],
            "[fsdp_symm]: set_symm_mem_for_comm: modules matches no FSDP module; found: 'no.*'; expected: a pattern or",
        ),
        (
            ["--fsdp_symm.backend", "nccl"],
            "command line: fsdp_symm.backend: found 'nccl'; allowed on CPU: 'auto', 'host'",
        ),
    ],
)
def test_a_config_error_under_torchrun_is_one_line_of_ours(tmp_path: Path, words: list[str], line: str) -> None:
    config = ("--config", "configs/debug_dense_cpu.toml", "--dump_folder", str(tmp_path))
    run = start(*config, *words, folder=tmp_path)
    assert run.status == 1
    assert "config error" not in run.stdout
    assert "WARNING" not in run.stdout
    ours, _, torchrun = run.stderr.partition("\n")
    assert ours.startswith(f"config error: {line}")
    assert "config error" not in torchrun
    assert "ConfigError" not in torchrun, "torchrun repeats no traceback of ours"


def test_help_and_check(tmp_path: Path) -> None:
    shown = start("--help", folder=tmp_path, ranks=0)
    assert shown.status == 0
    assert "torchrun --nproc-per-node 2 train.py --config configs/debug_moe_cpu.toml" in shown.stdout
    assert "[fsdp_symm]" in shown.stdout
    checked = start("--config", "configs/debug_moe_gpu.toml", "--check", folder=tmp_path, ranks=0)
    assert checked.status == 0, checked.stderr
    assert "parallelism.expert_parallel_degree = 2\n" in checked.stdout
    assert checked.stderr == ""
