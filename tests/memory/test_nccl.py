"""What NCCL's answers become, with a library that is played here: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import compat_nccl
from fsdp_symm.errors import SymmMemUnavailableError
from fsdp_symm.memory.nccl import NcclSegment


class Library:
    """Gives memory, and no window."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def window_register(self, communicator: int, pointer: int, nbytes: int) -> None:
        return None

    def mem_free(self, pointer: int) -> None:
        self.freed.append(pointer)


def test_no_window_is_an_error_that_names_what_nccl_wants(monkeypatch: Any) -> None:
    """From 2.29 on ncclCommWindowRegister succeeds with a NULL window (src/dev_runtime.cc:1342-1344)."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(compat_nccl, "comm_pointer", lambda group, device: 7)
    segment: Any = object.__new__(NcclSegment)
    segment.ranks, segment.nbytes, segment.device = (0, 1), 4096, torch.device("cpu")
    segment._group, segment._library, segment._memory = None, Library(), 42
    segment._tell = lambda error: None
    with pytest.raises(SymmMemUnavailableError) as caught:
        segment._register()
    text = str(caught.value)
    assert "NCCL gave no window to the group of ranks [0, 1]" in text
    assert "found: ncclCommWindowRegister succeeded with a NULL window" in text
    assert "NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE not 0" in text
    assert "fix: run fsdp-symm doctor under torchrun" in text
    assert segment._library.freed == [42], "what has no window is given back"
