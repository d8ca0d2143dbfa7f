"""Read Kineto chrome traces into the few rows the inspector needs.

Memory: device rows, collective and FSDP annotations stay as small structs; launches and operators stay as number
arrays; Python frames and flow arrows are dropped while decoding. Times are microseconds on the trace's own clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os import fsencode
from pathlib import Path
from sys import intern
from typing import Any

import msgspec

from fsdp_symm.trace import names
from fsdp_symm.trace.find import find_traces
from fsdp_symm.trace.model import CommMeta, DeviceRow, HostRow, Step, Trace
from fsdp_symm.trace.scan import Args, Blocks, EventScanner, Row, TraceError
from fsdp_symm.trace.values import count, number, text

Progress = Callable[[Path, int, int], None]  # file, bytes just read, bytes of the file

_FOREVER = float("inf")
_SLACK_US = 1e6  # rows this far outside the recorded window are not believable


def _small_list(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if len(memoryview(raw)) else None
    except msgspec.DecodeError:
        return None


def _dims(raw: msgspec.Raw) -> tuple[tuple[int, ...], ...]:
    found = _small_list(raw)
    if not isinstance(found, list):
        return ()
    shapes = [one[0] if isinstance(one, list) and one and isinstance(one[0], list) else one for one in found]
    lists = [one if isinstance(one, list) else [] for one in shapes]
    if any(isinstance(d, int) and d < 0 for one in lists for d in one):
        return ()  # damaged: what is no size makes the bytes unknown
    return tuple(tuple(d for d in one if isinstance(d, int)) for one in lists)


def _types(raw: msgspec.Raw) -> tuple[str, ...]:
    found = _small_list(raw)
    return tuple(str(one) for one in found) if isinstance(found, list) else ()


def _comm_meta(args: Args | None, with_shapes: bool) -> CommMeta | None:
    if args is None:
        return None
    group = text(args.group_name) or text(args.symm_group)
    size = count(args.group_size) or count(args.symm_group_size)
    splits = {text(args.in_split), text(args.out_split)} - {"", "[]"}
    return CommMeta(
        collective=text(args.collective),
        group=group,
        group_size=size,
        group_ranks=text(args.group_ranks),
        dtype=text(args.dtype),
        in_nelems=count(args.in_nelems),
        out_nelems=count(args.out_nelems),
        split=bool(splits),
        seq=count(args.seq),
        dims=_dims(args.input_dims) if with_shapes else (),
        types=_types(args.input_type) if with_shapes else (),
        module=text(args.symm_module),
        engine=text(args.symm_engine),
        bytes=count(args.bytes),
        op=text(args.symm_op),
    )


_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset", "Kernel": "kernel", "Memcpy": "copy"}
_LAUNCH = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime", "privateuse1_runtime"}
_HOST = {"cpu_op", "user_annotation", "Operator", "External"}
_KINETO = {*_DEVICE, *_LAUNCH, *_HOST, "gpu_memset", "gpu_user_annotation", "python_function"}


class Reader:
    """Turns rows into a ``Trace``; one instance per file."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace(fsencode(path).decode("utf-8", "backslashreplace"))  # names may be any bytes
        self._threads: dict[tuple[Any, Any], int] = {}
        self._bad_times = 0
        self._bad_bytes = 0
        self._bad_grids = 0
        self._bad_names = 0
        self._kineto_rows = 0
        self._devices: set[int] = set()

    def add(self, rows: list[Row]) -> None:
        """Sort one block of rows into the trace."""
        self.trace.num_rows += len(rows)
        for row in rows:
            cat = row.cat
            if row.ph != "X" or not isinstance(cat, str):
                continue
            if cat == "Trace":
                self._window(row)
                continue
            if cat not in _KINETO:
                continue
            self._kineto_rows += 1
            if cat != "python_function" and isinstance(row.name, str) and "\ufffd" in row.name:
                self._bad_names += 1  # what it was called can no longer be known, so neither can what it was
            if cat in _DEVICE:
                self._device(row, _DEVICE[cat])
            elif cat in _LAUNCH:
                self._launch(row)
            elif cat in _HOST:
                self._host(row)
            elif cat == "gpu_user_annotation":
                self._gpu_annotation(row)

    def _span(self, row: Row) -> tuple[float, float] | None:
        start, length = row.ts, row.dur
        if type(start) is float and type(length) is float and 0 <= start < _FOREVER and 0 <= length < _FOREVER:
            return start, start + length  # the common case, kept fast
        start, length = number(start), number(length)
        if start is None or length is None or length < 0 or start < 0:
            self._bad_times += 1
            return None
        return start, start + length

    def _window(self, row: Row) -> None:
        start, length = number(row.ts), number(row.dur)
        if start is not None and length is not None and length > 0:
            self.trace.window_us = (start, start + length)

    def _thread(self, row: Row) -> int:
        key = (row.pid, row.tid)
        try:
            found = self._threads.get(key)
        except TypeError:  # a list or an object where an id should be
            key = (0, 0)
            found = self._threads.get(key)
        if found is None:
            found = self._threads[key] = len(self._threads)
            self.trace.threads.append(f"{key[0]}/{key[1]}")
        return found

    def _device(self, row: Row, what: Any) -> None:
        span = self._span(row)
        args = row.args or Args()
        name = row.name if isinstance(row.name, str) else ""
        if span is None:
            return
        num_bytes = count(args.bytes)
        if what == "copy" and num_bytes is None:
            self._bad_bytes += 1
        grid = None
        if what == "kernel":
            grid = _grid(args.grid)
            self._bad_grids += grid is None and names.kernel_engine(name) is not None
            self._devices.add(count(args.device) or 0)
        stream = args.stream if args.stream is not None else row.tid
        meta = _comm_meta(args, with_shapes=False) if args.collective is not None else None
        device = count(args.device)
        self.trace.device_rows.append(
            DeviceRow(
                what,
                intern(name),
                device if device is not None else count(row.pid) or 0,
                intern(str(stream)),
                *span,
                count(args.correlation),
                count(args.external_id),
                count(args.graph_node) or 0,
                num_bytes,
                grid,
                meta,
            )
        )

    def _launch(self, row: Row) -> None:
        correlation = count(row.args.correlation) if row.args else None
        if correlation is None:
            return
        start = number(row.ts)
        if start is None or start < 0:
            self._bad_times += 1
            return
        launches = self.trace.launches
        launches.correlation.append(correlation)
        launches.thread.append(self._thread(row))
        launches.start_us.append(start)
        launches.name.append(intern(row.name) if isinstance(row.name, str) else "")

    def _host(self, row: Row) -> None:
        name = row.name
        if not isinstance(name, str):
            return
        if name.startswith("aten::"):
            self._operator(row, name)
        elif names.is_comm_row(name):
            self._keep(self.trace.comm_rows, row, name, _comm_meta(row.args, with_shapes=True))
        elif name.startswith("FSDP::"):
            self._keep(self.trace.fsdp_rows, row, name, None)
        elif name.startswith("ProfilerStep"):
            span = self._span(row)
            digits = re.search(r"(\d+)$", name)
            if span and digits:
                self.trace.steps.append(Step(int(digits[1]), *span))

    def _operator(self, row: Row, name: str) -> None:
        span = self._span(row)
        if span is None:
            return
        thread = self._thread(row)
        self.trace.operators.add(thread, *span)
        if name == "aten::copy_":
            self.trace.torch_copies.add(thread, *span)
        elif row.args is not None and names.is_gemm_row(name):
            meta = CommMeta(dims=_dims(row.args.input_dims))
            self.trace.gemm_rows.append(HostRow(intern(name), thread, *span, count(row.args.external_id), meta))

    def _keep(self, rows: list[HostRow], row: Row, name: str, meta: CommMeta | None) -> None:
        span = self._span(row)
        if span is not None:
            external_id = count(row.args.external_id) if row.args else None
            rows.append(HostRow(intern(name), self._thread(row), *span, external_id, meta))

    def _gpu_annotation(self, row: Row) -> None:
        if isinstance(row.name, str) and (names.is_comm_row(row.name) or row.name.startswith("FSDP::")):
            span = self._span(row)
            stream = count(row.tid)
            if span is not None and stream is not None:
                self.trace.gpu_annotations.append(HostRow(intern(row.name), stream, *span, None, None))

    def finish(self, scanner: EventScanner) -> Trace:
        """Read the metadata, count what was left out, and refuse files that hold nothing usable."""
        trace = self.trace
        _metadata(trace, scanner.metadata)
        if not self._kineto_rows:
            raise TraceError(_nothing_usable(trace, scanner))
        for problem in scanner.problems:
            trace.warnings.append(f"partial result: {problem}; {trace.num_rows} rows read before it")
        if scanner.unreadable:
            trace.warnings.append(f"partial result: {scanner.unreadable} unreadable rows left out")
        trace.complete = not (scanner.problems or scanner.unreadable or self._bad_times or self._bad_names)
        if scanner.replaced:
            trace.warnings.append(f"{scanner.replaced} rows held invalid UTF-8, NaN or Infinity; those values dropped")
        self._value_warnings()
        trace.steps.sort(key=lambda step: step.start_us)
        return trace

    def _value_warnings(self) -> None:
        trace = self.trace
        if self._bad_times:
            trace.warnings.append(
                f"partial result: {self._bad_times} rows left out: negative, missing or non-finite time"
            )
        if self._bad_names:
            trace.warnings.append(f"partial result: {self._bad_names} rows have names that are not UTF-8")
        if self._bad_bytes:
            trace.warnings.append(f"{self._bad_bytes} copies without a usable byte count: bytes may be too low")
        if self._bad_grids:
            trace.warnings.append(f"{self._bad_grids} communication kernels without a grid: SM-ms are too low")
        if len(self._devices) > 1:
            trace.warnings.append(f"kernels of {len(self._devices)} devices in one file: their times are merged")
        if trace.window_us is not None:
            low, high = trace.window_us[0] - _SLACK_US, trace.window_us[1] + _SLACK_US
            outside = sum(row.start_us < low or row.end_us > high for row in trace.device_rows)
            if outside:
                trace.warnings.append(f"{outside} device rows lie outside the recorded window: times are doubtful")


