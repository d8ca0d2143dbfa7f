"""What can be said about the machine without communicating."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys

import torch

import fsdp_symm
from fsdp_symm.doctor.report import BackendRow, DoctorReport, FindingRow, Gpu, NvLink, Shm, Versions
from fsdp_symm.guards import GroupFacts, findings, first_line, local_facts
from fsdp_symm.memory.shared_file import another_place, shm_dir, unnamed_file
from fsdp_symm.nvlink import active_nvlinks
from fsdp_symm.verdict import PEER_MEMORY_BLOCKS

_TOOL_TIMEOUT_S = 20.0
_NO_GPU = "no CUDA device (torch.cuda.is_available() is False)"


def examine() -> DoctorReport:
    """Everything but the groups."""
    cuda = torch.cuda.is_available()
    facts = local_facts(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    shm = shm_state()
    return DoctorReport(
        versions=_versions(facts),
        gpus=_gpus() if cuda else [],
        peer_access=_peer_access() if cuda else [],
        nvlink=nvlink() if cuda else NvLink(),
        environment=dict(facts.environment),
        nccl_libraries=list(facts.nccl_libraries),
        shm=shm,
        backends=[
            host_backend(shm),
            nccl_backend(facts, has_gpu=cuda),
            peer_memory_backend(facts, has_gpu=cuda),
        ],
        findings=settings(facts) if cuda else [],
    )


def settings(facts: GroupFacts) -> list[FindingRow]:
    """What the guards warn about; nothing of it keeps a backend from running."""
    return [FindingRow(f.code, f.severity, f.text) for f in findings(facts) if f.severity == "warns"]


def _versions(facts: GroupFacts) -> Versions:
    def dotted(version: tuple[int, ...] | None) -> str | None:
        return None if version is None else ".".join(map(str, version))

    return Versions(
        python=platform.python_version(),
        fsdp_symm=fsdp_symm.__version__,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl_built=dotted(facts.nccl_built),
        nccl_loaded=dotted(facts.nccl_version),
        driver_api=dotted(facts.driver_version),
    )


def _gpus() -> list[Gpu]:
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            Gpu(
                index=index,
                name=properties.name,
                uuid=str(getattr(properties, "uuid", "")),  # in torch since 2.4, missing from the stubs
                capability=f"{properties.major}.{properties.minor}",
                memory_bytes=properties.total_memory,
                num_sms=properties.multi_processor_count,
            )
        )
    return rows


def _peer_access() -> list[list[bool]]:
    count = range(torch.cuda.device_count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count]


def shm_state() -> Shm:
    """Size and free bytes of the host backend's folder, and whether a file can be made there as segments are."""
    path = shm_dir()
    try:
        usage = shutil.disk_usage(path)
        os.close(unnamed_file(path))
    except OSError as error:
        return Shm(path, None, None, error.strerror or str(error))
    return Shm(path, usage.total, usage.free)


def host_backend(shm: Shm) -> BackendRow:
    """Conditions of shared memory between CPU ranks, in the order in which they would fail."""
    unmet = ""
    if sys.platform != "linux":
        unmet = f"{sys.platform}: futexes and O_TMPFILE need Linux"
    elif shm.error:
        unmet = f"{shm.path}: {shm.error}; {another_place()}"
    elif shm.free_bytes == 0:
        unmet = f"{shm.path} is full; free it, or give the container a larger --shm-size"
    return BackendRow("host", "cpu", not unmet, unmet)


def nccl_backend(facts: GroupFacts, *, has_gpu: bool) -> BackendRow:
    """Conditions that need no group; whether a group has the policy and the links shows in its own findings."""
    found = findings(facts)
    blocking = next((f for f in found if f.severity == "blocks"), None)
    if blocking is not None:
        return BackendRow("nccl", "cuda", False, first_line(blocking))
    if not has_gpu:
        return BackendRow("nccl", "cuda", False, _NO_GPU)
    degrading = next((f for f in found if f.severity == "degrades" and f.code != "policy_not_zero"), None)
    return BackendRow("nccl", "cuda", True, "" if degrading is None else first_line(degrading))


def peer_memory_backend(facts: GroupFacts, *, has_gpu: bool) -> BackendRow:
    """Conditions of torch's peer memory that need no group."""
    if not has_gpu:
        return BackendRow("cuda", "cuda", False, _NO_GPU)
    wanted = dataclasses.replace(facts, wanted_symm_backend="CUDA")
    blocking = next((f for f in findings(wanted) if f.code in PEER_MEMORY_BLOCKS), None)
    return BackendRow("cuda", "cuda", blocking is None, "" if blocking is None else first_line(blocking))


def nvlink() -> NvLink:
    """Link states from pynvml where it can be imported, else ``nvidia-smi``'s matrix, else unknown."""
    links = active_nvlinks()
    return _topology() if links is None else NvLink("pynvml", active_links=list(links.values()))


def _topology() -> NvLink:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return NvLink()
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return NvLink()
    lines = [line.rstrip() for line in done.stdout.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    return NvLink("nvidia-smi", topology=[line for line in lines if line.startswith(("GPU", "\tGPU"))])
