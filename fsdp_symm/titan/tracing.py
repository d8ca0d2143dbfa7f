"""The ``[trace]`` section: ``torch.profiler`` over a window of training steps, one chrome trace a rank."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from fsdp_symm.titan.sections import TraceSection

logger = logging.getLogger(__name__)


class StepTracer:
    """Records the steps ``start_step .. start_step + steps - 1``; ``ProfilerStep#N`` in the trace is training step N.

    ``begin_step`` is called before every step, ``close`` after the last one; both are local to the rank.
    """

    def __init__(self, section: TraceSection, dump_folder: str, rank: int) -> None:
        self.folder = Path(dump_folder) / section.dir
        self.written: list[Path] = []
        self._first = section.start_step
        self._last = section.start_step + section.steps - 1
        self._rank = rank
        self._enabled = section.enable and (not section.ranks or rank in section.ranks)
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """Tell the profiler that training step ``step`` starts; starts or stops recording where the window says so."""
        if not self._enabled:
            return
        if self._profile is None:
            self._start(step)
        if self._profile is not None:
            self._profile.step()
        if step > self._last:
            self.close()

    def close(self) -> None:
        """Stop recording and write what was recorded. Safe to call twice."""
        self._enabled = False
        if self._profile is not None:
            active, self._profile = self._profile, None
            active.stop()

    def _start(self, step: int) -> None:
        if step > self._last:
            logger.warning("trace: step %d is past the window %d..%d: no trace", step, self._first, self._last)
            self._enabled = False
            return
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=self._action,
            on_trace_ready=self._write,
            # The args of our collectives (module, bytes, engine) are recorded only together with shapes.
            record_shapes=True,
            with_stack=False,
        )
        # step_num counts from 0 and is advanced by step(): a resumed run must continue with its own numbers.
        self._profile.step_num = step - 1
        self._profile.start()

    def _action(self, step: int) -> ProfilerAction:
        if step == self._first - 1:
            return ProfilerAction.WARMUP
        if self._first <= step < self._last:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if step == self._last else ProfilerAction.NONE

    def _write(self, finished: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{self._rank}_step{self._first}.json.gz"
        finished.export_chrome_trace(str(path))
        self.written.append(path)
