"""Whole training runs side by side: train.py under torchrun, once for each variant of a configuration.

A variant says who moves FSDP2's bytes: ``symm`` (this package's switch), ``plain`` (FSDP2 alone, NCCL's default policy)
or ``native`` (torchtitan's own switch, under the policy that the configuration asks for). For a mixture of experts
``+IMPLEMENTATION`` says who moves the tokens: ``symm+copy_engine``, ``plain+torchtitan``. Everything else is the same:
configuration, seed, data, steps.

The variants run one after another, each in fresh processes. The last step is traced and not timed.

Legend: W ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import typing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fsdp_symm.bench import schema
from fsdp_symm.bench.train_events import TrainMetrics, model_size, read_scalars
from fsdp_symm.errors import SymmMemConfigError, SymmMemError, SymmMemTimeoutError, problem
from fsdp_symm.titan.sections import ExpertParallelSection

SWITCHES: dict[str, tuple[str, ...]] = {
    "symm": ("fsdp_symm.enable=true", "parallelism.enable_fsdp_symm_mem=false"),
    # zero_cta would give the policy to communicators that gain nothing by it
    "plain": ("fsdp_symm.enable=false", "parallelism.enable_fsdp_symm_mem=false", "fsdp_symm.zero_cta=false"),
    "native": ("fsdp_symm.enable=false", "parallelism.enable_fsdp_symm_mem=true"),
}
EXPERTS: tuple[str, ...] = typing.get_args(typing.get_type_hints(ExpertParallelSection)["implementation"])
SCRIPT = "train.py"
# What the benchmark sets itself: an override of these would measure something else than the line says.
_OWN = re.compile(
    r"dump_folder|training\.steps|trace\..*|metrics\..*|fsdp_symm\.enable|parallelism\.enable_fsdp_symm_mem"
)
# Part of what was measured, where it is set.
_NOTED = (
    "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_CTA_POLICY", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST", "CUDA_DEVICE_MAX_CONNECTIONS",
)  # fmt: skip
_STOP_S = 40.0  # torchrun gives its ranks 30 s to end before it kills them
_TELLING = re.compile(r"config error: |\w*(Error|Exception): |out of memory")


@dataclass(frozen=True)
class Variant:
    """Who moves the bytes.

    Attributes:
        switch: a key of :data:`SWITCHES`.
        experts: an implementation of ``[expert_parallel]``; empty: the configuration's.
    """

    switch: str
    experts: str = ""

    @staticmethod
    def parse(text: str) -> Variant:
        """``SWITCH`` or ``SWITCH+IMPLEMENTATION``.

        Raises:
            SymmMemConfigError: an unknown name.
        """
        switch, plus, experts = text.partition("+")
        if switch not in SWITCHES or (plus and experts not in EXPERTS):
            raise SymmMemConfigError(
                f"--variants: found {text!r}, expected {', '.join(SWITCHES)}, for experts with one of "
                f"{', '.join('+' + name for name in EXPERTS)}, fix: --variants symm,plain"
            )
        return Variant(switch, experts)

    @property
    def name(self) -> str:
        """As it was written."""
        return f"{self.switch}+{self.experts}" if self.experts else self.switch

    @property
    def settings(self) -> tuple[str, ...]:
        """KEY=VALUE for train.py."""
        experts = (f"expert_parallel.implementation={self.experts}",) if self.experts else ()
        return (*SWITCHES[self.switch], *experts)


@dataclass(frozen=True)
class TrainBench:
    """What to measure.

    Attributes:
        config: the TOML file.
        name: of the lines, without ``train_``.
        ranks: W; they share GPUs where there are fewer and NCCL_MULTI_RANK_GPU_ENABLE=1 allows it.
        variants: in the order in which they run.
        steps: of each run.
        overrides: KEY=VALUE of any key that is not the benchmark's own.
        limit_s: seconds that one run may take, start and end included.
        command: recorded in every line.
        traces: folder for rank 0's trace and the log of each run, ``None`` for none.
    """

    config: Path
    name: str
    ranks: int
    variants: tuple[Variant, ...]
    steps: int = 12
    overrides: tuple[str, ...] = ()
    limit_s: float = 300.0
    command: str = ""
    traces: Path | None = None

    def check(self) -> None:
        """Refuse what would measure something else than it says.

        Raises:
            SymmMemConfigError: one line: found, expected, fix.
        """
        for text in self.overrides:
            key, equals, _ = text.partition("=")
            if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
                raise SymmMemConfigError(
                    f"--override: found {text!r}, expected KEY=VALUE, fix: --override model.layers=8"
                )
            if _OWN.fullmatch(key) or (
                key == "expert_parallel.implementation" and any(v.experts for v in self.variants)
            ):
                raise SymmMemConfigError(
                    f"--override: found {key}, which the benchmark sets itself, expected another key, "
                    "fix: --steps, --variants, or a configuration of your own"
                )
        for path in (Path(SCRIPT), self.config):
            if not path.is_file():
                raise SymmMemConfigError(
                    f"bench train: found no {path} below {Path.cwd()}, expected the repository, fix: cd to it"
                )

    def train_command(self, variant: Variant, folder: Path) -> list[str]:
        """The run of one variant, as words."""
        own = (
            f"dump_folder={folder}", f"training.steps={self.steps}",
            "trace.enable=true", "trace.dir=traces", f"trace.start_step={self.steps}", "trace.steps=1", "trace.ranks=0",
            "metrics.log_freq=1", "metrics.enable_tensorboard=true", "metrics.save_for_all_ranks=false",
        )  # fmt: skip
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        settings = (*own, *variant.settings, *self.overrides)
        return [*torchrun, SCRIPT, "--config", str(self.config), *(f"--{setting}" for setting in settings)]

    def kept(self, variant: Variant) -> str:
        """The name, without an ending, of what is kept of a run."""
        return f"train_{self.name}_{variant.name.replace('+', '_')}_w{self.ranks}"


def run_variant(bench: TrainBench, variant: Variant) -> dict[str, Any]:
    """Train once, and return the line, as :func:`schema.write_lines` takes it.

    Raises:
        SymmMemError: the run failed or took too long; carries what its log says.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "run", Path(scratch) / "log"
        began = time.monotonic()
        try:
            _train(bench.train_command(variant, folder), log, bench.limit_s, f"{bench.name} {variant.name}")
        finally:
            if bench.traces is not None:
                bench.traces.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, bench.traces / f"{bench.kept(variant)}.log")
        took = time.monotonic() - began
        text = log.read_text(errors="replace")
        metrics = TrainMetrics.of(read_scalars(folder), bench.steps)
        if bench.traces is not None:
            trace = folder / "traces" / f"rank0_step{bench.steps}.json.gz"
            shutil.copy(trace, bench.traces / f"{bench.kept(variant)}.json.gz")
    return _line(bench, variant, metrics, text) | {"run_s": round(took, 1)} | _facts(bench.command)


