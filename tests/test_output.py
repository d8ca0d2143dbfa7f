"""Commands whose standard output cannot be written: a reader that leaves early, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLI = [sys.executable, "-m", "fsdp_symm.cli"]
TRACE = str(ROOT / "profiles" / "train_moe_gpu_w2.json.gz")
COMMANDS = {
    "doctor": [*CLI, "doctor"],
    "doctor_json": [*CLI, "doctor", "--json"],
    "inspect": [*CLI, "inspect", TRACE],
    "inspect_json": [*CLI, "inspect", "--json", TRACE],
    "diff": [*CLI, "diff", TRACE, TRACE],
    "check": [sys.executable, "train.py", "--config", "configs/debug_moe_cpu.toml", "--check"],
}


def _run(command: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_left_is_no_error(name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = _run(COMMANDS[name], writer)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_told_in_one_line(name: str) -> None:
    with open("/dev/full", "w") as full:
        ran = _run(COMMANDS[name], full.fileno())
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "standard output: No space left on device; expected a writable file" in ran.stderr
