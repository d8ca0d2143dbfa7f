"""The README's example, run as it stands: it must work, and print the table that the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def _block(marker: str) -> str:
    """The one fenced block that holds the marker, without its language."""
    (found,) = [block for block in README.split("```")[1::2] if marker in block]
    return found.partition("\n")[2]


def test_the_example_prints_the_table_that_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "train_mine.py"
    script.write_text(_block("# train_mine.py"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    shown = [" ".join(line.split()) for line in _block("symmetric memory for FSDP2\n").splitlines()]
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    rows = [line for line in shown if line.startswith(("group", "0 0,1"))]
    assert len(rows) == 3
    for row in rows:
        assert row in printed, done.stdout


def test_every_file_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[1]
    for path in re.findall(r"\]\(([\w/.-]+)\)", README) + re.findall(r"configs/[\w.]+\.toml", README):
        assert (root / path).is_file(), path
