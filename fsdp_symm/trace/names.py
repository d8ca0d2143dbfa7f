"""What the names in a trace mean: collective kinds, kernel families, copies, element sizes.

Nothing here looks at time or at other rows. The names come from NCCL's and RCCL's kernel lists, Kineto's string
tables and torch's operator names; `docs/inspect.md` lists them with the versions they were seen in.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

Engine = Literal[
    "copy_engine",
    "symmetric_kernel",
    "plain_kernel",
    "symm_mem_kernel",
    "ep_kernel",
    "mixed",
    "host",
    "none_seen",
]
CopyKind = Literal["local", "peer", "host"]

ENGINE_LABELS: dict[str, str] = {
    "copy_engine": "copy engine",
    "symmetric_kernel": "symmetric kernel",
    "plain_kernel": "plain kernel",
    "symm_mem_kernel": "symm_mem kernel",
    "ep_kernel": "EP kernel",
    "mixed": "mixed",
    "host": "host",
    "none_seen": "none seen",
}

# Order matters: the first word found names the kind ("reduce_scatter" holds both "reduce" and "scatter").
_KIND_WORDS: tuple[tuple[str, str], ...] = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("allreduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("sendrecv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
)
_POINT_TO_POINT = re.compile(r"^(?:batch)?(?:isend|irecv|send|recv|recvanysource)\b|^(?:send|recv)\d")

# Rows of these families can be a collective; the text after the prefix says which.
COMM_PREFIXES = ("fsdp_symm::", "nccl:", "c10d::", "gloo:", "symm_mem::", "_c10d_functional::", "rccl:", "mpi:", "ucc:")
RECORD_PARAM_COMMS = "record_param_comms"

_SYMMETRIC = re.compile(r"\bncclSymk?(?:Dev)?Kernel_")
_PLAIN = re.compile(r"\b(?:nccl(?:Dev)?Kernel|rccl\w*Kernel|msccl\w*Kernel|ncclKernel)_?|\brccl_main_kernel")
_TORCH_SYMM_MEM = re.compile(
    r"\b(?:multimem_(?:all_reduce|one_shot|all_gather|reduce|barrier)\w*"
    r"|(?:one|two)_shot_all_reduce\w*|(?:barrier|put_signal|wait_signal)_kernel"
    r"|multimem_barrier_kernel|all_to_all_v_2d\w*|nvshmem\w*_kernel"
    r"|allToAllV\w*|exchangeSplitAndOffset\w*)\b"
)
_EXPERT = re.compile(r"\b(?:deep_ep|nccl_ep|ncclEp\w*|internode(?:_ll)?|intranode)::\w*(?:dispatch|combine|notify)")
_COPY_KERNEL = re.compile(r"memcpy(?:\d+(?:_post)?|_post)$")
_GEMM_ROW = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_addmm_activation)$"
)
_GEMM_KERNEL = re.compile(
    r"(?<!fb)gemm|nvjet|cutlass|cublas|xmma|Cijk_|wgmma|_mm_kernel|ampere_|hopper_", re.IGNORECASE
)

# torch's ScalarType names as RECORD_PARAM_COMMS writes them, and the C++ names of "Input type" lists.
_ELEMENT_BYTES: dict[str, int] = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "short": 2, "half": 2, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
    "int": 4, "float": 4, "int32": 4, "uint32": 4, "float32": 4,
    "long": 8, "long int": 8, "double": 8, "int64": 8, "uint64": 8, "float64": 8, "complexfloat": 8,
    "complexdouble": 16,
}  # fmt: skip


@cache
def collective_kind(name: str) -> str | None:
    """Kind of the collective that ``name`` speaks of, or None for rows such as ``wait`` and ``init``.

    Args:
        name: an annotation, an operator, a "Collective name" argument or a kernel name.
    """
    short = name
    for prefix in COMM_PREFIXES:
        if short.startswith(prefix):
            short = short[len(prefix) :]
            break
    flat = short.lower().replace("_", "").replace(" ", "")
    for word, kind in _KIND_WORDS:
        if word in flat:
            return kind
    return "send_recv" if _POINT_TO_POINT.match(flat) else None


def is_comm_row(name: str) -> bool:
    """True for a CPU row that may be a collective: ``record_param_comms`` or a known prefix."""
    return name == RECORD_PARAM_COMMS or name.startswith(COMM_PREFIXES)


@cache
def kernel_engine(name: str) -> Engine | None:
    """Engine that a communication kernel stands for, or None when the kernel computes."""
    if _SYMMETRIC.search(name):
        return "symmetric_kernel"
    if _PLAIN.search(name):
        return "plain_kernel"
    if _EXPERT.search(name):
        return "ep_kernel"
    if _TORCH_SYMM_MEM.search(name):
        return "symm_mem_kernel"
    return None


@cache
def is_copy_kernel(name: str) -> bool:
    """True for the driver's own kernels that stand for small copies inside CUDA graphs (seen with driver 580)."""
    return _COPY_KERNEL.match(name) is not None


