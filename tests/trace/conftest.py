"""Ways to run the inspector from outside, and where the traces are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fsdp_symm.cli import main
from tests.trace.build import Builder

_BESIDE = Path(__file__).parents[2].parent / "shared" / "traces"


class Ran(NamedTuple):
    """What one command line did."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys) -> Callable[..., Ran]:
    """Run ``fsdp-symm`` in this process."""

    def run(*args: object) -> Ran:
        capsys.readouterr()
        status = main([str(a) for a in args])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def inspect(cli) -> Callable[..., dict[str, Any]]:
    """The parsed JSON report of some paths; fails on any other status than 0."""

    def run(*args: object) -> dict[str, Any]:
        ran = cli("inspect", *args, "--json")
        assert ran.status == 0, ran.err
        return json.loads(ran.out)

    return run


@pytest.fixture
def judge(inspect, tmp_path) -> Callable[..., dict[str, Any]]:
    """The report of a builder's trace."""

    def run(builder: Builder, *args: object) -> dict[str, Any]:
        return inspect(builder.write(tmp_path / "trace.json"), *args)

    return run


@pytest.fixture
def public() -> Callable[[str], Path]:
    """Path of a public trace, or a skip with the reason."""

    def find(name: str) -> Path:
        folder = Path(os.environ.get("FSDP_SYMM_TRACES", _BESIDE))
        path = folder / f"{name}.json.gz"
        if not path.exists():
            pytest.skip(f"{name}: not in {folder.name}/; set FSDP_SYMM_TRACES to a folder with the public traces")
        return path

    return find
