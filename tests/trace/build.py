"""Write small Kineto traces by hand: only what a test needs, in the shape that the profiler gives it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MB = 1 << 20
PLAIN = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FIXTURES = Path(__file__).parent / "fixtures"


class Builder:
    """Collects rows; every device row gets its launch at ``launch_us`` on thread 1."""

    def __init__(self, rank: int = 0, world: int = 8, **metadata: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "nccl_version": "2.30.7"},
            **metadata,
        }
        self._correlation = 100

    def row(self, cat: str, name: str, start: float, dur: float, tid: Any = 1, pid: Any = 7, **args: Any) -> Builder:
        """One complete row; underscores in argument names become spaces."""
        named = {key.replace("__", " "): value for key, value in args.items()}
        self.rows.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur, "args": named}
        )
        return self

    def step(self, number: int, start: float, dur: float) -> Builder:
        """A ProfilerStep."""
        return self.row("user_annotation", f"ProfilerStep#{number}", start, dur)

    def collective(self, name: str, start: float, dur: float, nelems: tuple[int, int], size: int = 8, **more: Any):
        """``record_param_comms`` with its ``nccl:`` row inside."""
        args = {
            "Collective name": name, "In msg nelems": nelems[0], "Out msg nelems": nelems[1], "dtype": "BFloat16",
            "Group size": size, "Process Group Name": "0", "Process Group Ranks": str(list(range(size))), **more,
        }  # fmt: skip
        self.rows.append(
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 7, "tid": 1, "ts": start, "dur": dur,
             "args": args}
        )  # fmt: skip
        return self.row("user_annotation", f"nccl:{name.removeprefix('_')}", start + 1, dur - 2)

    def kernel(
        self, name: str, start: float, dur: float, launch_us: float | None, stream: int = 7,
        grid: tuple[int, int, int] = (8, 1, 1), launch: str = "cudaLaunchKernelExC", correlation: int | None = None,
        **args: Any,
    ) -> Builder:  # fmt: skip
        """A kernel and, unless ``launch_us`` is None, its launch."""
        ids = self._launch(launch, launch_us, correlation)
        return self.row("kernel", name, start, dur, tid=stream, pid=0, device=0, stream=stream, grid=list(grid),
                        correlation=ids, **args)  # fmt: skip

    def copy(
        self, kind: str, num_bytes: int, start: float, dur: float, launch_us: float | None, stream: int = 21,
        launch: str = "cudaMemcpyBatchAsync", correlation: int | None = None, **args: Any,
    ) -> Builder:  # fmt: skip
        """A copy ("PtoP", "DtoD", "HtoD" or a whole name) and its launch."""
        ids = self._launch(launch, launch_us, correlation)
        name = f"Memcpy {kind} (Device -> Device)" if kind in ("PtoP", "DtoD", "HtoD") else kind
        return self.row("gpu_memcpy", name, start, dur, tid=stream, pid=0, stream=stream, bytes=num_bytes,
                        correlation=ids, **args)  # fmt: skip

    def _launch(self, name: str, launch_us: float | None, correlation: int | None) -> int:
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
            if launch_us is not None:
                self.row("cuda_runtime", name, launch_us, 1.0, correlation=correlation)
        return correlation

    def text(self) -> str:
        """The trace as JSON text."""
        return json.dumps({**self.metadata, "traceEvents": self.rows})

    def write(self, path: Path) -> Path:
        """Write the file; ``.gz`` compresses."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def host_wire(engine: str = "host") -> Builder:
    """A CPU trace as this package's wires write it: one ``fsdp_symm::`` row for each collective."""
    b = Builder(world=2, deviceProperties=[])
    b.metadata["distributedInfo"] = {"backend": "gloo", "rank": 0, "world_size": 2}
    b.step(3, 0, 1000)
    for i, module in enumerate(("layers.0", "layers.1")):
        b.row("cpu_op", "fsdp_symm::all_gather", 100 + 200 * i, 50, module=module, bytes=4 * MB, engine=engine,
              group="0", group_size=2, op="")  # fmt: skip
        b.row("cpu_op", "aten::mm", 160 + 200 * i, 100)
    b.row("cpu_op", "fsdp_symm::reduce_scatter", 600, 80, module="layers.1", bytes=8 * MB, engine=engine, group="0",
          group_size=2, op="avg")  # fmt: skip
    return b


def copy_engine_gather(b: Builder, at: float, ranks: int = 8, payload: int = MB, kind: str = "PtoP") -> Builder:
    """One NCCL copy-engine all-gather: entry flags, one batch of payload copies, exit flags."""
    b.collective("_allgather_base", at, 40, (payload // 2, payload // 2 * ranks), ranks)
    for flag in range(ranks - 1):
        b.copy(kind, 4, at + 50 + flag, 0.5, at + 5, launch="cudaMemcpyAsync")
    batch = b._launch("cudaMemcpyBatchAsync", at + 10, None)
    for peer in range(ranks - 1):
        b.copy(kind, payload, at + 100 + peer, 20, None, correlation=batch)
    for flag in range(ranks - 1):
        b.copy(kind, 4, at + 140 + flag, 0.5, at + 15, launch="cudaMemcpyAsync")
    return b


def only(report: dict[str, Any]) -> dict[str, Any]:
    """The one call of a report that holds one."""
    (call,) = report["ranks"][0]["calls"]
    return call
