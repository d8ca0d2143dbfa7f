"""What the reader keeps of a trace. Times are microseconds on the trace's own clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class CommMeta:
    """What a row says about its collective; absent facts are None or empty."""

    collective: str = ""
    group: str = ""
    group_size: int | None = None
    group_ranks: str = ""  # as written, for instance "[0, 1]"
    dtype: str = ""
    in_nelems: int | None = None
    out_nelems: int | None = None
    split: bool = False  # split lists: an uneven all-to-all
    seq: int | None = None
    dims: tuple[tuple[int, ...], ...] = ()  # shapes of the tensor arguments, for traces without metadata
    types: tuple[str, ...] = ()
    module: str = ""  # the four below come from this package's own annotations
    engine: str = ""
    bytes: int | None = None
    op: str = ""


class DeviceRow(msgspec.Struct, gc=False):
    """One kernel, copy or memset on the device."""

    what: Literal["kernel", "copy", "memset"]
    name: str
    device: int
    stream: str
    start_us: float
    end_us: float
    correlation: int | None
    external_id: int | None
    graph_node: int
    bytes: int | None
    grid: tuple[int, ...] | None
    meta: CommMeta | None


class HostRow(msgspec.Struct, gc=False):
    """One CPU row that gives device rows a meaning."""

    name: str
    thread: int
    start_us: float
    end_us: float
    external_id: int | None
    meta: CommMeta | None


@dataclass(frozen=True, slots=True)
class Step:
    """One ``ProfilerStep#N`` span on the CPU."""

    number: int
    start_us: float
    end_us: float


@dataclass(slots=True)
class Launches:
    """Runtime and driver calls: parallel arrays, found by correlation."""

    correlation: array[int] = field(default_factory=lambda: array("q"))
    thread: array[int] = field(default_factory=lambda: array("l"))
    start_us: array[float] = field(default_factory=lambda: array("d"))
    name: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Spans:
    """Operator spans by thread index: parallel arrays."""

    thread: array[int] = field(default_factory=lambda: array("l"))
    start_us: array[float] = field(default_factory=lambda: array("d"))
    end_us: array[float] = field(default_factory=lambda: array("d"))

    def add(self, thread: int, start_us: float, end_us: float) -> None:
        """Append one span."""
        self.thread.append(thread)
        self.start_us.append(start_us)
        self.end_us.append(end_us)


@dataclass(slots=True)
class Trace:
    """One file's rows and what is wrong with them."""

    path: str
    rank: int | None = None
    rank_source: str = "none"  # "metadata", "file name" or "none"
    world_size: int | None = None
    backend: str = ""
    nccl_version: str = ""
    driver_version: int | None = None  # CUDA's integer: 12040 is 12.4
    device_name: str = ""
    num_sms: int | None = None
    groups: dict[str, int] = field(default_factory=dict)  # process group name -> number of ranks
    device_rows: list[DeviceRow] = field(default_factory=list)
    comm_rows: list[HostRow] = field(default_factory=list)
    fsdp_rows: list[HostRow] = field(default_factory=list)
    gemm_rows: list[HostRow] = field(default_factory=list)
    gpu_annotations: list[HostRow] = field(default_factory=list)  # thread is the stream there
    steps: list[Step] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches)
    torch_copies: Spans = field(default_factory=Spans)  # aten::copy_: a copy that torch, not NCCL, asked for
    operators: Spans = field(default_factory=Spans)  # aten::*: what a CPU trace computes
    threads: list[str] = field(default_factory=list)
    window_us: tuple[float, float] | None = None  # recorded span, where the trace says it
    num_rows: int = 0
    complete: bool = True  # False when rows are known to be missing
    warnings: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """``rank N`` or the file's name."""
        return Path(self.path).name if self.rank is None else f"rank {self.rank}"
