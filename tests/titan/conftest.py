from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Ranks, fresh_ranks


@pytest.fixture(scope="session")
def titan_ranks() -> Iterator[Ranks]:
    """Two ranks that import torchtitan (seconds) once."""
    with fresh_ranks(2) as ranks:
        yield ranks
