"""The doctor's answer as data; the attributes are the keys of ``fsdp-symm doctor --json``, in this order.

Keys are added but not renamed within one ``schema_version``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass
class Versions:
    """Version texts; ``None`` for what is not there.

    Attributes:
        cuda: that torch was built with.
        nccl_built, nccl_loaded: that torch was compiled against, and the library in this process.
        driver_api: the CUDA version that the driver reports.
    """

    python: str
    fsdp_symm: str
    torch: str
    cuda: str | None
    nccl_built: str | None
    nccl_loaded: str | None
    driver_api: str | None


@dataclass
class Gpu:
    """One visible GPU."""

    index: int
    name: str
    uuid: str
    capability: str
    memory_bytes: int
    num_sms: int


@dataclass
class NvLink:
    """NVLink as far as a tool here could say.

    Attributes:
        source: ``"pynvml"``, ``"nvidia-smi"`` or ``"unknown"``.
        active_links: for each GPU of the machine, with pynvml; else empty.
        topology: lines of ``nvidia-smi topo -m``; else empty.
    """

    source: str = "unknown"
    active_links: list[int] = field(default_factory=list)
    topology: list[str] = field(default_factory=list)


@dataclass
class Shm:
    """The folder of the host backend's segments.

    Attributes:
        size_bytes, free_bytes: ``None`` where nothing can be asked.
        error: why no segment can be made there, ``""`` if one can.
    """

    path: str
    size_bytes: int | None
    free_bytes: int | None
    error: str = ""


@dataclass
class BackendRow:
    """Whether a backend serves tensors here.

    Attributes:
        unmet: the first unmet condition, ``""`` if there is none; for a usable backend, what keeps it from copy
            engines.
    """

    backend: str
    serves: str
    usable: bool
    unmet: str


@dataclass
class FindingRow:
    """See :class:`fsdp_symm.guards.Finding`."""

    code: str
    severity: str
    text: str


@dataclass
class CollectiveRow:
    """One probed collective, over all ranks of the group.

    Attributes:
        kind: ``"all_gather"``, ``"all_to_all"`` or ``"reduce_scatter"``.
        buffers: ``"arena"``: slots; ``"plain"`` tensors.
        nbytes: of one rank's whole tensor.
        way: which of the switch's ways: all-gathers ``"direct"`` or ``"staged"``, reduce-scatters ``"copy_engine"`` or
            ``"nccl"``; ``""`` where there is no choice.
        engine: ``"copy_engine"``, ``"symmetric_kernel"``, ``"plain_kernel"``, ``"host"``, another engine of
            ``fsdp-symm inspect``, ``"unknown"``, or ``"not_run"``.
        expected: the engine that the facts promise; ``""`` where there is nothing to say.
        reason: why that engine is expected: the first unmet condition, or the rule.
        correct: whether the result was right on every rank; ``None`` if it did not run.
        kernels, sms, copies: names and largest grid of its kernels, number of payload copies (this rank).
        time_us: median of a few calls, the slowest rank's.
        error: first error of any rank, ``""`` if none.
    """

    kind: str
    buffers: str
    nbytes: int
    engine: str = "not_run"
    expected: str = ""
    reason: str = ""
    correct: bool | None = None
    kernels: list[str] = field(default_factory=list)
    sms: int = 0
    copies: int = 0
    time_us: float | None = None
    error: str = ""
    way: str = ""

    @property
    def failed(self) -> bool:
        """A wrong result or an error; a collective that was left out on purpose has not failed."""
        return self.correct is False or bool(self.error)


@dataclass
class GroupRow:
    """One process group."""

    name: str
    ranks: list[int]
    device: str
    backend: str
    policy: str
    policy_source: str
    findings: list[FindingRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether anything that was tried did not work."""
        return bool(self.error) or any(c.failed for c in self.collectives)


@dataclass
class DoctorReport:
    """All of it.

    Attributes:
        status: ``"ok"``, or ``"failed"`` if a probe gave a wrong result or an error (exit status 1).
        peer_access: row i, column j: whether GPU i can address GPU j's memory.
        environment: relevant variables that are set.
        nccl_libraries: every libnccl mapped into the process; more than one is a finding.
        findings: settings of this process that a switch on GPUs would warn about or, under ``strict``, refuse.
        notes: what was left out, and how to get it.
    """

    versions: Versions
    gpus: list[Gpu]
    peer_access: list[list[bool]]
    nvlink: NvLink
    environment: dict[str, str]
    nccl_libraries: list[str]
    shm: Shm
    backends: list[BackendRow]
    groups: list[GroupRow] = field(default_factory=list)
    findings: list[FindingRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "failed" if any(g.failed for g in self.groups) else "ok"

    def to_json(self) -> dict[str, Any]:
        """A JSON object with ``schema_version`` and ``status`` first."""
        return {"schema_version": SCHEMA_VERSION, "status": self.status, **dataclasses.asdict(self)}
