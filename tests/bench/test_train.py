"""``fsdp-symm bench train``: real runs on CPU ranks, runs that do not end, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_symm.bench import schema, train
from fsdp_symm.bench.train import TrainBench, Variant, run_variant
from fsdp_symm.bench.train_events import TrainMetrics, model_size, timed_steps
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemConfigError, SymmMemError, SymmMemTimeoutError
from fsdp_symm.titan.sections import FsdpSymmSection

ROOT = Path(__file__).parents[2]
DENSE = "configs/debug_dense_cpu.toml"
SMALL = ("--override", "training.seq_len=64", "--override", "training.local_batch_size=1")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_runs_become_rows_and_a_failed_one_costs_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, traces = tmp_path / "deep/train_w2.csv", tmp_path / "traces"
    words = ["bench", "train", "--csv", str(path), "--config", DENSE, "--traces", str(traces), "--steps", "7", *SMALL]
    assert main([*words, "--variants", "symm,native,plain"]) == 1
    said = capsys.readouterr()
    assert "debug_dense_cpu native failed\n  found: exit status 1" in said.err
    assert "parallelism.enable_fsdp_symm_mem is only supported for compute capability 9.0" in said.err
    assert "Losses of debug_dense_cpu against plain, relative: symm the same in every digit." in said.out

    symm, plain = schema.read_lines(path)
    assert (symm["variant"], plain["variant"]) == ("symm", "plain")
    assert schema.read(path)[0].bytes == 6_163_712, "two bytes of half of the parameters"
    for line in (symm, plain):
        assert (line["name"], line["ranks"], line["n"]) == ("train_debug_dense_cpu", "2", "2")
        assert 0 < float(line["min_us"]) <= float(line["median_us"]) <= float(line["max_us"])
        # Of other steps than the median's, on a machine that may be busy: only the unit is sure.
        assert 0.1 < float(line["tokens_per_s"]) / (64 / float(line["median_us"]) * 1e6) < 10
        assert len(line["losses"].split("; ")) == 7
        assert line["dtype"] == "bfloat16/float32"
        assert line["overrides"] == "training.seq_len=64 training.local_batch_size=1"
        assert line["command"].endswith("--variants symm,native,plain --steps 7 " + " ".join(SMALL))
        assert 0 < float(line["exposed_ms"]) <= float(line["comm_ms"])
    assert symm["losses"] == plain["losses"]
    assert (int(symm["symmetric_bytes"]) > 0, plain["symmetric_bytes"]) == (True, "0")
    assert "host (shared memory)" in symm["verdict"]
    assert "shared memory" not in plain["verdict"]
    kept = {f"train_debug_dense_cpu_{variant}_w2.{end}" for variant in ("symm", "plain") for end in ("json.gz", "log")}
    assert {p.name for p in traces.iterdir()} == kept | {"train_debug_dense_cpu_native_w2.log"}


def test_a_variant_says_who_moves_the_bytes() -> None:
    from fsdp_symm.titan.config import load

    bench = TrainBench(Path("configs/moe_16b.toml"), "moe", 2, (), steps=9, overrides=("model.layers=2",))
    seen = {}
    for name in ("symm+copy_engine", "plain+torchtitan", "symm"):
        words = bench.train_command(Variant.parse(name), Path("somewhere"))
        config = load("configs/moe_16b.toml", words[words.index("--config") + 2 :])
        assert (config.training.steps, config.trace.start_step, config.trace.ranks) == (9, 9, (0,))
        assert (config.dump_folder, len(config.model_spec.model.layers)) == ("somewhere", 2)
        assert not config.parallelism.enable_fsdp_symm_mem
        section: FsdpSymmSection = config.fsdp_symm
        seen[name] = section.enable, section.zero_cta, config.expert_parallel.implementation
    assert seen == {
        "symm+copy_engine": (True, True, "copy_engine"),
        "plain+torchtitan": (False, False, "torchtitan"),
        "symm": (True, True, "copy_engine"),
    }
    assert set(Variant.parse("native").settings) == {
        "fsdp_symm.enable=false",
        "parallelism.enable_fsdp_symm_mem=true",
    }


BAD = {
    "layers": (["--override", "model.layers"], "--override: found 'model.layers', expected KEY=VALUE"),
    "own": (["--override", "trace.steps=2"], "--override: found trace.steps, which the benchmark sets itself"),
    "switch": (["--override", "fsdp_symm.enable=true"], "--override: found fsdp_symm.enable, which the benchmark"),
    "experts": (
        ["--override", "expert_parallel.implementation=auto", "--variants", "symm+auto"],
        "--override: found expert_parallel.implementation, which the benchmark sets itself",
    ),
    "variant": (["--variants", "symm,plane"], "--variants: found 'plane', expected symm, plain, native"),
    "implementation": (["--variants", "symm+magic"], "--variants: found 'symm+magic', expected"),
    "twice": (["--variants", "symm,symm"], "--variants: found symm,symm, expected different ones"),
    "steps": (["--steps", "5"], "--steps: found 5, expected at least 6: the first 3 and the last 2 are not timed"),
    "ranks": (["--ranks", "1"], "--ranks: found 1, expected at least 2"),
    "limit": (["--limit", "0"], "--limit: found 0, expected seconds above 0"),
    "name": (["--name", "a b"], "--name: found 'a b', expected letters, digits and _"),
    "config": (["--config", "configs/none.toml"], "fsdp-symm bench train: found no configs/none.toml below"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words, complaint = BAD[name]
    assert main(["bench", "train", "--csv", str(tmp_path / "x.csv"), "--config", DENSE, *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_it_must_be_started_in_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "train", "--csv", "x.csv", "--config", str(ROOT / DENSE)]) == 2
    assert f"found no train.py below {tmp_path}, expected the repository, fix: cd to it" in capsys.readouterr().err


SLEEPER = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
print("OutOfMemoryError: not enough", flush=True)
time.sleep(100)
"""


