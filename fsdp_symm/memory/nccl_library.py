"""The four calls of libnccl that torch does not expose, through ctypes: symmetric memory and its windows.

Signatures from nccl.h (2.27 to 2.32): ``ncclMemAlloc``, ``ncclMemFree``, ``ncclCommWindowRegister``,
``ncclCommWindowDeregister``. The library is the one that torch has loaded; a second copy would not know torch's
communicators.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from fsdp_symm.errors import SymmMemMemoryError, problem

WINDOW_COLLECTIVE_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


def loaded_libraries() -> list[str]:
    """Paths of the libnccl copies in this process, in load order (``/proc/self/maps``)."""
    paths: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libnccl.so" in path:
            paths[path] = None
    return list(paths)


class NcclLibrary:
    """Typed calls; every failure is an exception with NCCL's own text."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = (ctypes.c_void_p,)

    def _check(self, status: int, call: str) -> None:
        if status != 0:
            kind = self.library.ncclGetErrorString(status).decode()
            detail = self.library.ncclGetLastError(None).decode().strip()
            raise SymmMemMemoryError(
                problem(
                    f"{call} failed",
                    found=f"{kind}; {detail or 'no further detail'}",
                    expected="ncclSuccess",
                    fix="run again with NCCL_DEBUG=WARN for NCCL's own lines; fsdp-symm doctor lists what is missing",
                )
            )

    def mem_alloc(self, nbytes: int) -> int:
        """Device memory of the current device that can be registered symmetrically; returns its address."""
        pointer = ctypes.c_void_p()
        self._check(
            self.library.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), f"ncclMemAlloc({nbytes} bytes)"
        )
        return pointer.value or 0

    def mem_free(self, pointer: int) -> None:
        """Give memory of :meth:`mem_alloc` back."""
        self._check(self.library.ncclMemFree(ctypes.c_void_p(pointer)), "ncclMemFree")

    def window_register(self, communicator: int, pointer: int, nbytes: int) -> int | None:
        """Register memory with a communicator. Collective over its ranks, blocking.

        Returns:
            The window, or ``None`` where NCCL (2.29 and newer) succeeds without one because the communicator has no
            symmetric support.
        """
        window = ctypes.c_void_p()
        self._check(
            self.library.ncclCommWindowRegister(
                ctypes.c_void_p(communicator),
                ctypes.c_void_p(pointer),
                ctypes.c_size_t(nbytes),
                ctypes.byref(window),
                ctypes.c_int(WINDOW_COLLECTIVE_SYMMETRIC),
            ),
            f"ncclCommWindowRegister({nbytes} bytes)",
        )
        return window.value

    def peer_pointer(self, window: int, peer: int) -> int | None:
        """Where the window's memory of communicator rank ``peer`` lies in this process, ``None`` if out of reach.

        ``ncclGetPeerDevicePointer(window, offset, peer, &pointer)`` (nccl_device/core.h, 2.29 and newer).
        """
        pointer = ctypes.c_void_p()
        self._check(
            self.library.ncclGetPeerDevicePointer(
                ctypes.c_void_p(window), ctypes.c_size_t(0), ctypes.c_int(peer), ctypes.byref(pointer)
            ),
            f"ncclGetPeerDevicePointer(rank {peer})",
        )
        return pointer.value

    def window_deregister(self, communicator: int, window: int) -> None:
        """Undo :meth:`window_register`. Collective over the communicator's ranks."""
        self._check(
            self.library.ncclCommWindowDeregister(ctypes.c_void_p(communicator), ctypes.c_void_p(window)),
            "ncclCommWindowDeregister",
        )


def peer_addresses_known() -> bool:
    """Whether the loaded NCCL can say where a window lies on each peer."""
    return hasattr(nccl_library().library, "ncclGetPeerDevicePointer")


@functools.cache
def nccl_library() -> NcclLibrary:
    """The libnccl that torch uses.

    Raises:
        SymmMemMemoryError: none or several are loaded, or it is older than windows (NCCL 2.27).
    """
    paths = loaded_libraries()
    if len(paths) != 1:
        raise SymmMemMemoryError(
            problem(
                "NCCL symmetric memory: libnccl could not be identified",
                found=paths or "no libnccl in this process",
                expected="exactly one, the one that torch loaded",
                fix="use a CUDA build of torch with its own NCCL; remove LD_PRELOAD and other copies",
            )
        )
    library = ctypes.CDLL(paths[0])
    if not hasattr(library, "ncclCommWindowRegister"):
        raise SymmMemMemoryError(
            problem(
                "NCCL symmetric memory: this NCCL has no windows",
                found=paths[0],
                expected="NCCL 2.27 or newer",
                fix="install a torch build with a newer NCCL",
            )
        )
    return NcclLibrary(library)
