"""Calls that come again are captured once as a graph and replayed: a graph of any size costs the host 3 microseconds.

A call is captured when it is seen for the second time, so that calls with addresses that never come back cost no
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from fsdp_symm.memory.cuda_driver import CudaDriver

# Layers x slots x places of unsharded parameters; a graph takes some tens of KiB.
_MAX_GRAPHS = 4096
_MAX_SEEN = 1024


class Replays:
    """Graphs of one wire by what they do.

    Args:
        driver: of this machine.
        device: the wire's GPU.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._graphs: dict[Hashable, int] = {}
        self._seen: dict[Hashable, None] = {}  # keys seen once, oldest first
        self.building = torch.cuda.Stream(device)

    def knows(self, key: Hashable) -> bool:
        """Whether a call with this key was run before, as far as is remembered."""
        return key in self._graphs or key in self._seen

    def run(self, key: Hashable, enqueue: Callable[[torch.cuda.Stream], None], stream: torch.cuda.Stream) -> None:
        """Enqueue a call on ``stream``.

        Args:
            key: equal exactly for calls that enqueue the same work on the same addresses.
            enqueue: puts the work on the stream it is given, and on streams forked from it and joined again.
        """
        graph = self._graphs.get(key)
        if graph is None and key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            enqueue(stream)
            return
        if graph is None:
            if len(self._graphs) >= _MAX_GRAPHS:
                self.close()
            graph = self._driver.capture(self.building.cuda_stream, lambda: enqueue(self.building))
            self._graphs[key] = graph
        self._driver.launch(graph, stream.cuda_stream)

    def close(self) -> None:
        """Free all graphs, once none is running."""
        graphs = list(self._graphs.values())
        self._graphs.clear()
        if graphs:
            torch.cuda.synchronize(self._device)
            for graph in graphs:
                self._driver.forget(graph)
