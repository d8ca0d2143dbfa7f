"""Runs functions on real processes that form a gloo world, and brings back what each rank returned or raised.

Worker processes live for the whole session (importing torch takes seconds), every job gets a process group of its own.
Tests that kill ranks start workers of their own with :func:`fresh_ranks`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

JOB_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str  # class name
    bases: tuple[str, ...]
    text: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


class RankError(AssertionError):
    """A rank failed where the test did not expect it."""


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        pipe.send(_run_job(rank, world_size, *job))


def _run_job(rank: int, world_size: int, module: str, name: str, args: tuple[Any, ...], store: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1234)
    try:
        init_process_group(rank, world_size, store)
        return getattr(importlib.import_module(module), name)(*args)
    except Exception as error:  # noqa: BLE001 - brought back to the test, which judges it
        kinds = tuple(c.__name__ for c in type(error).__mro__)
        return Failure(type(error).__name__, kinds, str(error), traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def init_process_group(rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    common: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    if os.environ.get("FSDP_SYMM_TEST_DEVICE") == "cuda":
        from fsdp_symm.zero_cta import zero_cta_options

        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if world_size > torch.cuda.device_count():  # the kernels of ranks that share a GPU must all fit on it
            os.environ.setdefault("NCCL_MAX_CTAS", str(32 // world_size))
        dist.init_process_group(
            "nccl", pg_options=zero_cta_options(), device_id=device, timeout=timedelta(seconds=60), **common
        )
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **common)
        # A job may end without any collective: a rank that leaves while another still connects breaks that one.
        dist.barrier()


class Ranks:
    """A set of worker processes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def results(self, job: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S) -> list[Any]:
        """What every rank returned, raised (:class:`Failure`), or ``None`` for a rank that died."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((job.__module__, job.__name__, args, f"{folder}/store"))
            answers: list[Any] = [None] * self.world_size
            left = dict(enumerate(self._pipes))
            while left:
                ready = wait(list(left.values()), timeout=timeout_s)
                if not ready:
                    self.kill()
                    self._start()
                    raise RankError(f"{job.__name__}: ranks {sorted(left)} did not answer within {timeout_s} s")
                for rank, pipe in list(left.items()):
                    if pipe in ready:
                        with contextlib.suppress(EOFError, ConnectionResetError):
                            answers[rank] = pipe.recv()
                        del left[rank]
            return answers

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S) -> list[Any]:
        """What every rank returned; a failure on any rank fails the test."""
        answers = self.results(job, *args, timeout_s=timeout_s)
        failures = [f"rank {r}: {a}" for r, a in enumerate(answers) if isinstance(a, Failure)]
        failures += [f"rank {r} died" for r, process in enumerate(self.processes) if not process.is_alive()]
        if failures:
            raise RankError("\n".join(failures))
        return answers

    def failures(self, job: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S) -> list[Failure]:
        """What every rank raised; a rank that raised nothing fails the test."""
        answers = self.results(job, *args, timeout_s=timeout_s)
        quiet = [r for r, a in enumerate(answers) if not isinstance(a, Failure)]
        if quiet:
            raise RankError(f"ranks {quiet} raised nothing: {[answers[r] for r in quiet]}")
        return answers

    def kill(self) -> None:
        """SIGKILL for every worker."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def stop(self) -> None:
        """Let the workers end."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()


@contextlib.contextmanager
def fresh_ranks(world_size: int) -> Iterator[Ranks]:
    """Workers for one test."""
    ranks = Ranks(world_size)
    try:
        yield ranks
    finally:
        ranks.kill()
