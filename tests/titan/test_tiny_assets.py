"""The shipped tokenizer and text are what the script makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parents[2] / "configs" / "tiny"
FILES = ("text/data.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")


def test_the_script_makes_the_shipped_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(TINY / "make.py"), str(tmp_path)], check=True, timeout=60)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name


def test_they_are_small_and_fit_the_debug_models() -> None:
    from tokenizers import Tokenizer

    assert sum((TINY / name).stat().st_size for name in FILES) < 600_000
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer/tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 2048
    text = "The ferry pilot mends the broken oars by the river at dawn."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
