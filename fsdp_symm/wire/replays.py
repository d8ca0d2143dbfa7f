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


class Replays:
    """Graphs of one wire by what they do.

    Args:
        driver: of this machine.
        device: the wire's GPU.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._graphs: dict[Hashable, int | None] = {}  # None: seen once
        self.building = torch.cuda.Stream(device)

    def run(self, key: Hashable, enqueue: Callable[[torch.cuda.Stream], None], stream: torch.cuda.Stream) -> None:
        """Enqueue a call on ``stream``.

        Args:
            key: equal exactly for calls that enqueue the same work on the same addresses.
            enqueue: puts the work on the stream it is given, and on streams forked from it and joined again.
        """
        graph = self._graphs.get(key, 0)
        if graph == 0:
            if len(self._graphs) >= _MAX_GRAPHS:
                self.close()
            self._graphs[key] = None
            enqueue(stream)
            return
        if graph is None:
            graph = self._driver.capture(self.building.cuda_stream, lambda: enqueue(self.building))
            self._graphs[key] = graph
        self._driver.launch(graph, stream.cuda_stream)

    def close(self) -> None:
        """Free all graphs, once none is running."""
        graphs = [g for g in self._graphs.values() if g]
        self._graphs.clear()
        if graphs:
            torch.cuda.synchronize(self._device)
            for graph in graphs:
                self._driver.forget(graph)
