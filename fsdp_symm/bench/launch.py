"""Ranks of a benchmark as processes of this machine: started, joined within a bound, and their errors brought back.

Legend: W ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fsdp_symm import compat, compat_nccl
from fsdp_symm.bench import schema
from fsdp_symm.errors import SymmMemError, SymmMemTimeoutError, problem
from fsdp_symm.zero_cta import POLICY_VARIABLE, cta_policy, zero_cta_options

COLLECTIVE_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 540.0
# Part of what was measured, where it is set: it decides how many SMs NCCL's kernels may take.
_NOTED = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "CUDA_DEVICE_MAX_CONNECTIONS")
_DEFAULT_POLICY = (
    0  # NCCL_CTA_POLICY_DEFAULT; said aloud, lest a communicator made from another one inherits its policy
)


@dataclass(frozen=True)
class World:
    """What a rank measures with.

    Attributes:
        rank, size: this rank and W.
        device: where its tensors live.
        group: the whole world; under NCCL with the zero-CTA policy.
        plain: all ranks again, under NCCL with the default policy.
        side: the stream of everything that is measured, so that slots never change streams; ``None`` on a CPU.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    plain: dist.ProcessGroup
    side: torch.cuda.Stream | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams and events."""
        return self.device.type == "cuda"

    def on_side(self) -> contextlib.AbstractContextManager[object]:
        """Run what follows on the side stream."""
        return contextlib.nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def facts(self, command: str) -> dict[str, Any]:
        """Hardware, versions and command, as columns of every line."""
        versions = schema.gpu_versions() if self.on_gpu else schema.versions()
        noted = [f"{name} {os.environ[name]}" for name in _NOTED if self.on_gpu and name in os.environ]
        hardware = schema.gpu_hardware() if self.on_gpu else schema.hardware()
        return {"versions": "; ".join([versions, *noted]), "hardware": hardware, "command": command}

    def meet(self) -> None:
        """Let the device end what it does, on all ranks."""
        synchronize(self.device)
        dist.barrier(group=self.plain)
        synchronize(self.device)

    def all_values(self, values: list[float]) -> list[list[float]]:
        """Every rank's numbers, by rank."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everybody = torch.empty(self.size * len(values), dtype=torch.float64, device=self.device)
        dist.all_gather_single(everybody, mine, group=self.plain)
        return everybody.view(self.size, -1).tolist()

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each number over all ranks."""
        return [max(column) for column in zip(*self.all_values(values), strict=True)]

    def say(self, text: str) -> None:
        """Progress, from rank 0 only."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def agree_that(self, error: str | None, what: str) -> None:
        """Raise on every rank if any rank has an error.

        Raises:
            SymmMemError: names the ranks; the text is this rank's own where it has one.
        """
        bad = [rank for rank, (flag,) in enumerate(self.all_values([float(error is not None)])) if flag]
        if bad:
            raise SymmMemError(
                problem(
                    f"{what}: a wrong result on ranks {bad}; nothing was timed",
                    found=error or "a right result on this rank",
                    expected="the reference's",
                    fix="run the tests of this way first; the benchmark times right results only",
                )
            )


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def need_gpu() -> None:
    """Refuse machines without a GPU.

    Raises:
        SymmMemError: there is none.
    """
    if not torch.cuda.is_available():
        raise SymmMemError(
            "found no GPU, expected one or more, fix: run it on a CUDA machine; several ranks on one GPU need MPS and "
            "NCCL_MULTI_RANK_GPU_ENABLE=1"
        )


def enter(rank: int, world_size: int, store: str, device_type: str) -> World:
    """Form the world of one rank."""
    common: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    common["timeout"] = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **common)
        plain = compat.new_group(list(range(world_size)))
        return World(rank, world_size, torch.device("cpu"), _whole_world(), plain)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits only with its own workspace
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, pg_options=zero_cta_options(), **common)
    options = compat_nccl.default_options(compat_nccl.nccl_class(), high_priority=False)
    options.config.cta_policy = _DEFAULT_POLICY
    plain = compat.new_group(list(range(world_size)), pg_options=options, timeout=common["timeout"])
    side = torch.cuda.Stream(device, priority=-1)  # as FSDP2's streams of collectives
    world = World(rank, world_size, device, _whole_world(), plain, side)
    world.meet()
    _check_policies(world)
    return world


def _check_policies(world: World) -> None:
    found = cta_policy(world.group, world.device), cta_policy(world.plain, world.device)
    if found != ("zero", "default"):
        raise SymmMemError(
            problem(
                "bench: the communicators do not have the policies that are compared",
                found=f"{found[0]} for symmetric memory, {found[1]} for plain NCCL",
                expected="zero and default",
                fix=f"unset {POLICY_VARIABLE}, which overrides both",
            )
        )


def _whole_world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise SymmMemError("bench: found no process group, expected an initialised one, fix: report this")
    return group


def _rank_main(
    rank: int, work: Callable[[World, Any], Any], argument: Any, world_size: int, folder: str, device_type: str
) -> None:
    world = enter(rank, world_size, f"{folder}/store", device_type)
    answer = work(world, argument)
    if rank == 0:
        torch.save(answer, f"{folder}/answer")
    world.meet()
    dist.destroy_process_group()


def run_ranks(
    work: Callable[[World, Any], Any], argument: Any, *, ranks: int, device_type: str, what: str
) -> list[dict[str, Any]]:
    """Run ``work(world, argument)`` on every rank and return rank 0's answer.

    Args:
        work: a function of a module, so that a new process can import it.
        argument: anything that pickles.
        ranks: W.
        device_type: ``"cuda"``, or ``"cpu"`` to try a benchmark's own code without a GPU.
        what: the benchmark, for errors.

    Raises:
        SymmMemError: a rank failed; carries its traceback.
        SymmMemTimeoutError: the ranks took longer than any benchmark should.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, argument, ranks, folder, device_type)
        context: Any = mp.spawn(_rank_main, arguments, nprocs=ranks, join=False)  # type: ignore[attr-defined]
        start = time.monotonic()
        try:
            _join(context, what)
            print(f"{what}: {ranks} ranks took {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return torch.load(Path(folder) / "answer", weights_only=False)


def _join(context: Any, what: str) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise SymmMemTimeoutError(
                    problem(
                        f"{what}: the ranks did not end",
                        found=f"still running after {RUN_TIMEOUT_S:g} s",
                        expected="an end within that",
                        fix="start MPS when ranks share a GPU; measure fewer sizes",
                    )
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise SymmMemError(f"{what}: a rank failed; its own words:\n{error}") from error
