"""``fsdp-symm bench`` as a user runs it: the CSV, the generated tables, and every complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fsdp_symm.bench import schema, tables
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemConfigError

ROOT = Path(__file__).parents[2]


def test_host_benchmark_writes_its_csv(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "host.csv"
    command = [sys.executable, "-m", "fsdp_symm.cli", "bench", "host", "--csv", str(path)]
    done = subprocess.run(
        [*command, "--max-mib", "0.25", "--seconds", "0.02"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert path.read_text().splitlines()[0] == ",".join(f.name for f in fields(schema.Row))
    rows = schema.read(path)
    assert {(r.name, r.variant) for r in rows} == {
        (name, variant) for name in ("all_gather", "reduce_scatter") for variant in ("gloo", "host")
    }
    assert {r.dtype for r in rows} == {"float32", "bfloat16"}
    assert {r.bytes for r in rows} == {64 * 1024, 256 * 1024}
    for row in rows:
        assert 0 < row.min_us <= row.median_us <= row.max_us
        assert row.n >= 5
        assert row.ranks == 2
        assert "torch 2." in row.versions
        assert "cores" in row.hardware
        assert row.command.startswith("fsdp-symm bench host")
    assert "| all_gather | float32 | 64 KiB |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks: found 1, expected at least 2"),
        (["--max-mib", "0.01"], "--max-mib: found 0.01, expected 0.0625"),
        (["--max-mib", "nan"], "--max-mib: found nan, expected 0.0625"),
        (["--max-mib", "inf"], "--max-mib: found inf, expected 0.0625"),
        (["--seconds", "0"], "--seconds: found 0, expected more than 0"),
        (["--seconds", "inf"], "--seconds: found inf, expected more than 0, and an end"),
        (["--csv", "/proc/x.csv"], "--csv: found /proc/x.csv (No such file or directory), expected a file"),
        (["--csv", str(ROOT)], f"--csv: found {ROOT} (Is a directory), expected a file that can be written"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "host", "--csv", str(tmp_path / "x.csv"), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_csv_that_cannot_be_written_is_found_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "experts", "--device", "cpu", "--csv", str(ROOT)]) == 2
    assert f"--csv: found {ROOT} (Is a directory), expected a file that can be written" in capsys.readouterr().err


def test_documents_and_csvs_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_bytes(b"\xff\xfe\x00")
    assert main(["bench", "tables", "--root", str(tmp_path)]) == 2
    assert "found a document that cannot be read" in capsys.readouterr().err
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(SymmMemConfigError, match=r"a\.csv: found Is a directory, expected a CSV that can"):
        schema.read_lines(tmp_path / "a.csv")
    row = schema.Row("all_gather", "gloo", 2, 10**500, "float32", 3000.0, 1.0, 9.0, 5, "v", "h", "c")
    for bad in (row, replace(row, bytes=1, median_us=float("inf")), replace(row, bytes=1, max_us=float("nan"))):
        schema.write(tmp_path / "b.csv", [bad])
        with pytest.raises(SymmMemConfigError, match=r"b\.csv, line 2: found (bytes|median_us|max_us) "):
            schema.read_lines(tmp_path / "b.csv")


def test_the_readme_is_generated_from_the_committed_csv() -> None:
    assert tables.renew(ROOT, check=True) == 0


def _repository(folder: Path, readme: str) -> Path:
    (folder / "README.md").write_text(readme)
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    row = schema.Row("all_gather", "gloo", 2, 2**20, "float32", 3000.0, 1.0, 9.0, 5, "v", "h", "c")
    schema.write(folder / "profiles/host_vs_gloo.csv", [row, replace(row, variant="host", median_us=1000.0)])
    return folder


def _measured() -> list[str]:
    return [name for name, (path, _) in tables.TABLES.items() if (ROOT / path).exists()]


def _markers(*names: str) -> str:
    return "\n".join(f"<!-- table:{name} -->\nstale\n<!-- /table:{name} -->" for name in names)


def test_tables_are_renewed_between_their_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = _repository(tmp_path, f"head\n{_markers(*_measured())}\ntail\n")
    assert main(["bench", "tables", "--root", str(root), "--check"]) == 1
    assert "differs from its CSVs" in capsys.readouterr().err
    assert main(["bench", "tables", "--root", str(root)]) == 0
    renewed = (root / "README.md").read_text()
    assert "| 1 MiB | 3.00 ms (0.00-0.01) | 1.00 ms (0.00-0.01) | 3.0x |" in renewed
    assert "| d4096_l4, group 1 |" in renewed
    assert "stale" not in renewed
    assert renewed.startswith("head\n")
    assert renewed.endswith("tail\n")
    assert main(["bench", "tables", "--root", str(root), "--check"]) == 0


def test_tables_name_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tables", "--root", str(tmp_path)]) == 2
    assert "found no" in capsys.readouterr().err
    root = _repository(tmp_path, "no markers")
    assert main(["bench", "tables", "--root", str(root)]) == 2
    assert "found no single pair of markers for 'host_vs_gloo'" in capsys.readouterr().err
    (root / "README.md").write_text(_markers("host_vs_gloo"))
    (root / "profiles/host_vs_gloo.csv").unlink()
    assert main(["bench", "tables", "--root", str(root)]) == 2
    assert "expected a CSV, fix: run the benchmark first" in capsys.readouterr().err


def test_a_table_is_renewed_where_its_markers_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = _repository(tmp_path, _markers(*(name for name in _measured() if not name.startswith("expert"))))
    assert main(["bench", "tables", "--root", str(root)]) == 0  # tables of experts are shown only where asked for
    (root / "docs").mkdir()
    document = root / "docs/experts.md"
    document.write_text(f"text\n{_markers('experts_cpu_w2')}\n")
    assert main(["bench", "tables", "--root", str(root), "--check"]) == 1
    assert "found docs/experts.md that differs from its CSVs" in capsys.readouterr().err
    assert main(["bench", "tables", "--root", str(root)]) == 0
    assert "`copy_engine` loses in" in document.read_text()
    assert "stale" not in document.read_text()
    readme = (root / "README.md").read_text()
    (root / "README.md").write_text(readme + _markers("experts_cpu_w2"))
    assert main(["bench", "tables", "--root", str(root)]) == 2
    assert "found no single pair of markers for 'experts_cpu_w2'" in capsys.readouterr().err
    (root / "README.md").write_text(readme)
    (root / "profiles/experts_cpu_w2.csv").unlink()
    assert main(["bench", "tables", "--root", str(root)]) == 2
    assert "expected a CSV, fix: run the benchmark first" in capsys.readouterr().err


def test_tables_refuse_damaged_csvs_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage as killed benchmarks and editors leave it, in every CSV that becomes a table of its own."""
    root = _repository(tmp_path, _markers(*_measured()))
    paths = sorted({root / path for path, _ in tables.TABLES.values() if path.endswith(".csv")})
    for path in (p for p in paths if p.exists()):
        whole = path.read_text()
        header, first, *_ = whole.splitlines()
        columns = header.split(",")
        damages = {
            "cut in the last line": whole[:-10].rstrip("\n").rpartition(",")[0] + "\n",
            "header only": f"{header}\n",
            "no medians": whole.replace("median_us", "middle"),
            "a word for a number": whole.replace(first.split(",")[columns.index("ranks") + 3], "soon"),
        }
        for name, text in damages.items():
            path.write_text(text)
            assert main(["bench", "tables", "--root", str(root), "--check"]) == 2, (path.name, name)
            said = capsys.readouterr().err
            assert path.name in said, (path.name, name)
            assert "found" in said
            assert "expected" in said
            assert "fix: " in said
        path.write_text(whole)


