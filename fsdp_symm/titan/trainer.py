"""torchtitan's trainer with the switch applied after its parallelization, step traces, and orderly ends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from fsdp_symm.titan import cpu

cpu.prepare()  # before the first import of torchtitan

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from fsdp_symm.errors import SymmMemConfigError  # noqa: E402
from fsdp_symm.experts.context import abandon_shared, close_shared  # noqa: E402
from fsdp_symm.titan import experts, trace_verdict  # noqa: E402
from fsdp_symm.titan.devices import check_backend, place_this_rank, request_zero_cta  # noqa: E402
from fsdp_symm.titan.metrics import SymmMetricsProcessor  # noqa: E402
from fsdp_symm.titan.overlay import ConfigError, FieldError, one_line  # noqa: E402
from fsdp_symm.titan.sections import (  # noqa: E402
    ExpertParallelSection,
    FsdpSymmSection,
    ModelSection,
    TraceSection,
)
from fsdp_symm.titan.tracing import StepTracer  # noqa: E402

if TYPE_CHECKING:
    from fsdp_symm import SymmMemHandle

logger = logging.getLogger(__name__)


class SymmTrainer(Trainer):
    """Trains a torchtitan model whose FSDP2 communication lies in symmetric memory.

    Build it with ``config.build()``; end it with ``close()`` on every rank, before the process group is destroyed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's sections and ours."""

        model: ModelSection
        fsdp_symm: FsdpSymmSection = field(default_factory=FsdpSymmSection)
        expert_parallel: ExpertParallelSection = field(default_factory=ExpertParallelSection)
        trace: TraceSection = field(default_factory=TraceSection)

        def __post_init__(self) -> None:
            if self.fsdp_symm.enable and self.parallelism.enable_fsdp_symm_mem:
                raise FieldError(
                    "parallelism.enable_fsdp_symm_mem",
                    "found true beside fsdp_symm.enable = true; allowed: one switch only, set one of the two to false",
                )
            if self.fsdp_symm.enable:
                check_backend(self.fsdp_symm.backend, on_cpu=cpu.on_cpu())
            cpu.check(self)
            experts.check(self)
            self.activation_checkpoint = experts.keep_exchanges(self.activation_checkpoint)
            # Not super(): slots=True makes a new class, and the implicit one would still be the old.
            Trainer.Config.__post_init__(self)

    def __init__(self, config: Config) -> None:
        self._handles: list[SymmMemHandle] = []
        place_this_rank()
        spec = config.model_spec
        if spec is None:
            raise ConfigError("config: found no model; fix: build the config with fsdp_symm.titan.config.load")
        experts.install(config)
        config.model_spec = dataclasses.replace(spec, parallelize_fn=self._with_switch(spec.parallelize_fn))
        try:
            super().__init__(config)
        except BaseException as error:
            self._end_handles(error)
            raise
        self._tracer = StepTracer(config.trace, config.dump_folder, dist.get_rank())

    @property
    def _sections(self) -> Config:
        return cast(SymmTrainer.Config, self.config)

    def init_distributed(self) -> ParallelDims:
        """As torchtitan's; with ``fsdp_symm.zero_cta`` every NCCL communicator gets the zero-CTA policy."""
        config = self._sections
        for key in ("zero_cta", "dedicated_all_gather") if cpu.on_cpu() else ():
            if getattr(config.fsdp_symm, key) and os.environ.get("RANK") == "0":
                logger.warning("fsdp_symm.%s = true has no effect on CPU: it is about NCCL communicators", key)
        if config.fsdp_symm.zero_cta and not cpu.on_cpu():
            request_zero_cta(os.environ)
        dims = super().init_distributed()
        for rank in config.trace.ranks:
            if rank >= dims.world_size:
                raise ConfigError(f"trace.ranks: found {rank}; allowed: 0 to {dims.world_size - 1} (this run's ranks)")
        return dims

    def _with_switch(self, parallelize: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        """torchtitan's function for one model part (a pipeline stage has several), then the switch."""

        def parallelize_and_switch(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
            model = parallelize(model, **kwargs)
            if cpu.on_cpu():
                cpu.force_sum_reduction(model)
            if self._sections.fsdp_symm.enable:
                self._switch(model)
            return model

        return parallelize_and_switch

    def _switch(self, model: torch.nn.Module) -> None:
        from fsdp_symm import set_symm_mem_for_comm

        section = self._sections.fsdp_symm
        try:
            handle = set_symm_mem_for_comm(
                model,
                backend=section.backend,
                all_gather=False if section.all_gather == "off" else section.all_gather,
                reduce_scatter=False if section.reduce_scatter == "off" else section.reduce_scatter,
                modules=section.modules or None,
                min_bytes=section.min_bytes,
                strict=section.strict,
                timeout_s=section.timeout_s,
                slots=section.slots or None,
                dedicated_all_gather=section.dedicated_all_gather,
            )
        except SymmMemConfigError as error:
            raise ConfigError(f"[fsdp_symm]: {one_line(error)}") from None  # its text says it all
        self._handles.append(handle)
        if dist.get_rank() == 0:
            print(handle, flush=True)

    def train(self) -> None:
        """torchtitan's loop; on return every trace is written."""
        if self._handles or experts.stats():
            self._metrics.watch(lambda: [*(h.stats() for h in self._handles), *experts.stats()], self.step)
        try:
            super().train()
        finally:
            self._tracer.close()

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """One optimizer step inside one ``ProfilerStep``."""
        self._tracer.begin_step(self.step)
        super().train_step(data_iterator)

    @property
    def _metrics(self) -> SymmMetricsProcessor:
        return cast(SymmMetricsProcessor, self.metrics_processor)

    def finish(self) -> list[str]:
        """Give symmetric memory back after training and judge the traces. Collective, once, before ``close``.

        The traces of rank 0's host are judged, on rank 0, and logged at the traced step where rank 0 holds
        torchtitan's TensorBoard writer (not under pipeline parallelism). A trace that cannot be judged costs the
        verdict and one warning, never the run.

        Returns:
            Rank 0: the lines that end its output, the summary and the verdict. Other ranks: nothing.
        """
        config, traces = self._sections, None
        if config.trace.enable:
            traces = trace_verdict.share(_world(), self._tracer.written, config.comm.train_timeout_seconds)
        # Before the inspection: giving memory back waits for every rank, and rank 0 may read for a while.
        self._end_handles(None)
        if dist.get_rank() != 0:
            return []
        found = trace_verdict.inspect(traces) if traces else None
        if found is None:
            return [self._summary(traces)]
        self._metrics.logger.log(trace_verdict.scalars(found), config.trace.start_step)
        return [self._summary(traces), f"verdict: {found.verdict}"]

    def _summary(self, traces: list[trace_verdict.RankTraces] | None) -> str:
        """One line: first and last logged loss, where the events lie, and which traces were written."""
        config, losses = self._sections, self._metrics.losses
        parts = [f"trained {self.step} steps"]
        if losses:
            (first_step, first), (last_step, last) = losses[0], losses[-1]
            parts[0] += f": loss {first:.5f} (step {first_step}) -> {last:.5f} (step {last_step})"
        if config.metrics.enable_tensorboard:
            parts.append(f"TensorBoard events: {os.path.join(config.dump_folder, config.metrics.save_tb_folder)}")
        if config.trace.enable and traces is None:
            parts.append(f"traces: some in {self._tracer.folder}, not every rank answered")
        elif traces is not None:
            start_step = config.trace.start_step
            parts.append(trace_verdict.describe_files(traces, start_step=start_step, last_step=self.step))
        return "; ".join(parts)

    def close(self, error: BaseException | None = None) -> None:
        """Give symmetric memory back, then close torchtitan's parts. Safe to call twice.

        Args:
            error: what ended the training early, if anything: the memory is then let go and the peers are told,
                without waiting for them. Without an error the call is collective.
        """
        try:
            self._end_handles(error)
        finally:
            super().close()

    def _end_handles(self, error: BaseException | None) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(close_shared if error is None else partial(abandon_shared, repr(error)))
            for handle in self._handles:
                stack.callback(handle.close if error is None else partial(handle.abandon, repr(error)))
            self._handles = []


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise ConfigError(
            "trainer: found no process group; expected one made by torchtitan; fix: build the trainer first"
        )
    return world
