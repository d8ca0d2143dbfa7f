"""How long an all-gather output lives, counted in later all-gathers: what a ring in call order must hold.

A replay of FSDP2's own rules (read in torch 2.13-2.15) over the modules in FQN order, which is taken for the order of
execution; a model that runs otherwise and needs more slots is told so when it happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_symm.compat import PrefetchNode


class _Replay:
    """Allocations get numbers; a buffer that is freed at number ``n`` has kept ``n - own`` later ones company."""

    def __init__(self) -> None:
        self.count = 0
        self.slots = 1
        self.pending: dict[tuple[int, int], int] = {}  # (module, group) -> number of its buffer

    def unshard(self, key: tuple[int, int]) -> None:
        if key not in self.pending:
            self.pending[key] = self.count
            self.count += 1

    def free(self, number: int) -> None:
        self.slots = max(self.slots, self.count - number)


def all_gather_slots(nodes: Sequence[PrefetchNode]) -> int:
    """Slots that one forward and one backward pass need, with the modules' prefetch lists."""
    return max(_forward(nodes), _backward(nodes))


def _forward(nodes: Sequence[PrefetchNode]) -> int:
    """The output of the last copy-out is parked until the next one (``comm_ctx.all_gather_state``)."""
    replay, parked = _Replay(), None
    for index, node in enumerate(nodes):
        for group in range(node.groups):
            replay.unshard((index, group))
            if parked is not None:
                replay.free(parked)
            parked = replay.pending.pop((index, group))
        for target in node.forward:
            if target > index:  # one that has run already is unsharded, or starts a new life in the backward pass
                for group in range(nodes[target].groups):
                    replay.unshard((target, group))
    if parked is not None:
        replay.free(parked)
    return replay.slots


def _backward(nodes: Sequence[PrefetchNode]) -> int:
    """Outputs are freed right after their copy-out; without a list the module before is prefetched."""
    replay = _Replay()
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        for group in reversed(range(node.groups)):
            replay.unshard((index, group))
            replay.free(replay.pending.pop((index, group)))
        for target in node.backward or ((index - 1,) if index else ()):
            if target < index:
                for group in reversed(range(nodes[target].groups)):
                    replay.unshard((target, group))
    return replay.slots
