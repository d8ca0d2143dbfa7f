"""Host time of FSDP2's own steps, taken from outside, so that it means the same for every variant.

Whatever moves the bytes, FSDP2 calls ``FSDPParamGroup.unshard`` (copy-in, allocation and the all-gather's start; all of
a direct placement), ``wait_for_unshard`` (the copy-out, where there is one) and ``foreach_reduce`` (copy-in, the
reduce-scatter and what follows it).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_symm import compat, compat_unshard


@dataclass
class HostTimes:
    """Microseconds of the host, one sample a call that did something."""

    unshard: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    reduce: list[float] = field(default_factory=list)

    def columns(self) -> dict[str, float | str]:
        """Medians as columns, empty without a sample."""
        samples = {"unshard": self.unshard, "wait": self.wait, "reduce": self.reduce}
        return {f"host_{name}_us": round(statistics.median(some), 1) if some else "" for name, some in samples.items()}


@contextlib.contextmanager
def host_times(model: nn.Module) -> Iterator[HostTimes]:
    """Time the unshards and the reductions of a model's param groups while the block runs."""
    times = HostTimes()
    samples = {"unshard": times.unshard, "wait": times.wait, "reduce": times.reduce}
    with compat_unshard.wrapped_steps(
        compat.param_groups(model), lambda step, call, pending: _timed(call, samples[step], pending)
    ):
        yield times


def _timed(call: Callable[..., Any], samples_us: list[float], state: Callable[[], bool] | None) -> Callable[..., Any]:
    """The call, timed where it changes the state: FSDP2 also unshards what is unsharded, and waits for nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = state() if state else False
        start = time.perf_counter()
        answer = call(*args, **kwargs)
        took_us = (time.perf_counter() - start) * 1e6
        if state is None or state() != before:
            samples_us.append(took_us)
        return answer

    return run
