"""The memory of unsharded parameters on GPUs, with streams that note what waits for what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_symm.memory.unsharded import UnshardedMemory


class Stream:
    """Notes in one common list."""

    log: list[tuple[str, str, str]] = []  # noqa: RUF012 - one for all, emptied by the fixture

    def __init__(self, device: Any = None, name: str = "the place's") -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append((self.name, "waits for", other.name))


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that will fill the parameters."""

    @contextlib.contextmanager
    def under(stream: Stream) -> Iterator[None]:
        Stream.log.append((stream.name, "allocates", ""))
        yield

    Stream.log.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "stream", under)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    return Stream(name="the filling")


@pytest.mark.parametrize("long_lived", [False, True])
@pytest.mark.parametrize(("deterministic", "fills"), [(False, True), (True, False), (True, True)])
def test_memory_that_torch_fills_is_filled_between_its_readers_and_the_shards(
    monkeypatch: pytest.MonkeyPatch, filling: Any, long_lived: bool, deterministic: bool, fills: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
    with UnshardedMemory(torch.device("cuda", 0)).take(long_lived=long_lived).allocating(filling):
        pass
    allocates = ("the place's", "allocates", "")
    first, last = ("the place's", "waits for", "the filling"), ("the filling", "waits for", "the place's")
    assert Stream.log == ([first, allocates, last] if deterministic and fills else [allocates])
