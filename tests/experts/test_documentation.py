"""The table of known defects in ``docs/experts.md``: complete, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The defects that other systems have had, by the letter of their kind.
ROWS = {
    "Z": [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13],
    "N": [1, 2, 3, 4, 5, 6, 8, 10],
    "G": [1, 2, 3, 4, 5, 7, 8, 10, 11, 12],
    "R": [2, 3, 4, 5, 6, 8, 9, 10, 11],
    "U": [1, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14],
    "D": [1, 2, 3, 4, 5, 6, 7, 8],
    "C": [1, 2, 3, 4, 6, 7, 8, 9, 10, 11],
}


def _table() -> dict[str, str]:
    text = (ROOT / "docs" / "experts.md").read_text()
    return {m[1]: m[2] for m in re.finditer(r"^\| ([A-Z]\d+) \| .*? \| (.*) \|$", text, re.MULTILINE)}


def test_every_known_defect_is_answered() -> None:
    assert sorted(_table()) == sorted(f"{letter}{n}" for letter, numbers in ROWS.items() for n in numbers)


def test_every_named_test_exists() -> None:
    defined = {
        name
        for pattern in ("experts/test_*.py", "gpu/test_*.py", "test_guards.py")
        for file in (ROOT / "tests").glob(pattern)
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for row, answer in _table().items():
        named = set(re.findall(r"`(test_\w+)`", answer))
        assert named <= defined, f"{row}: {sorted(named - defined)}"
        assert named or answer.startswith("no test: "), f"{row} has neither a test nor a reason"
