"""Calls that come again are captured once as a graph and replayed: a graph of any size costs the host little.

A call is captured when it is seen for the second time, so that calls with addresses that never come back cost no
graph. Calls that are better enqueued anew keep the C arrays of their copies. While the user captures a graph of their
own, calls are enqueued into that one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from fsdp_symm import compat
from fsdp_symm.memory.cuda_driver import Copies, CudaDriver, FlatCopy, PitchedCopy

# Layers x slots x places of unsharded parameters; a graph takes some tens of KiB.
_MAX_GRAPHS = 4096
_MAX_SEEN = 4096
# Copies of a graph that depend on nothing but its start run side by side: the engines of a GPU then hide the 5 to 7
# microseconds that lie between one copy and the next. Measured over NVLink and on one GPU.
BRANCHES = 4


class Enqueueing(NamedTuple):
    """Where a call's work goes.

    Attributes:
        stream: and its handle.
        capturing: whether the stream is being captured, which takes no batches of copies.
    """

    stream: torch.cuda.Stream
    handle: int
    capturing: bool


class Replays:
    """Graphs of one wire by what they do.

    Args:
        driver: of this machine.
        device: the wire's GPU.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._kept: dict[Hashable, list[Copies]] = {}  # of calls that are enqueued anew
        self._graphs: dict[Hashable, int] = {}
        self._seen: dict[Hashable, None] = {}  # keys of calls that were enqueued, oldest first
        self._building = torch.cuda.Stream(device)
        self._branches = [torch.cuda.Stream(device) for _ in range(BRANCHES - 1)]

    def knows(self, key: Hashable) -> bool:
        """Whether a call with this key was run before, as far as is remembered."""
        return key in self._graphs or key in self._seen

    def run(
        self, key: Hashable, enqueue: Callable[[Enqueueing], None], stream: torch.cuda.Stream, *, graphed: bool
    ) -> None:
        """Enqueue a call on ``stream``.

        Args:
            key: equal exactly for calls that enqueue the same work on the same addresses.
            enqueue: puts the work on the stream it is given, and on streams forked from it and joined again.
            graphed: whether it becomes a graph when it comes again; always the same for a key.
        """
        if compat.is_capturing():
            enqueue(Enqueueing(stream, stream.cuda_stream, True))
            return
        graph = self._graphs.get(key) if graphed else None
        if not graphed or (graph is None and key not in self._seen):
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                self._kept.pop(oldest := next(iter(self._seen)), None)
                del self._seen[oldest]
            enqueue(Enqueueing(stream, stream.cuda_stream, False))
            if graphed:
                self._kept.pop(key, None)
            return
        if graph is None:
            if len(self._graphs) >= _MAX_GRAPHS:
                self.close()
            building = Enqueueing(self._building, self._building.cuda_stream, True)
            graph = self._driver.capture(building.handle, lambda: enqueue(building))
            self._graphs[key] = graph
        self._driver.launch(graph, stream.cuda_stream)

    def kept_copies(self, key: Hashable, make: Callable[[int], list[Copies]], where: Enqueueing) -> Sequence[Copies]:
        """The copies of a call: made for a graph, which is captured once, or made once and kept with their C arrays.

        Args:
            key: see :meth:`run`.
            make: gets the number of lists that copies are spread over.
            where: what :meth:`run` has given.
        """
        if where.capturing:
            return make(BRANCHES)
        copies = self._kept.get(key)
        if copies is None:
            copies = self._kept[key] = make(1)
        return copies

    def copy(self, copies: Sequence[Copies], where: Enqueueing) -> None:
        """Enqueue copies that may run in any order: in a batch, or side by side in a graph that is being built.

        Args:
            copies: see :func:`spread`.
            where: what :meth:`run` has given.
        """
        if not where.capturing:
            for part in copies:
                self._driver.copy(part, where.handle)
            return
        start = where.stream.record_event()
        for part, branch in zip(copies, [where.stream, *self._branches], strict=False):
            if branch is not where.stream:
                branch.wait_event(start)
            self._driver.copy(part, branch.cuda_stream, capturing=True)
            if branch is not where.stream:
                where.stream.wait_event(branch.record_event())

    def close(self) -> None:
        """Free all graphs, once none is running, and forget the kept copies."""
        self._kept.clear()
        self._seen.clear()
        graphs = list(self._graphs.values())
        self._graphs.clear()
        if graphs:
            torch.cuda.synchronize(self._device)
            for graph in graphs:
                self._driver.forget(graph)


def spread(flat: Sequence[FlatCopy], pitched: Sequence[PitchedCopy], parts: int) -> list[Copies]:
    """Copies in at most ``parts`` lists of about as many bytes; the largest first, each to the shortest list."""
    lists: list[tuple[list[FlatCopy], list[PitchedCopy]]] = [([], []) for _ in range(parts)]
    loads = [0] * parts
    for nbytes, copy in sorted([(c[2], c) for c in flat] + [(c[2] * c[3], c) for c in pitched], key=lambda x: -x[0]):
        shortest = loads.index(min(loads))
        loads[shortest] += nbytes
        if len(copy) == 3:
            lists[shortest][0].append(copy)
        else:
            lists[shortest][1].append(copy)
    return [Copies(*chosen) for chosen in lists if any(chosen)]
