"""The few calls of the CUDA driver that move bytes and flags without an SM, through ctypes.

``cuda.bindings`` offers them too, but turns Python lists into C arrays on every call; a training step calls these
dozens of times with the same arrays, so the arrays are made once and kept. All of them can be captured.

Signatures from cuda.h: ``cuMemcpyBatchAsync`` (12.8; from 13.0 on ``_v2`` without the failing index),
``cuMemcpyDtoDAsync_v2``, ``cuMemcpy2DAsync_v2``, ``cuStreamBatchMemOp_v2`` (12.0), and stream capture into graphs. A
copy costs the host 2 microseconds, 4 to 7 where ranks share a GPU under MPS; the launch of a graph of nine copies costs
it 18 (measured on H200s, driver 580).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fsdp_symm.errors import SymmMemMemoryError, SymmMemUnavailableError, problem

_WAIT_VALUE_32, _WRITE_VALUE_32, _WRITE_VALUE_64 = 1, 2, 5  # CUstreamBatchMemOpType
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads go on as they like
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread goes on as it likes
_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_MEMORYTYPE_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_ORDER_STREAM, _OVERLAP_WITH_COMPUTE = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_...

# CUstreamBatchMemOpParams is a union of 48 bytes; wait and write have the same fields at the same places.
_MEM_OP = np.dtype(
    {
        "names": ["operation", "address", "value", "flags"],
        "formats": [np.uint32, np.uint64, np.uint64, np.uint32],
        "offsets": [0, 8, 16, 24],
        "itemsize": 48,
    }
)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):  # CUmemcpyAttributes
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Copy2D(ctypes.Structure):  # CUDA_MEMCPY2D
    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class MemOps:
    """Waits and writes of words for one call of ``cuStreamBatchMemOp``, in this order.

    Args:
        waits: (address of a 32-bit word, number to wait for: the word is at least that).
        writes: (address of a 32-bit word, number to write).
        pointer: address of a 64-bit word that :meth:`set_pointer` gives a value.
    """

    def __init__(
        self,
        *,
        waits: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
        pointer: int | None = None,
    ) -> None:
        pointers = [] if pointer is None else [(pointer, 0)]
        kinds = [_WAIT_VALUE_32] * len(waits) + [_WRITE_VALUE_32] * len(writes) + [_WRITE_VALUE_64] * len(pointers)
        words = [*waits, *writes, *pointers]
        self._ops = np.zeros(len(kinds), _MEM_OP)
        self._ops["operation"] = kinds
        self._ops["address"] = np.array([address for address, _ in words], np.uint64)
        self._ops["value"] = np.array([number for _, number in words], np.uint64)
        self._ops["flags"] = _WAIT_GEQ
        self.count = len(self._ops)
        self.address = ctypes.c_void_p(self._ops.ctypes.data)

    def set_pointer(self, pointer: int) -> None:
        """The value of the 64-bit word, which is the last operation."""
        self._ops["value"][-1] = pointer


FlatCopy = tuple[int, int, int]
"""Target address, source address, bytes."""

PitchedCopy = tuple[int, int, int, int, int, int]
"""Target address, source address, bytes of a row, rows, pitch in the target, pitch in the source."""


class Copies:
    """Device-to-device copies as C arrays, for one call of ``cuMemcpyBatchAsync``.

    Args:
        flat, pitched: blocks of bytes, and blocks of rows.
    """

    def __init__(self, flat: Sequence[FlatCopy], pitched: Sequence[PitchedCopy] = ()) -> None:
        self.count = len(flat)
        columns = list(zip(*flat, strict=True)) or [(), (), ()]
        self._arrays = [np.array(column, np.uint64) for column in columns]
        self.targets, self.sources, self.sizes = (ctypes.c_void_p(a.ctypes.data) for a in self._arrays)
        self.flat = tuple(flat)
        self.pitched = [
            _Copy2D(
                source_type=_MEMORYTYPE_DEVICE,
                target_type=_MEMORYTYPE_DEVICE,
                source=source,
                source_pitch=source_pitch,
                target=target,
                target_pitch=target_pitch,
                width=width,
                height=rows,
            )
            for target, source, width, rows, target_pitch, source_pitch in pitched
        ]


class CudaDriver:
    """Typed calls; every failure is an exception with the driver's own text."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._mem_op = library.cuStreamBatchMemOp_v2
        self._batch = getattr(library, "cuMemcpyBatchAsync_v2", None)
        self._batch_v1 = None if self._batch else getattr(library, "cuMemcpyBatchAsync", None)
        self._attributes = _CopyAttributes(source_order=_ORDER_STREAM, flags=_OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t()
        self._launch = _runtime_launch() or library.cuGraphLaunch
        self._attribute_args = (ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1))

    def _check(self, status: int, call: str) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise SymmMemMemoryError(
                problem(
                    f"{call} failed",
                    found=f"CUDA error {status}: {(text.value or b'unknown').decode()}",
                    expected="CUDA_SUCCESS",
                    fix="run with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel failed",
                )
            )

    def mem_ops(self, ops: MemOps, stream: int) -> None:
        """Enqueue waits and writes; nothing for an empty list."""
        if ops.count:
            self._check(
                self._mem_op(ctypes.c_void_p(stream), ctypes.c_uint(ops.count), ops.address, ctypes.c_uint(0)),
                "cuStreamBatchMemOp",
            )

    def copy(self, copies: Copies, stream: int, *, capturing: bool = False) -> None:
        """Enqueue copies. Within a call they run in any order; before and after it the stream's order holds.

        Args:
            stream: handle of a stream that is not the legacy default stream, which takes no batches.
            capturing: the stream is being captured, which takes no batches either.
        """
        handle = ctypes.c_void_p(stream)
        if copies.count > 1 and self._batch is not None and not capturing:
            status = self._batch(
                copies.targets, copies.sources, copies.sizes, ctypes.c_size_t(copies.count),
                *self._attribute_args, handle,
            )  # fmt: skip
            self._check(status, "cuMemcpyBatchAsync")
        elif copies.count > 1 and self._batch_v1 is not None and not capturing:
            status = self._batch_v1(
                copies.targets, copies.sources, copies.sizes, ctypes.c_size_t(copies.count),
                *self._attribute_args, ctypes.byref(self._failed), handle,
            )  # fmt: skip
            self._check(status, "cuMemcpyBatchAsync")
        else:
            for target, source, nbytes in copies.flat:
                status = self._library.cuMemcpyDtoDAsync_v2(
                    ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), handle
                )
                self._check(status, "cuMemcpyDtoDAsync")
        for block in copies.pitched:
            self._check(self._library.cuMemcpy2DAsync_v2(ctypes.byref(block), handle), "cuMemcpy2DAsync")

    # --- graphs ---

    def capture(self, stream: int, enqueue: Callable[[], None]) -> int:
        """What ``enqueue`` puts on ``stream``, and on streams forked from it, as a graph to be launched many times.

        Args:
            stream: handle of a stream that nothing else uses meanwhile.
            enqueue: enqueues; nothing of it runs now.
        """
        handle, graph, executable = ctypes.c_void_p(stream), ctypes.c_void_p(), ctypes.c_void_p()
        self._check(
            self._library.cuStreamBeginCapture_v2(handle, ctypes.c_int(_CAPTURE_THREAD_LOCAL)), "cuStreamBeginCapture"
        )
        try:
            enqueue()
        finally:
            status = self._library.cuStreamEndCapture(handle, ctypes.byref(graph))
        self._check(status, "cuStreamEndCapture")
        try:
            status = self._library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
            self._check(status, "cuGraphInstantiate")
        finally:
            self._library.cuGraphDestroy(graph)
        return executable.value or 0

    def stay_out_of_captures(self) -> None:
        """Let this thread query events and copy while another one captures, which would otherwise break the capture."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._check(self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStream...")

    def launch(self, graph: int, stream: int) -> None:
        """Enqueue a graph of :meth:`capture`."""
        self._check(self._launch(ctypes.c_void_p(graph), ctypes.c_void_p(stream)), "cuGraphLaunch")

    def forget(self, graph: int) -> None:
        """Free a graph that is not running."""
        self._check(self._library.cuGraphExecDestroy(ctypes.c_void_p(graph)), "cuGraphExecDestroy")


def _runtime_launch() -> Callable[..., int] | None:
    """The CUDA runtime's ``cudaGraphLaunch``, which takes the driver's handles; ``None`` where torch has brought none.

    Kineto records the runtime's launches and not the driver's: with it, a trace says which call the copies belong to.
    """
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}").cudaGraphLaunch
    except (OSError, AttributeError):
        return None


@functools.cache
def cuda_driver() -> CudaDriver:
    """The driver of this machine.

    Raises:
        SymmMemUnavailableError: there is none, or one without stream memory operations (older than CUDA 12.0).
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SymmMemUnavailableError(
            problem(
                "copy engine: the CUDA driver could not be loaded",
                found=str(error),
                expected="libcuda.so.1",
                fix="install the NVIDIA driver, or use backend='host' for CPU tensors",
            )
        ) from error
    if not hasattr(library, "cuStreamBatchMemOp_v2"):
        raise SymmMemUnavailableError(
            problem(
                "copy engine: the CUDA driver is too old",
                found="no cuStreamBatchMemOp_v2",
                expected="a driver for CUDA 12.0 or newer",
                fix="install driver 525 or newer",
            )
        )
    return CudaDriver(library)