def _gone(pid: int) -> bool:
    """Whether a process ends within seconds; a zombie counts as ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def _sleeper(folder: Path) -> Path:
    (folder / "train.py").write_text(SLEEPER)
    (folder / "some.toml").write_text("")
    return folder / "pid"


def test_a_run_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = _sleeper(tmp_path)
    monkeypatch.chdir(tmp_path)
    bench = TrainBench(Path("some.toml"), "some", 2, (Variant("symm"),), limit_s=15, traces=tmp_path / "kept")
    with pytest.raises(SymmMemTimeoutError) as ended:
        run_variant(bench, bench.variants[0])
    assert "bench train: some symm did not end" in str(ended.value)
    assert "still running after 15 s; its log says:\n    OutOfMemoryError: not enough" in str(ended.value)
    assert _gone(int(pid.read_text()))
    assert "not enough" in (tmp_path / "kept/train_some_symm_w2.log").read_text()


def test_a_benchmark_that_is_told_to_end_ends_its_ranks(tmp_path: Path) -> None:
    pid = _sleeper(tmp_path)
    words = ["bench", "train", "--csv", "x.csv", "--config", "some.toml", "--variants", "symm"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-m", "fsdp_symm.cli", *words], cwd=tmp_path, env=environment)
    for _ in range(300):
        if pid.is_file() and pid.read_text():
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)  # to it alone, not to its group
    assert running.wait(60) == 128 + signal.SIGTERM
    assert _gone(int(pid.read_text()))


# --- figures -----------------------------------------------------------------------------------------------


def _series(steps: int) -> dict[str, dict[int, float]]:
    every = range(1, steps + 1)
    return {
        "loss_metrics/global_avg_loss": {s: 9.0 - s for s in every},
        "time_metrics/end_to_end(s)": {s: float(s) for s in every},
        "throughput(tps)": {s: 100.0 * s for s in every},
        "memory/max_reserved(GiB)": {s: 2.0 if s == 1 else 1.5 for s in every},
        "memory/max_active(GiB)": dict.fromkeys(every, 1.0),
    }


def test_first_steps_and_those_of_the_profiler_are_not_timed() -> None:
    assert list(timed_steps(12)) == [4, 5, 6, 7, 8, 9, 10]
    metrics = TrainMetrics.of(_series(8), 8)
    assert metrics.steps_us == [4e6, 5e6, 6e6]
    assert metrics.tokens_per_s == 500
    assert metrics.losses[0] == 8.0
    assert (metrics.reserved_bytes, metrics.active_bytes, metrics.symmetric_bytes) == (2**31, 2**30, 0)
    assert metrics.traced == {"exposed_ms": "", "comm_ms": "", "sm_ms": "", "engines": ""}


def test_the_traced_step_and_symmetric_memory_are_read_too() -> None:
    trace = "fsdp_symm/trace/"
    more = {
        "fsdp_symm/arena_bytes": {1: 7.0, 2: 9.0},
        f"{trace}exposed_ms": {8: 1.25},
        f"{trace}comm_ms": {8: 2.0},
        f"{trace}engine_share/all_gather/copy_engine": {8: 1.0},
        f"{trace}engine_share/reduce_scatter/plain_kernel": {8: 0.25},
    }
    metrics = TrainMetrics.of(_series(8) | more, 8)
    assert metrics.symmetric_bytes == 9
    engines = "all_gather/copy_engine 1.00; reduce_scatter/plain_kernel 0.25"
    assert metrics.traced == {"exposed_ms": 1.25, "comm_ms": 2.0, "sm_ms": "", "engines": engines}


def test_a_missing_step_and_a_missing_size_are_named() -> None:
    series = _series(8)
    del series["throughput(tps)"][5]
    with pytest.raises(
        SymmMemError, match=r"throughput\(tps\) is not complete\n  found: steps \[1, 2, 3, 4, 6, 7, 8\]"
    ):
        TrainMetrics.of(series, 8)
    assert model_size("[INFO] Model llama3 8B size: 8,030,261,248 total parameters\n") == 8_030_261_248
    with pytest.raises(SymmMemError, match="a log without 'size: N total parameters'"):
        model_size("nothing")


def test_types_come_from_the_overrides_then_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("")
    assert train._dtype(TrainBench(config, "c", 2, ())) == "bfloat16/float32"
    config.write_text('[training]\nmixed_precision_param = "float32"\n')
    assert train._dtype(TrainBench(config, "c", 2, ())) == "float32/float32"
    given = TrainBench(config, "c", 2, (), overrides=("training.mixed_precision_param=bfloat16",))
    assert train._dtype(given) == "bfloat16/float32"


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("", "Is a directory"),
        ("file/x.csv", "found"),
        ("old.csv", "found columns ['a', 'b'], expected ['name', 'variant', 'ranks', "),
        ("binary.csv", "found no CSV"),
    ],
)
def test_a_csv_that_cannot_be_written_is_found_before_anything_runs(
    place: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "old.csv").write_text("a,b\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    monkeypatch.setattr("fsdp_symm.bench.train.run_variant", lambda *_: pytest.fail("it ran"))
    assert main(["bench", "train", "--csv", str(tmp_path / place), "--config", DENSE, "--variants", "plain"]) == 2
    assert complaint in capsys.readouterr().err


def test_traces_are_kept_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("")
    words = ["--csv", str(tmp_path / "x.csv"), "--config", DENSE, "--traces", str(tmp_path / "t")]
    assert main(["bench", "train", *words]) == 2
    assert "expected a folder" in capsys.readouterr().err


def test_a_summary_of_foreign_files_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert main(["bench", "summary", str(tmp_path)]) == 2
    assert "x.csv: found columns ['a', 'b']" in capsys.readouterr().err


def test_bad_usage_is_known_by_its_error() -> None:
    with pytest.raises(SymmMemConfigError):
        Variant.parse("")
    assert Variant.parse("symm+all_to_all").name == "symm+all_to_all"
