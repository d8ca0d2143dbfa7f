"""Where unsharded parameters live while a copy engine fills them: memory whose reuse is ordered by events.

FSDP2 frees an unsharded parameter when it is resharded, by host order, while kernels that read it may still run. Its
own copy-out then runs on the same stream and cannot overtake them; a copy engine on another stream could. So the
memory comes from places that are handed out in turn, and a place is filled again only after the event of its last
reshard. With two places the next layer's fill waits for the layer *before* the one being computed, never for that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_symm import compat


def _new_memory_is_filled() -> bool:
    """Whether ``torch.empty`` writes: NaN under deterministic algorithms, on the stream that it is called on."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    return fills and torch.are_deterministic_algorithms_enabled()


class Place:
    """One allocator pool on a GPU, with the events of the reads that its next filling must come after."""

    def __init__(self, key: torch.cuda.Stream) -> None:
        self._key = key
        self._pool = torch.cuda.MemPool()
        self._readers: dict[int, torch.cuda.Event] = {}  # by stream: the last event of each

    def order_after_readers(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait until nobody reads what the place held."""
        for event in self._readers.values():
            stream.wait_event(event)

    @contextlib.contextmanager
    def allocating(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Allocate from this place what ``stream`` will fill. Under one stream always: blocks of an allocator belong to
        streams."""
        filled = _new_memory_is_filled()
        if filled:
            self._key.wait_stream(stream)  # which comes after the place's last readers
        with torch.cuda.stream(self._key), torch.cuda.use_mem_pool(self._pool, device=self._key.device):
            yield
        if filled:
            stream.wait_stream(self._key)

    def reads_end_here(self) -> None:
        """Note that the current stream's work so far is what reads the place."""
        stream = compat.current_stream(self._key.device)
        event = self._readers.get(stream.cuda_stream)
        if event is None:
            event = self._readers[stream.cuda_stream] = torch.cuda.Event()
        event.record(stream)


class _HostPlace(Place):
    """Ordinary CPU memory: the host itself orders reads and writes."""

    def __init__(self) -> None:
        """Nothing to hold."""

    def order_after_readers(self, stream: Any) -> None:
        """The host has done it."""

    @contextlib.contextmanager
    def allocating(self, stream: Any) -> Iterator[None]:
        """Anywhere."""
        yield

    def reads_end_here(self) -> None:
        """The host has seen it."""


class UnshardedMemory:
    """The places of one model's unsharded parameters.

    Parameters that are freed between forward and backward take turns in a ring that grows to what the program holds
    at once: two places by default, one more for each layer of explicit prefetch. The others (FSDP2's root, or
    ``reshard_after_forward=False``) share one pool for long-lived memory, since they are all alive together.

    Args:
        device: where the parameters live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._long_lived = self._new()
        self._free: list[Place] = []
        self.places = 0  # places of the ring so far

    def _new(self) -> Place:
        return _HostPlace() if self._key is None else Place(self._key)

    def take(self, *, long_lived: bool) -> Place:
        """The place that has been free for longest, or a new one."""
        if long_lived:
            return self._long_lived
        if self.places < 2 or not self._free:  # two at least: one is filled while the other is read
            self.places += 1
            return self._new()
        return self._free.pop(0)

    def give(self, place: Place) -> None:
        """Take a place back whose storages have been freed, by host order, on the current stream."""
        place.reads_end_here()
        if place is not self._long_lived:
            self._free.append(place)