def is_sum_kernel(name: str) -> bool:
    """True for the kernel that sums the chunks which a reduce-scatter has pulled (``fsdp_symm.wire.device_sum``)."""
    return name == "_sum_kernel"


@cache
def only_synchronises(name: str) -> bool:
    """True for a torch symm_mem kernel that carries no payload: barriers and signals."""
    return kernel_engine(name) == "symm_mem_kernel" and re.search(r"barrier|_signal", name) is not None


@cache
def copy_kind(name: str) -> CopyKind:
    """Where a copy goes: inside one device's memory, between devices, or to or from the host.

    CUDA writes ``Memcpy DtoD (Device -> Device)``; roctracer writes ``CopyDeviceToDevice``.
    """
    flat = name.replace(" ", "").lower()
    if "ptop" in flat or "peertopeer" in flat:
        return "peer"
    if "dtod" in flat or "devicetodevice" in flat:
        return "local"
    return "host"


def is_gemm_row(name: str) -> bool:
    """True for an operator whose input shapes name the matrix product of the kernels it launches."""
    return _GEMM_ROW.match(name) is not None


@cache
def is_gemm_kernel(name: str) -> bool:
    """True for a kernel that multiplies matrices, by the names that the common libraries give them."""
    return _GEMM_KERNEL.search(name) is not None


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element, or None for a type that is not in torch's list."""
    key = dtype.strip().lower()
    for namespace in ("c10::", "at::"):
        key = key.removeprefix(namespace)
    return _ELEMENT_BYTES.get(key)


_GENERIC_NAMES = {"Kernel", "Kernel2", "kernel", "globalKernel", "enable_if", "device_kernel"}


@cache
def short_kernel(name: str) -> str:
    """A kernel's name without its arguments, return type and namespaces, at most 48 characters."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head, *inside = re.split(r"[(<]", text, maxsplit=2)
    short = head.rsplit("::", 1)[-1]
    if short in _GENERIC_NAMES and inside:  # "cutlass::Kernel<cutlass_80_...>": the argument is the name
        short = inside[0].split(",")[0].rsplit("::", 1)[-1].strip("> ")
    return short[:48] or name[:48]


_FSDP_MODULE = re.compile(r"^FSDP::[\w]+ \((?P<paren>.*)\)$|^FSDP::backward_prefetch for (?P<prefetch>.*)$")
_FSDP_ROOT = {"FSDP::all_gather", "FSDP::post_backward_reduce"}


@cache
def fsdp_module(name: str) -> str | None:
    """Module of an ``FSDP::`` annotation; ``(root)`` where FSDP2 writes none because its name is empty."""
    found = _FSDP_MODULE.match(name)
    if found:
        return found["paren"] or found["prefetch"] or "(root)"
    return "(root)" if name in _FSDP_ROOT else None


def bus_factor(kind: str, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, the convention of nccl-tests (doc/PERFORMANCE.md).

    Args:
        kind: what ``collective_kind`` returned.
        group_size: ranks W in the group.
    """
    if group_size < 1:
        return 0.0
    share = (group_size - 1) / group_size
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "dispatch", "combine"):
        return share
    return 2.0 * share if kind == "all_reduce" else 1.0
