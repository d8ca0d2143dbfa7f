"""The TOML sections that are ours: frozen, documented, range-checked. torchtitan's own sections are its own."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_symm.limits import LONGEST_TIMEOUT_S, MAX_SLOTS, SHORTEST_TIMEOUT_S
from fsdp_symm.titan.overlay import FieldError, describe


def _doc(default: Any, text: str) -> Any:
    """A field with a default and the line that ``--help`` prints for it."""
    return field(default=default, metadata={"doc": text})


MOST_ROWS = 2**40  # of one call: petabytes, and small enough for 64-bit sizes


def _at_least(section: Any, name: str, least: int) -> None:
    value = getattr(section, name)
    if value < least:
        raise FieldError(name, f"found {value}; allowed: {least} or more")


def _check_timeout(seconds: float) -> None:
    if not SHORTEST_TIMEOUT_S <= seconds <= LONGEST_TIMEOUT_S:
        raise FieldError(
            "timeout_s",
            f"found {seconds:g}; allowed: seconds from {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:.0f}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """Which torchtitan model, and from which function of its config registry."""

    module: str = _doc("", "torchtitan model, e.g. 'llama3', 'deepseek_v3', or an importable module of yours")
    config: str = _doc("", "function of that model's config_registry, e.g. 'llama3_debugmodel'")
    attention: Literal["auto", "sdpa", "default"] = _doc(
        "auto", "'default': what the model asks for; 'sdpa': causal SDPA without document masks; 'auto': sdpa on CPU"
    )
    layers: int = _doc(0, "keep only the model's first N layers, for a model that does not fit; 0: all of them")

    def __post_init__(self) -> None:
        _at_least(self, "layers", 0)
        for name, example in (("module", "llama3"), ("config", "llama3_debugmodel")):
            if not getattr(self, name):
                raise FieldError(name, f"found nothing; allowed: a name such as {example!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpSymmSection:
    """The switch: FSDP2's communication buffers in symmetric memory (``fsdp_symm.set_symm_mem_for_comm``)."""

    enable: bool = _doc(True, "put FSDP2's communication in symmetric memory; false trains on the plain path")
    backend: Literal["auto", "host", "nccl", "cuda"] = _doc(
        "auto", "where symmetric bytes come from: 'auto' by device, 'host' on CPU only, 'nccl' or 'cuda' on GPUs only"
    )
    all_gather: Literal["auto", "direct", "staged", "off"] = _doc(
        "auto",
        "'direct': into the parameters themselves; 'staged': through a symmetric buffer; 'auto': direct if possible",
    )
    reduce_scatter: Literal["auto", "copy_engine", "nccl", "off"] = _doc(
        "auto",
        "'copy_engine': pulled and summed here; 'nccl': NCCL's symmetric kernel; 'auto': pulled if a rank's largest"
        " chunk has 32 MiB or more in the type of the sum (where ranks share a GPU, see README)",
    )
    modules: str = _doc("", "shell pattern on module names, e.g. 'layers.*', of what to switch; empty: all")
    zero_cta: bool = _doc(
        False,
        "NCCL 2.28 or newer only: every communicator gets the zero-CTA policy, so that staged all-gathers use copy"
        " engines; direct placement needs no policy",
    )
    dedicated_all_gather: bool = _doc(
        False, "NCCL only, instead of zero_cta: the policy for staged all-gathers alone, on a communicator of their own"
    )
    min_bytes: int = _doc(0, "leave parameter groups with smaller buffers than this (bytes) on the plain path")
    strict: bool = _doc(False, "fail where the switch would otherwise warn and stay on the plain path")
    slots: int = _doc(0, "at least this many all-gather slots; 0 takes the number from the plan")
    timeout_s: float = _doc(60.0, "longest wait for a peer (seconds)")

    def __post_init__(self) -> None:
        _at_least(self, "min_bytes", 0)
        if not 0 <= self.slots <= MAX_SLOTS:
            raise FieldError("slots", f"found {self.slots}; allowed: 0 to {MAX_SLOTS}")
        if self.zero_cta and self.dedicated_all_gather:
            raise FieldError(
                "dedicated_all_gather",
                "found true beside zero_cta = true, which gives the policy to every communicator; allowed: one of the"
                " two, e.g. zero_cta = false",
            )
        _check_timeout(self.timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallelSection:
    """How mixture-of-experts tokens travel between ranks (``parallelism.expert_parallel_degree`` above 1)."""

    implementation: Literal["torchtitan", "auto", "copy_engine", "copy_engine_exact", "all_to_all"] = _doc(
        "torchtitan",
        "'torchtitan': its own dispatcher, untouched; 'copy_engine': padded rows in symmetric memory;"
        " 'copy_engine_exact': the same, only rows that exist; 'all_to_all': the process group's collectives;"
        " 'auto': copy_engine where padding is affordable and memory can be had, on 2 GPUs only where nothing is read"
        " on the host, else all_to_all",
    )
    overflow: Literal["grow", "raise", "drop"] = _doc(
        "grow",
        "when rows do not fit the sizes below: 'grow' makes room, 'raise' stops every rank, 'drop' drops the last",
    )
    max_tokens_per_rank: int = _doc(
        0, "tokens a rank may bring to one call; 0: the batch (local_batch_size * seq_len over cp and tp)"
    )
    rows_per_peer: int = _doc(
        0, "copy_engine, copy_engine_exact: rows one rank may send another; 0: max_tokens_per_rank, which drops nothing"
    )
    recv_capacity_per_rank: int = _doc(
        0, "rows a rank's experts may get in one call; 0: as many as come (one number is then read on the host)"
    )
    recv_capacity_factor: float = _doc(
        0.0, "instead of recv_capacity_per_rank: a multiple of an even share, max_tokens_per_rank * top_k; 0: not set"
    )
    timeout_s: float = _doc(60.0, "longest wait for a peer (seconds); all_to_all keeps the process group's")

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_rank", "rows_per_peer", "recv_capacity_per_rank"):
            _at_least(self, name, 0)
            if (rows := getattr(self, name)) > MOST_ROWS:
                raise FieldError(name, f"found {rows}; allowed: at most {MOST_ROWS}")
        if not (math.isfinite(self.recv_capacity_factor) and self.recv_capacity_factor >= 0):
            raise FieldError(
                "recv_capacity_factor", f"found {self.recv_capacity_factor}; allowed: a finite number of 0 or more"
            )
        if self.recv_capacity_factor and self.recv_capacity_per_rank:
            raise FieldError(
                "recv_capacity_factor",
                f"found {self.recv_capacity_factor} beside recv_capacity_per_rank = {self.recv_capacity_per_rank};"
                " allowed: one of the two",
            )
        _check_timeout(self.timeout_s)
        self._check_implementation()

    def _check_implementation(self) -> None:
        """Refuse a size or policy that the implementation would ignore."""
        if self.implementation == "torchtitan":
            for f in dataclasses.fields(self)[1:]:
                if (value := getattr(self, f.name)) != f.default:
                    raise FieldError(
                        f.name,
                        f"found {value!r} beside implementation = 'torchtitan', which has no such setting;"
                        f" allowed: {f.default!r}, or another implementation",
                    )
        if self.rows_per_peer and self.implementation in ("all_to_all", "auto"):
            raise FieldError(
                "rows_per_peer",
                f"found {self.rows_per_peer} beside implementation = {self.implementation!r}; allowed: 0, or"
                " 'copy_engine', 'copy_engine_exact' as the implementation",
            )
        if self.rows_per_peer and self.implementation == "copy_engine_exact" and self.overflow == "drop":
            raise FieldError(
                "rows_per_peer",
                f"found {self.rows_per_peer} beside implementation = 'copy_engine_exact' and overflow = 'drop': an"
                " exact exchange drops nothing on the way; allowed: 0 (bound what a rank receives instead)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSection:
    """A chrome trace of a few steps, one file a rank."""

    enable: bool = _doc(False, "record traces")
    dir: str = _doc("traces", "folder for the files, below dump_folder unless absolute")
    start_step: int = _doc(10, "first recorded training step (the first step of a run is 1)")
    steps: int = _doc(1, "how many steps to record into one file")
    ranks: tuple[int, ...] = _doc((), "ranks that record; empty: every rank")

    def __post_init__(self) -> None:
        _at_least(self, "start_step", 1)
        _at_least(self, "steps", 1)
        for rank in self.ranks:
            if rank < 0:
                raise FieldError("ranks", f"found {rank}; allowed: rank numbers of 0 or more")
        if not self.dir:
            raise FieldError("dir", "found ''; allowed: a folder name")


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "fsdp_symm": FsdpSymmSection,
    "expert_parallel": ExpertParallelSection,
    "trace": TraceSection,
}


def help_text() -> str:
    """Our sections with their keys, types, defaults and meanings, for ``--help``."""
    lines = ["sections of fsdp_symm (every other section is torchtitan's own; --check prints all keys):", ""]
    for name, section in SECTIONS.items():
        lines.append(f"[{name}]  {(section.__doc__ or '').splitlines()[0]}")
        hints = typing.get_type_hints(section)
        for f in dataclasses.fields(section):
            default = list(f.default) if isinstance(f.default, tuple) else f.default
            shown = str(default).lower() if isinstance(default, bool) else repr(default)
            lines.append(f"  {f.name} = {shown}  ({describe(hints[f.name])})")
            lines.append(f"      {f.metadata['doc']}")
        lines.append("")
    return "\n".join(lines)
