"""What ``fsdp_symm.hf.register`` says where transformers is missing or older; transformers itself is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
REGISTER = "import fsdp_symm.hf\nfsdp_symm.hf.register()"


def _register(*lines: str, path: Path) -> str:
    """Register in a process of its own, whose ``transformers`` is what lies in ``path``; its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, REGISTER])],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def _refused(stderr: str, found: str) -> None:
    assert "SymmMemConfigError: fsdp_symm.hf.register: 'copy_engine' needs transformers with implementations" in stderr
    assert f"  found: {found}\n" in stderr
    assert "  expected: transformers 5.24 or newer (transformers.distributed.expert_parallel)\n" in stderr
    assert '  fix: pip install "transformers>=5.24"' in stderr


def test_without_transformers(tmp_path: Path) -> None:
    hidden = (
        "import sys, importlib.abc",
        "class Hide(importlib.abc.MetaPathFinder):",
        "    def find_spec(self, name, path=None, target=None):",
        "        if name == 'transformers': raise ModuleNotFoundError(f'No module named {name!r}', name=name)",
        "sys.meta_path.insert(0, Hide())",
    )
    _refused(_register(*hidden, path=tmp_path), "no module named transformers")


@pytest.mark.parametrize("version", ["5.23.1", "4.57.0", "5.24.0.dev0", "unknown"])
def test_with_an_older_transformers(tmp_path: Path, version: str) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    _refused(_register(path=tmp_path), f"transformers {version}")


def test_a_broken_transformers_is_not_called_missing(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_dependency\n")
    stderr = _register(path=tmp_path)
    assert "No module named 'no_such_dependency'" in stderr
    assert "SymmMemConfigError" not in stderr