def _line(bench: TrainBench, variant: Variant, metrics: TrainMetrics, log: str) -> dict[str, Any]:
    parameters = model_size(log)
    line: dict[str, Any] = {"name": f"train_{bench.name}", "variant": variant.name, "ranks": bench.ranks}
    line |= {"bytes": 2 * parameters // bench.ranks, "dtype": _dtype(bench)}  # its bf16 shards, of the whole model
    line |= schema.summarize(metrics.steps_us)
    line |= {"parameters": parameters, "tokens_per_s": round(metrics.tokens_per_s, 1)}
    line |= {"peak_bytes": metrics.reserved_bytes, "active_bytes": metrics.active_bytes}
    line |= {"symmetric_bytes": metrics.symmetric_bytes} | metrics.traced
    line |= {"losses": "; ".join(f"{loss:.9g}" for loss in metrics.losses)}  # all digits of fp32
    verdicts = [text.removeprefix("verdict: ") for text in log.splitlines() if text.startswith("verdict: ")]
    return line | {"verdict": verdicts[-1] if verdicts else "", "overrides": " ".join(bench.overrides)}


def _dtype(bench: TrainBench) -> str:
    """Types of parameters and reductions, from the overrides or the file; torchtitan's default is bfloat16."""
    key = "training.mixed_precision_param"
    given = [text.partition("=")[2] for text in bench.overrides if text.startswith(f"{key}=")]
    table = tomllib.loads(bench.config.read_text()).get("training", {})
    return f"{given[-1] if given else table.get('mixed_precision_param', 'bfloat16')}/float32"


def _train(command: Sequence[str], log: Path, limit_s: float, what: str) -> None:
    """Run the command into a log.

    Raises:
        SymmMemTimeoutError: it did not end; it is ended.
        SymmMemError: it failed.
    """
    # A port or rank of a launcher around us is none of the run's business.
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SymmMemTimeoutError(
                problem(
                    f"bench train: {what} did not end",
                    found=f"still running after {limit_s:g} s; {_last_words(log)}",
                    expected="an end within that",
                    fix="a larger --limit, fewer --steps, or --override model.layers=N",
                )
            ) from None
        finally:
            _stop(process)
    if status != 0:
        raise SymmMemError(
            problem(
                f"bench train: {what} failed",
                found=f"exit status {status}; {_last_words(log)}",
                expected="0",
                fix=f"run it alone: python {' '.join(command[1:])}",
            )
        )


def _last_words(log: Path) -> str:
    """The lines of a log that say what went wrong, else its last ones."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = list(dict.fromkeys(line for line in lines if _TELLING.search(line)))
    return "its log says:\n    " + "\n    ".join(telling[:5] or lines[-10:] or ["(nothing)"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _facts(command: str) -> dict[str, Any]:
    # In a process of its own: asking CUDA leaves a context of half a GiB on the GPU, beside the next run.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        versions, hardware = pool.submit(_machine).result()
    noted = [f"{name} {os.environ[name]}" for name in _NOTED if name in os.environ]
    return {"versions": "; ".join([versions, *noted]), "hardware": hardware, "command": command}


def _machine() -> tuple[str, str]:
    import torch

    if torch.cuda.is_available():
        return schema.gpu_versions(), schema.gpu_hardware()
    return schema.versions(), schema.hardware()
