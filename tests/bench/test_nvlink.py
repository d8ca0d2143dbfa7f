"""What is measured over NVLink: the script, the tables of training runs, the README's section."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.bench import nvlink_tables, schema, summary, train, train_tables
from fsdp_symm.cli import main
from fsdp_symm.errors import SymmMemConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "profiles/nvlink/run.sh"
OFF = ("NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1")
VARIABLES = (*(name.partition("=")[0] for name in OFF), "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS")


def _line(variant: str, losses: str, ms: float = 100.0, **more: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"name": "train_llama3_8b", "variant": variant, "ranks": 2, "bytes": 2**30, "n": 7}
    line |= {"dtype": "bfloat16/float32", "median_us": ms * 1e3, "min_us": ms * 990, "max_us": ms * 1100}
    line |= {"versions": "v", "hardware": "h", "command": f"c {variant}", "parameters": 8_030_261_248}
    line |= {"tokens_per_s": 8192.4, "peak_bytes": 90 * 2**30, "active_bytes": 1, "symmetric_bytes": 2**29}
    line |= {"exposed_ms": 1.25, "comm_ms": 20.0, "sm_ms": "", "engines": "", "verdict": "", "overrides": ""}
    return line | {"losses": losses, "run_s": 60.0} | more


PLAIN = _line("plain", "11.8; 11.5; 11.25", 120.0)
SYMM = _line("symm", "11.8; 11.5; 11.25", engines="all_gather/copy_engine 1.00", sm_ms=3.0)
NEAR = _line("native", "11.8001; 11.5; 11.3", 119.0, symmetric_bytes=0)


def test_train_table() -> None:
    header, _, symm, plain, native, _, *notes = train_tables.train_table([SYMM, PLAIN, NEAR]).splitlines()
    assert header.startswith("| model | parameters | variant | step, ms: median (min-max) | step / plain's |")
    assert symm == (
        "| llama3_8b | 8.03e9 | symm | 100.0 (99.0-110.0) | 0.833 | 8192 | 90.00 + 0.50 | 1.2, 20.0 | 3.0 "
        "| all_gather/copy_engine 1.00 | 11.80000, 11.25000 |"
    )
    assert plain.split(" | ")[3:5] == ["120.0 (118.8-132.0)", "1.000"]
    assert native.split(" | ")[6:10] == ["90.00 + 0.00", "1.2, 20.0", "-", "-"]
    assert "7 steps are timed" in notes[0]
    assert notes[1] == (
        "Losses of llama3_8b against plain, relative: symm the same in every digit; native within 0.005."  # 0.0044
    )
    small = train_tables.memory(_line("symm", "1.0", symmetric_bytes=5 * 2**20))
    assert small == "90.00 + 0.005", "the slots of a small model are not nothing"
    assert notes[2:] == ["2 ranks on h; v; `c symm`, `c plain`, `c native`."]


WRONG = {
    "first": (_line("symm", "11.9; 11.5; 11.25"), "losses differ by 0.0085 in the first step and 0 later"),
    "later": (_line("symm", "11.8; 11.5; 9.0"), "losses differ by 0 in the first step and 0.2 later"),
    "nan": (_line("symm", "11.8; nan; 11.25"), "losses differ by 0 in the first step and inf later"),
    "steps": (_line("symm", "11.8; 11.5"), "steps: found 2 and 3, expected the same, fix: run both again"),
    "layers": (
        _line("symm", "11.8; 11.5; 11.25", parameters=7),
        "parameters: found '7' and '8030261248', expected the same",
    ),
    "overrides": (_line("symm", "11.8; 11.5; 11.25", overrides="a=b"), "overrides: found 'a=b' and '', expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_are_wrong_are_told(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, complaint = WRONG[name]
    (told,) = train_tables.wrong_losses([line, PLAIN, NEAR])
    assert told.startswith(f"train_llama3_8b, 2 ranks: symm against plain: {complaint}")
    assert train_tables.wrong_losses([line, PLAIN], ["plain"]) == []
    assert f"**Wrong**: {told}." in train_tables.train_table([line, PLAIN])
    schema.write_lines(tmp_path / "train_w2.csv", [PLAIN, line])
    assert main(["bench", "summary", str(tmp_path)]) == 1
    assert told in capsys.readouterr().err


def test_other_models_and_experts_have_references_of_their_own() -> None:
    moe = {"name": "train_moe"}
    base = _line("plain+torchtitan", "8.0; 7.0", **moe)
    assert train_tables.reference([_line("symm+copy_engine", "8.0; 7.0", **moe), base]) is base
    assert train_tables.reference([SYMM, NEAR]) is SYMM
    assert train_tables.wrong_losses([SYMM, PLAIN, base, _line("symm+copy_engine", "8.0; 7.01", **moe)]) == []
    assert train_tables.wrong_losses([PLAIN, _line("symm", "1.0; 1.0; 1.0", ranks=4)]) == []


def test_a_row_takes_the_place_of_its_older_self() -> None:
    new = _line("symm", "1.0", 50.0)
    merged = train_tables.merge([SYMM, PLAIN], new)
    assert [x["median_us"] for x in merged] == [50e3, 120e3]
    assert len(train_tables.merge([SYMM, PLAIN], new | {"ranks": 4})) == 3
    as_read = {name: str(value) for name, value in SYMM.items()}
    assert train_tables.merge([as_read], new) == [new]


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "summary", str(tmp_path)]) == 2
    assert f"found no measured line in {tmp_path}" in capsys.readouterr().err
    schema.write_lines(tmp_path / "train_w2.csv", [SYMM, PLAIN])
    small, large = (_line("direct", "", ms, name="unshard", bytes=size << 20) for ms, size in ((1.0, 8), (2.0, 64)))
    schema.write_lines(tmp_path / "unshard_w2.csv", [small, large])
    assert main(["bench", "summary", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| unshard | 2 | 64 | direct | 2.000 (1.980-2.200) | - | - |" in printed
    assert "| unshard | 2 | 8 |" not in printed
    assert (
        "| train_llama3_8b | 2 | 1024 | symm | 100.000 (99.000-110.000) | 90.00 + 0.50 | 11.80000, 11.25000 |"
        in printed
    )
    assert len(summary.last_of_each([small, large, SYMM])) == 2


# --- the README's section ----------------------------------------------------------------------------------


def test_the_section_shows_what_is_there_and_names_what_is_not(tmp_path: Path) -> None:
    assert nvlink_tables.section(tmp_path) == (
        "Not measured: unsharding a Llama block; reduce-scatter; a training step of Llama-like blocks; expert "
        "parallelism; training with torchtitan."
    )
    for ranks in (8, 2):
        schema.write_lines(tmp_path / f"train_w{ranks}.csv", [SYMM | {"ranks": ranks}, PLAIN | {"ranks": ranks}])
    schema.write_lines(tmp_path / "train_long_w2.csv", [PLAIN])
    text = nvlink_tables.section(tmp_path)
    headings = [part for part in text.split("\n\n") if part.startswith("**")]
    assert headings == [
        f"**Training with torchtitan{more}**, {n} ranks:" for more, n in (("", 2), (" (long)", 2), ("", 8))
    ]
    assert text.count("| llama3_8b | 8.03e9 | symm |") == 2
    assert text.endswith("; a training step of Llama-like blocks; expert parallelism.")
    (tmp_path / "other.csv").write_text("")
    with pytest.raises(SymmMemConfigError, match=r"other\.csv, expected KIND_wRANKS\.csv with a kind of unshard,"):
        nvlink_tables.section(tmp_path)


def test_the_readme_gets_what_lies_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("<!-- table:nvlink -->\n<!-- /table:nvlink -->\n")
    folder = tmp_path / nvlink_tables.FOLDER
    folder.mkdir(parents=True)
    schema.write_lines(folder / "train_w2.csv", [SYMM, PLAIN])
    assert main(["bench", "tables", "--root", str(tmp_path), "--check"]) == 1
    assert main(["bench", "tables", "--root", str(tmp_path)]) == 0
    assert "**Training with torchtitan**, 2 ranks:" in (tmp_path / "README.md").read_text()
    (folder / "wrong.csv").write_text("")
    assert main(["bench", "tables", "--root", str(tmp_path)]) == 2
    assert "wrong.csv, expected KIND_wRANKS.csv" in capsys.readouterr().err


# --- the script --------------------------------------------------------------------------------------------

FAKE = f"""#!/bin/bash
# takes the place of python: counts GPUs, notes how it was called and with what, and writes the CSV
[ "$1" = -c ] && echo "${{GPUS:-2}}" && exit
for name in {" ".join(VARIABLES)}; do [ -z "${{!name:-}}" ] || with="$with$name=${{!name}} "; done
echo "$with| $*" >>"$NOTES"
words="$*"
while [ $# -gt 0 ]; do [ "$1" = --csv ] && csv=$2; shift; done
case "$words" in *"${{FAIL:-none}}"*) echo "no luck" >&2; exit 1;; esac
echo "printed by $words"
[ -z "${{csv:-}}" ] || echo a >>"$csv"
"""


def _run(tmp_path: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    fake, notes = tmp_path / "python", tmp_path / "notes"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    notes.write_text("")
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "NOTES": str(notes), **environment}
    words = words or (str(tmp_path / "out"), "0")
    done = subprocess.run(
        [str(SCRIPT), *words], env=variables, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    return done, [line.split() for line in notes.read_text().splitlines()]


def _products(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.suffix != ".log"}


def test_the_script_runs_everything_once(tmp_path: Path) -> None:
    done, calls = _run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(call[:4] == [*OFF, "|"] for call in calls), "multicast is off, and nothing else is set"
    names = [line.split(":")[0] for line in done.stdout.splitlines()[:-1]]
    trained = [name for name in names if name.startswith("train_")]
    benches = ["unshard", "experts", "fsdp_step", "reduce_scatter", "fsdp_step_d8192", "experts_e256"]
    assert [n for n in names if n not in trained] == [f"{n}_w2" for n in ("doctor", *benches, "doctor_json")]
    assert names[1:10] == trained[:9], "real-size models before benchmarks"
    models = list(dict.fromkeys(name.split("_")[1] + name.split("_")[2] for name in trained))
    assert models == ["debugmoe", "llama38b", "moe16b", "debugdense"]
    for model in ("debug_dense_gpu", "debug_moe_gpu", "llama3_8b", "moe_16b"):
        switches = {name.removeprefix(f"train_{model}_").split("_")[0] for name in trained if model in name}
        assert switches == {"symm", "plain", "native"}
    csvs = {f"{name}_w2.csv" for name in [*benches, "train"]}
    assert _products(tmp_path / "out") == csvs | {"doctor_w2.txt", "doctor_w2.json"} | {f"{n}.txt" for n in trained}
    assert "doctor --json" in (tmp_path / "out/doctor_w2.json").read_text()
    kinds = {nvlink_tables._NAME.fullmatch(Path(name).stem) for name in csvs}
    assert {found[1] for found in kinds if found} == set(nvlink_tables.KINDS)
    assert done.stdout.splitlines()[-1].endswith("cli bench summary " + str(tmp_path / "out"))

    done, calls = _run(tmp_path)  # everything is there: only the table again
    assert (done.returncode, len(calls), len(done.stdout.splitlines())) == (0, 1, 1)


def test_the_script_says_what_the_commands_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp_symm.titan.config import load

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran: list[str] = []

    def run_variant(bench: train.TrainBench, variant: train.Variant) -> dict[str, Any]:
        words = bench.train_command(variant, tmp_path)
        if variant.switch != "native":  # which needs a GPU to be configured
            load(str(bench.config), words[words.index("--config") + 2 :])
        ran.append(f"{bench.name} {variant.name} {bench.steps}")
        return _line(variant.name, "1.0; 1.0", name=f"train_{bench.name}")

    monkeypatch.setattr(train, "run_variant", run_variant)
    _, calls = _run(tmp_path)
    benches = [call[call.index("fsdp_symm.cli") + 1 :] for call in calls if "bench" in call and "summary" not in call]
    (tmp_path / "out/train_w2.csv").unlink()
    for words in benches:
        if words[1] == "train":
            assert main(words) == 0
        elif not torch.cuda.is_available():  # the arguments are good ones: only the GPU is missing
            assert main(words) == 2
            assert "found no GPU" in capsys.readouterr().err
    assert len(ran) == 13
    assert {"llama3_8b native 12", "moe_16b symm+copy_engine 12", "debug_moe_gpu symm+all_to_all 12"} <= set(ran)


def test_the_script_goes_on_after_a_failure_and_within_its_time(tmp_path: Path) -> None:
    done, calls = _run(tmp_path, FAIL="--variants plain")
    assert done.returncode == 1
    assert re.search(rf"^train_llama3_8b_plain_w2: failed after \d+ s, see {tmp_path}/out/", done.stdout, re.M)
    assert re.search(r"^train_llama3_8b_native_w2: \d+ s$", done.stdout, re.M)
    assert (tmp_path / "out/train_llama3_8b_plain_w2.log").read_text() == "no luck\n"
    done, again = _run(tmp_path)
    assert (done.returncode, len(again)) == (0, 5)  # plain of four models, and the table
    assert _run(tmp_path, FAIL="bench summary")[0].returncode == 1

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    done, calls = _run(fresh, str(fresh / "out"), "45")
    assert done.returncode == 1
    assert "fsdp_step_w2: not started, about 100 s are needed and " in done.stdout
    assert {
        name for call in calls for name in call if name in ("doctor", "unshard", "configs/debug_dense_gpu.toml")
    } == {
        "doctor",
        "unshard",
        "configs/debug_dense_gpu.toml",
    }
    assert not any("experts" in call or "configs/llama3_8b.toml" in call for call in calls)

    named = tmp_path / "named"
    named.mkdir()
    done, calls = _run(named, str(named / "out"), "0", "train_moe_16b_plain_torchtitan_w2", "doctor_w2")
    assert (done.returncode, len(calls)) == (0, 3), "these two, and the table"
    done, calls = _run(named, str(named / "out"), "0", "doctor")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("run.sh: found no doctor, expected some of: doctor_w2 train_debug_moe_gpu_symm_")


def test_ranks_that_share_gpus_are_told_so(tmp_path: Path) -> None:
    done, calls = _run(tmp_path, GPUS="1", RANKS="2")
    assert done.returncode == 0
    assert all(call[:6] == [*OFF, "NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_MAX_CTAS=16", "|"] for call in calls)
    real = [call for call in calls if "configs/llama3_8b.toml" in call or "configs/moe_16b.toml" in call]
    assert all("model.layers=4" in call for call in real)
    assert len(real) == 6
    assert not any("8192x3" in call for call in calls)  # does not fit

    alone = tmp_path / "alone"
    alone.mkdir()
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}
    done, calls = _run(alone, GPUS="4", LAYERS="20", **shared)
    assert all(call[:4] == [*OFF, "|"] for call in calls)
    real = [call for call in calls if "configs/moe_16b.toml" in call]
    assert all({"model.layers=20", "parallelism.expert_parallel_degree=4"} <= set(call) for call in real)
    assert (alone / "out/train_w4.csv").is_file()


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_dry_run_prints_the_commands_and_starts_none(words: list[str], tmp_path: Path) -> None:
    environment = {} if words else {"DRY_RUN": "1"}
    done, calls = _run(tmp_path, *words, str(tmp_path / "out"), GPUS="0", **environment)
    assert (done.returncode, calls) == (0, [])
    assert not (tmp_path / "out").exists()
    lines = done.stdout.splitlines()
    assert {f"export {setting}" for setting in OFF} <= set(lines)
    commands = [line for line in lines if not line.startswith("export")]
    assert len(commands) == 21
    assert all(" so far): timeout -k 45 " in line for line in commands)
    assert all("--nproc-per-node 2" in line or "--ranks 2" in line for line in commands)
    assert "MULTI_RANK" not in done.stdout


BAD = {
    "nothing": ([], {}, "usage: profiles/nvlink/run.sh [--dry-run] FOLDER [SECONDS [NAME...]]"),
    "option": (["--dry"], {}, "usage: profiles/nvlink/run.sh"),
    "seconds": (["out", "ten"], {}, "found ten, expected a whole number"),
    "ranks": (["out"], {"RANKS": "two"}, "found two, expected a whole number"),
    "no GPU": (["out"], {"GPUS": "0"}, "found 0 GPUs and 0 ranks, expected at least 1 and 2"),
    "one GPU": (
        ["out"],
        {"GPUS": "1"},
        "found 1 GPUs and 1 ranks, expected at least 1 and 2, fix: a machine with GPUs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_the_script_refuses_bad_usage(name: str, tmp_path: Path) -> None:
    words, environment, complaint = BAD[name]
    done, calls = _run(tmp_path, *(words or ("",)), **environment)
    assert (done.returncode, calls) == (2, [])
    assert complaint in done.stderr
