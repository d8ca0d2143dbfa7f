from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
