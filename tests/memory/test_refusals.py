"""What stands in the way of symmetric memory on GPUs, in words; libraries are played here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_symm import compat_symm
from fsdp_symm.errors import SymmMemMemoryError, SymmMemUnavailableError
from fsdp_symm.memory import cuda_driver, nccl_library
from fsdp_symm.wire.copy_engine import CopyEngineWire

CUDA = torch.device("cuda", 0)


def test_another_users_backend_is_named(monkeypatch: Any) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("set_backend: an allocation exists\nC++ stack")

    monkeypatch.setattr(compat_symm, "symm_backend", lambda device: "NVSHMEM")
    monkeypatch.setattr(compat_symm._symm, "set_backend", refuse)
    compat_symm.choose_symm_backend("NVSHMEM", CUDA)  # chosen already: nothing to do
    with pytest.raises(SymmMemUnavailableError) as caught:
        compat_symm.choose_symm_backend("CUDA", CUDA)
    text = str(caught.value)
    assert "the backend 'CUDA' could not be chosen" in text
    assert "found: 'NVSHMEM' is in use in this process (set_backend: an allocation exists)\n" in text
    assert "fix: backend='nccl' of this package works beside any choice" in text


def test_an_old_driver_is_told_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(SymmMemUnavailableError, match=r"too old(.|\n)*no cuStreamBatchMemOp_v2(.|\n)*driver 525"):
        cuda_driver.cuda_driver.__wrapped__()


@pytest.mark.parametrize(("paths", "found"), [([], "no libnccl in this process"), (["/a.so", "/b.so"], "/a.so")])
def test_libnccl_must_be_one(monkeypatch: Any, paths: list[str], found: str) -> None:
    monkeypatch.setattr(nccl_library, "loaded_libraries", lambda: paths)
    with pytest.raises(SymmMemMemoryError, match=rf"could not be identified(.|\n)*{found}(.|\n)*fix: use a CUDA build"):
        nccl_library.nccl_library.__wrapped__()


def test_an_nccl_without_windows_is_told_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(nccl_library, "loaded_libraries", lambda: ["/old/libnccl.so.2"])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(SymmMemMemoryError, match=r"has no windows(.|\n)*/old/libnccl.so.2(.|\n)*NCCL 2.27 or newer"):
        nccl_library.nccl_library.__wrapped__()


@pytest.mark.parametrize(("flags", "peers"), [(None, (1, 2)), (object(), None)])
def test_memory_out_of_reach_has_no_wire(flags: Any, peers: Any) -> None:
    segment: Any = SimpleNamespace(flags=flags, peers=peers, ranks=(0, 1))
    with pytest.raises(
        SymmMemUnavailableError, match=r"memory of ranks \[0, 1\] cannot be addressed(.|\n)*fix: use all_"
    ):
        CopyEngineWire(segment)
