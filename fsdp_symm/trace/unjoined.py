"""Communication rows that no CPU annotation explains: judged by name, marked ``guess``.

They come from CUDA-graph replays (one launch for many rows), from launches before the recorded window, from traces
without CPU rows, and from torch symm_mem kernels of versions that emit no annotation.
"""

from __future__ import annotations

from collections import defaultdict

from fsdp_symm.trace import names
from fsdp_symm.trace.calls import Draft
from fsdp_symm.trace.forest import Forest
from fsdp_symm.trace.model import DeviceRow, Trace

_FLAG_BYTES = 4


def _launches(trace: Trace) -> dict[int, int]:
    return {c: i for i, c in enumerate(trace.launches.correlation)}


def _kernel_draft(trace: Trace, row: DeviceRow, launches: dict[int, int], annotations: Forest) -> Draft:
    """One call for one kernel; its own metadata, then a GPU annotation on its stream, then its name."""
    launch = launches.get(row.correlation) if row.correlation is not None else None
    said = names.collective_kind(row.meta.collective) if row.meta else None
    graph = row.graph_node != 0 or (launch is not None and "GraphLaunch" in trace.launches.name[launch])
    draft = Draft(None, (), said or names.collective_kind(names.short_kernel(row.name)) or "unknown")
    draft.kernels.append(row)
    draft.meta = row.meta
    draft.guess = said is None
    if launch is not None and not graph:
        draft.launch = (trace.launches.thread[launch], trace.launches.start_us[launch])
    if said is None:
        i = annotations.innermost(int(row.stream), row.start_us + 0.5) if row.stream.isdecimal() else None
        for j in annotations.ancestors(i) if i is not None else ():
            kind = names.collective_kind(annotations.rows[j].name)
            if kind is not None:
                draft.kind = kind
                draft.notes.append(f"named by the GPU annotation {annotations.rows[j].name}")
                break
    if graph:
        draft.notes.append("CUDA-graph replay: no CPU row names it")
    elif launch is None and said is None:
        draft.notes.append("launched before the recorded window, or the trace has no CPU rows")
    return draft


def _peer_drafts(trace: Trace, copies: list[DeviceRow], launches: dict[int, int]) -> list[Draft]:
    """Peer copies outside every collective: one call for each batch, or for each payload run of a graph replay."""
    batches: dict[tuple[int | None, str], list[DeviceRow]] = defaultdict(list)
    for row in copies:
        batches[row.correlation, row.stream].append(row)
    drafts = []
    for (correlation, _), rows in batches.items():
        launch = launches.get(correlation) if correlation is not None else None
        graph = any(r.graph_node for r in rows) or (launch is not None and "GraphLaunch" in trace.launches.name[launch])
        rows.sort(key=lambda r: r.start_us)
        for flags, payload in _runs(rows) if graph else [_split(rows)]:
            draft = Draft(None, (), "peer_copy", copies=payload, flags=flags, guess=graph)
            if graph:
                draft.notes.append("CUDA-graph replay: no CPU row names it")
            elif launch is not None:
                draft.launch = (trace.launches.thread[launch], trace.launches.start_us[launch])
            drafts.append(draft)
    return drafts


def _split(rows: list[DeviceRow]) -> tuple[list[DeviceRow], list[DeviceRow]]:
    flags = [r for r in rows if r.bytes == _FLAG_BYTES]
    return flags, [r for r in rows if r.bytes != _FLAG_BYTES]


def _runs(rows: list[DeviceRow]) -> list[tuple[list[DeviceRow], list[DeviceRow]]]:
    """(flags, payload) per run of payload copies; flags between two runs are shared out half and half."""
    runs: list[tuple[list[DeviceRow], list[DeviceRow]]] = []
    flags: list[DeviceRow] = []
    for row in rows:
        if row.bytes == _FLAG_BYTES:
            flags.append(row)
            continue
        if flags or not runs:
            leaving = len(flags) // 2 if runs else 0
            if runs:
                runs[-1][0].extend(flags[:leaving])
            runs.append((flags[leaving:], []))
            flags = []
        runs[-1][1].append(row)
    if runs:
        runs[-1][0].extend(flags)
    elif flags:
        runs.append((flags, []))
    return runs


def unjoined_drafts(trace: Trace, kernels: list[DeviceRow], copies: list[DeviceRow]) -> list[Draft]:
    """Drafts for communication kernels and peer copies that no annotation explains."""
    launches = _launches(trace) if kernels or copies else {}
    annotations = Forest(trace.gpu_annotations)
    drafts = [_kernel_draft(trace, row, launches, annotations) for row in kernels]
    return drafts + _peer_drafts(trace, copies, launches)
