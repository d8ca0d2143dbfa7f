"""Who moves the bytes: one wire an arena, shared by all comms of that arena."""

from __future__ import annotations

import weakref

from fsdp_symm.memory.arena import SymmMemArena
from fsdp_symm.wire.host import HostWire

_wires: weakref.WeakKeyDictionary[SymmMemArena, HostWire] = weakref.WeakKeyDictionary()


def wire_of(arena: SymmMemArena) -> HostWire:
    """The wire of an arena; made on first use, on every rank alike."""
    if arena not in _wires:
        _wires[arena] = HostWire(arena.segment)
    return _wires[arena]
