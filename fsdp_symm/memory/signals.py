"""Words in shared memory that ranks wait on: a futex where the kernel sleeps, and a fence where the CPU needs one.

A word only ever grows (modulo 2**32), so a waiter asks for "at least" and a late waiter never misses a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_WAKE_ALL = 2**31 - 1
# linux/arch/*/include: the futex system call's number.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = ctypes.c_long(_SYS_FUTEX.get(platform.machine(), -1))
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def unsupported_reason() -> str | None:
    """Why this machine cannot run the host backend, or ``None`` when it can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux futexes, and this is {sys.platform}"
    if platform.machine() not in _SYS_FUTEX:
        return f"the futex call of {platform.machine()} is not known to it"
    return None


def _futex(address: int, operation: int, value: int, timeout_s: float | None = None) -> None:
    spec = None
    if timeout_s is not None:
        spec = ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
    result = _libc.syscall(
        _NUMBER,
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        spec,
        None,
        ctypes.c_int(0),
    )
    # A wait may end because the word changed already (EAGAIN), a signal came (EINTR) or the time is over.
    if result < 0 and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(code, f"futex: {os.strerror(code)}")


_ORDERED = platform.machine() == "x86_64"
_private = ctypes.c_uint32(0)


def _fence() -> None:
    """Order data before the flag that announces it (writer) and after it (reader).

    x86-64 keeps stores in order and loads in order, so nothing is needed. Elsewhere the kernel's futex wake runs a
    full barrier before it looks for waiters (kernel/futex: ``futex_hb_waiters_pending``), which serves as one.
    """
    if not _ORDERED:
        _futex(ctypes.addressof(_private), _FUTEX_WAKE, 1)


class Word:
    """A 32-bit counter at a fixed place of a shared mapping."""

    __slots__ = ("_address", "_cell")

    def __init__(self, mapping: object, offset: int) -> None:
        self._cell = ctypes.c_uint32.from_buffer(mapping, offset)  # type: ignore[arg-type]
        self._address = ctypes.addressof(self._cell)

    def reached(self, target: int) -> bool:
        """Whether the counter is at ``target`` or past it, also across the wrap at 2**32."""
        if (self._cell.value - target) & 0xFFFFFFFF < 0x80000000:
            _fence()
            return True
        return False

    def publish(self, value: int) -> None:
        """Set the counter and wake every waiter. Only the rank that owns the word may call this."""
        _fence()
        self._cell.value = value & 0xFFFFFFFF
        _futex(self._address, _FUTEX_WAKE, _WAKE_ALL)

    def note(self, value: int) -> None:
        """Set the counter for whoever looks at it; nobody is woken. Only the rank that owns the word may call this."""
        self._cell.value = value & 0xFFFFFFFF

    def wake(self) -> None:
        """Wake waiters without a change, so that they look at the failure flag."""
        _futex(self._address, _FUTEX_WAKE, _WAKE_ALL)

    def sleep_until_change(self, target: int, timeout_s: float) -> None:
        """Sleep in the kernel until the word may have reached ``target``; returns early at will."""
        value = self._cell.value
        if (value - target) & 0xFFFFFFFF >= 0x80000000:
            _futex(self._address, _FUTEX_WAIT, value, timeout_s)