def _grid(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = [count(one) for one in value]
    return tuple(s for s in sizes if s is not None) if sizes and all(sizes) else None


def _nothing_usable(trace: Trace, scanner: EventScanner) -> str:
    if scanner.problems:
        return f"{trace.path}: {scanner.problems[0]} before any usable row; record or copy the trace again"
    if scanner.unreadable or trace.num_rows == 0:
        found = f"{scanner.unreadable} unreadable rows" if scanner.unreadable else "traceEvents is empty"
        return f"{trace.path}: {found}; expected rows of Kineto; record the trace again"
    return (
        f"{trace.path}: {trace.num_rows} rows but none of Kineto's categories (cpu_op, kernel, ...); "
        "expected a trace from torch.profiler"
    )


def _metadata(trace: Trace, metadata: dict[str, Any]) -> None:
    """Ranks, groups, device and versions; every field may be missing in old formats."""
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = count(info.get("rank"))
    if rank is not None:
        trace.rank, trace.rank_source = rank, "metadata"
    elif found := re.search(r"(?:rank|worker)[_-]?(\d+)", Path(trace.path).name):
        trace.rank, trace.rank_source = int(found[1]), "file name"
    trace.world_size = count(info.get("world_size"))
    trace.backend = text(info.get("backend"))
    trace.nccl_version = text(info.get("nccl_version"))
    trace.driver_version = count(metadata.get("cuda_driver_version"))
    configs = info.get("pg_config")
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and count(config.get("pg_size")):
            trace.groups[text(config.get("pg_name"))] = count(config.get("pg_size")) or 0
    devices = metadata.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        trace.device_name = text(devices[0].get("name"))
        trace.num_sms = count(devices[0].get("numSms"))


def load_trace(path: Path, progress: Progress | None = None) -> Trace:
    """Load one file.

    Args:
        path: a Kineto chrome trace, plain or gzip; the content decides, not the suffix.
        progress: called with (path, bytes just read, file size).

    Raises:
        TraceError: the file cannot be used at all; a damaged file that still holds rows is returned with
            ``complete=False`` and a warning instead.
    """
    try:
        size = path.stat().st_size
        blocks = Blocks(path, (lambda n: progress(path, n, size)) if progress else None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"{path}: {reason}; expected a readable trace file; check the path") from error
    try:
        scanner = EventScanner(blocks)
        reader = Reader(path)
        for rows in scanner:
            reader.add(rows)
        return reader.finish(scanner)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; expected a readable trace file") from error
    finally:
        blocks.close()


def _load_all(paths: dict[Path, bool], progress: Progress | None) -> list[Trace]:
    """Every usable trace; a file that only a search has found may be unusable, which the others then say."""
    traces: list[Trace] = []
    skipped: list[TraceError] = []
    for path, named in paths.items():
        try:
            traces.append(load_trace(path, progress))
        except TraceError as error:
            if named:
                raise
            skipped.append(error)
    if not traces:
        raise skipped[0]
    traces[0].warnings.extend(f"skipped: {error}" for error in skipped)
    return traces


def load(paths: Sequence[str | Path], progress: Progress | None = None) -> list[Trace]:
    """Load every trace that ``paths`` name, ordered by rank and then by name.

    Raises:
        TraceError: no path, nothing found, or a file named itself is unusable.
    """
    if not paths:
        raise TraceError("no path given; expected at least one trace; pass files, folders or globs")
    traces = _load_all(find_traces(paths), progress)
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank is not None and trace.rank in seen:
            trace.warnings.append(f"rank {trace.rank} is also in {seen[trace.rank]}: the files are shown apart")
        elif trace.rank is not None:
            seen[trace.rank] = trace.path
    return sorted(traces, key=lambda t: (t.rank if t.rank is not None else 1 << 30, t.path))