BAD_STEPS = {
    "--alive": (["--alive", "2"], "--alive: found 2, expected at least 3"),
    "--profiled-steps": (["--profiled-steps", "0"], "--profiled-steps: found 0, expected 1 to 50"),
    "--ranks": (["--ranks", "1"], "--ranks 1 --steps 10: expected at least 2 ranks"),
    "--tokens": (["--tokens", "1000"], "--tokens: found 1000, expected a multiple of 1024"),
    "--widths": (["--widths", "100x2"], "--widths: found 100x2, expected WIDTHxBLOCKS"),
    "text": (["--widths", "wide"], "--widths: found wide"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_step_arguments(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments, text = BAD_STEPS[name]
    assert main(["bench", "fsdp-step", "--csv", str(tmp_path / "x.csv"), *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_step_benchmark_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "fsdp-step", "--csv", str(tmp_path / "x.csv")]) == 2
    assert "found no GPU, expected one or more" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "nvlink/"])
def test_the_committed_traces_say_what_the_tables_say(folder: str) -> None:
    from fsdp_symm.bench.fsdp_step import judge_trace

    for ranks in (2,) if folder else (2, 4):
        for way in ("direct", "direct_pulls"):
            judged = judge_trace(ROOT / f"profiles/{folder}fsdp_step_{way}_w{ranks}_d4096.json.gz")
            assert judged["gathers"] == judged["copy_engine_gathers"] == 8
            assert (judged["gather_kernels"], judged["copy_outs"]) == (0, 0)
            by_kernels = 4 if way == "direct" else 0
            assert (judged["symmetric_reduces"], judged["reduce_kernels"]) == (by_kernels, by_kernels)
            assert judged["reduces"] == 4


@pytest.mark.parametrize("name", ["inspect", "diff", "bench", "doctor"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"fsdp-symm {name}" in capsys.readouterr().out


def test_the_command_line_starts_without_torch() -> None:
    script = "import sys, fsdp_symm.cli as c; c.COMMANDS; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_unknown_public_name() -> None:
    import fsdp_symm

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fsdp_symm.nothing
    assert set(fsdp_symm.__all__) <= set(dir(fsdp_symm))


FAKE = """#!/bin/bash
# takes the place of python: notes how it was called, and writes the CSV
echo "$NCCL_MAX_CTAS $NCCL_MULTI_RANK_GPU_ENABLE $*" >>"$NOTES"
while [ $# -gt 0 ]; do [ "$1" = --csv ] && csv=$2; shift; done
case "$csv" in *"${FAIL:-none}"*) echo "no luck" >&2; exit 1;; esac
echo a >"$csv"
"""


def _gpu_run(
    tmp_path: Path, *arguments: str, script: str = "gpu_run.sh", python: str = FAKE, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    fake, notes = tmp_path / "python", tmp_path / "notes"
    fake.write_text(python)
    fake.chmod(0o755)
    notes.write_text("")
    command = [str(ROOT / "profiles" / script), str(tmp_path / "out"), *arguments]
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "NOTES": str(notes), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    return done, notes.read_text().splitlines()


def test_the_gpu_script_runs_what_the_commands_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(ROOT.glob("profiles/*"))
    done, calls = _gpu_run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(ROOT.glob("profiles/*")) == before
    ran = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert ran[:3] == ["fsdp_step_w2", "unshard_w2", "experts_w2"]
    names = [name for name in ran if not name.startswith("train_")]
    assert len(ran) - len(names) == 6, "three variants of two models"
    names.append("train_w2")
    assert {p.stem for p in (tmp_path / "out").glob("*.csv")} == set(names)
    csvs = {Path(path).stem for path, _ in tables.TABLES.values()}
    csvs -= {"host_vs_gloo", "inspect", "experts_cpu_w2", "nvlink"}
    assert csvs <= set(names)  # every table of a GPU has its run
    for call in calls:
        ctas, shared, *arguments = call.split()
        assert (arguments[:2], shared) == (["-m", "fsdp_symm.cli"], "1")
        assert int(ctas) * int(arguments[arguments.index("--ranks") + 1]) == 32
        if arguments[3] != "train" and not torch.cuda.is_available():  # good arguments: only the GPU is missing
            assert main(arguments[2:]) == 2
            assert "found no GPU" in capsys.readouterr().err

    done, calls = _gpu_run(tmp_path)
    assert (done.returncode, done.stdout, calls) == (0, "", [])  # everything is there


def test_a_dry_run_of_the_gpu_script_starts_and_writes_nothing(tmp_path: Path) -> None:
    done, calls = _gpu_run(tmp_path, DRY_RUN="1")
    assert (done.returncode, calls) == (0, [])
    assert not (tmp_path / "out").exists()
    assert done.stdout.splitlines()[0].startswith("fsdp_step_w2, about 165 s (165 s so far): timeout -k 45 330 ")
    assert len(done.stdout.splitlines()) == 16


@pytest.mark.parametrize("script", ["gpu_run.sh", "gpu_checks.sh"])
def test_the_gpu_scripts_say_how_they_are_called(tmp_path: Path, script: str) -> None:
    usage = f"usage: profiles/{script} FOLDER [SECONDS [NAME...]]"
    for words, text in (
        ([], usage),
        (["--help"], usage),
        (["x", "1h"], f"{usage}; found 1h, expected a whole number"),
        (["x", "1234567890"], f"{usage}; found 1234567890, expected at most nine digits"),
    ):
        done = subprocess.run(
            [str(ROOT / "profiles" / script), *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )
        assert (done.returncode, done.stdout, done.stderr) == (2, "", text + "\n")


def test_seconds_are_decimal(tmp_path: Path) -> None:
    done, calls = _gpu_run(tmp_path, "08", "unshard_w2")
    assert (done.returncode, calls) == (1, [])
    assert re.fullmatch(r"unshard_w2: not started, about 35 s are needed and [678] s are left\n", done.stdout)


def test_the_gpu_script_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    done, calls = _gpu_run(tmp_path, FAIL="unshard_w2")
    assert done.returncode == 1
    assert re.search(r"^unshard_w2: failed after \d+ s, see", done.stdout, re.M)
    assert (tmp_path / "out/unshard_w2.log").read_text() == "no luck\n"
    done, again = _gpu_run(tmp_path)
    assert (done.returncode, len(again)) == (0, 1)
    assert len(calls) > 5

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    done, calls = _gpu_run(fresh, "95")  # more than half a minute above any that must start
    assert done.returncode == 1
    started = [call.split(" bench ")[1].split()[0] for call in calls]
    assert started == [*["unshard"] * 2, *["train"] * 6, *["reduce-scatter"] * 2]  # the others would take longer
    assert re.search(r"^fsdp_step_w2: not started, about 165 s are needed and \d+ s are left$", done.stdout, re.M)


CHECKED = """#!/bin/bash
# takes the place of python: notes how it was called, and prints what a check prints
echo "$FSDP_SYMM_TEST_DEVICE $NCCL_MULTI_RANK_GPU_ENABLE $*" >>"$NOTES"
case "$*" in *"${FAIL:-none}"*) echo "FAILED tests/x.py::test_x - no luck"; exit 1;; esac
echo "9 passed"
"""


def _gpu_checks(tmp_path: Path, *arguments: str, **environment: str) -> tuple[list[str], int, list[str]]:
    done, calls = _gpu_run(tmp_path, *arguments, script="gpu_checks.sh", python=CHECKED, **environment)
    return done.stdout.splitlines(), done.returncode, calls


def test_the_gpu_checks_run_every_gpu_test_and_training(tmp_path: Path) -> None:
    printed, status, calls = _gpu_checks(tmp_path)
    assert status == 0
    assert all(call.startswith("cuda 1 -m ") for call in calls)
    files = {ROOT / word for call in calls for word in call.split() if word.startswith("tests/")}
    assert all(path.is_file() for path in files)
    assert files >= {*ROOT.glob("tests/gpu/test_*.py"), ROOT / "tests/test_parity.py", ROOT / "tests/test_random.py"}
    runs = [call for call in calls if " train.py --config " in call]
    configs = [word for call in runs for word in call.split() if word.endswith(".toml")]
    assert configs == ["configs/debug_dense_gpu.toml", *["configs/debug_moe_gpu.toml"] * 2]
    assert all((ROOT / config).is_file() for config in configs)
    claims = [call.split("--expect ")[1] for call in calls if "--expect" in call]
    assert claims == ["copy-engine:all_gather", *["copy-engine:all_gather", "copy-engine:dispatch,combine"] * 2]
    rows = printed[len(printed) // 2 :]
    assert len(rows) == len(calls) - len(claims), "one line a check"
    assert rows[0] == "experts: 9 passed"
    assert "train_debug_moe_gpu_w2: shown: copy-engine:all_gather copy-engine:dispatch,combine" in rows

    printed, status, calls = _gpu_checks(tmp_path)  # everything was seen: only the table again
    assert (printed, status, calls) == (rows, 0, [])


def test_the_gpu_checks_name_what_failed_and_what_did_not_run(tmp_path: Path) -> None:
    printed, status, _ = _gpu_checks(tmp_path, FAIL="--expect copy-engine:dispatch")
    assert status == 1
    assert "train_debug_moe_gpu_w2: FAILED, FAILED tests/x.py::test_x - no luck" in printed
    assert printed[-1] == "parity: 9 passed"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    printed, status, calls = _gpu_checks(fresh, "125")  # a minute more than any check that must start
    assert status == 1
    assert re.search(r"^experts: not started, about 250 s are needed and \d+ s are left$", "\n".join(printed), re.M)
    assert "experts: NOT RUN" in printed
    assert len(calls) == 3 + 5 + 1 + 2, "three training runs with five claims, the doctor, and two short tests"


def test_the_gpu_checks_run_what_is_named(tmp_path: Path) -> None:
    printed, status, calls = _gpu_checks(tmp_path, "0", "nccl", "narrow")
    assert (printed[2:], status, len(calls)) == (["nccl: 9 passed", "narrow: 9 passed"], 0, 2)
    done, calls = _gpu_run(tmp_path, "0", "nccl", "nccI", script="gpu_checks.sh", python=CHECKED)
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("gpu_checks.sh: found no nccI, expected some of: experts copy_engine ")


def test_a_dry_run_of_the_gpu_checks_starts_and_writes_nothing(tmp_path: Path) -> None:
    printed, status, calls = _gpu_checks(tmp_path, DRY_RUN="1")
    assert (status, calls) == (0, [])
    assert not (tmp_path / "out").exists()
    assert printed[0].startswith("experts, about 250 s (250 s so far): timeout -k 45 500 ")
