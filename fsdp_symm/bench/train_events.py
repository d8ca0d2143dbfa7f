"""What a run of train.py has left behind: TensorBoard scalars and the model's size in its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fsdp_symm.errors import SymmMemError, problem

WARM_STEPS = 3  # allocators fill, graphs are captured; never timed
_LOSS, _STEP_S, _TOKENS = "loss_metrics/global_avg_loss", "time_metrics/end_to_end(s)", "throughput(tps)"
_RESERVED, _ACTIVE = "memory/max_reserved(GiB)", "memory/max_active(GiB)"
_SHARES = "fsdp_symm/trace/engine_share/"
_SIZE = re.compile(r"size: ([\d,]+) total parameters")

Series = dict[str, dict[int, float]]


def read_scalars(folder: Path) -> Series:
    """Tag -> step -> value, from the one event file below a folder.

    Raises:
        SymmMemError: not one event file, or no TensorBoard to read it with.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise SymmMemError(
            problem(
                "bench train: cannot read the metrics of a run",
                found=f"no TensorBoard ({error})",
                expected="the package tensorboard",
                fix="pip install 'fsdp_symm[train]'",
            )
        ) from error
    files = sorted(folder.rglob("events.out.tfevents.*"))
    if len(files) != 1:
        raise SymmMemError(
            problem(
                "bench train: cannot read the metrics of a run",
                found=f"{len(files)} event files below {folder}",
                expected="one",
                fix="leave metrics.enable_tensorboard and metrics.save_for_all_ranks to the benchmark",
            )
        )
    events = EventAccumulator(str(files[0]), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def model_size(log: str) -> int:
    """The number of parameters that torchtitan has logged.

    Raises:
        SymmMemError: no such line.
    """
    found = _SIZE.search(log)
    if found is None:
        raise SymmMemError(
            problem(
                "bench train: cannot tell the model's size",
                found="a log without 'size: N total parameters'",
                expected="torchtitan 0.3's line, logged by rank 0",
                fix="unset LOG_RANK, or teach fsdp_symm/bench/train_events.py the line of your torchtitan",
            )
        )
    return int(found[1].replace(",", ""))


@dataclass(frozen=True)
class TrainMetrics:
    """The figures of one run of rank 0.

    Attributes:
        losses: of every step, from step 1.
        steps_us: wall time of the timed steps: without the first ones, the traced one and the one before it, in which
            the profiler starts.
        tokens_per_s: of this rank, median of the timed steps.
        reserved_bytes, active_bytes: the caching allocator's peaks over the whole run.
        symmetric_bytes: held by the switch and the experts; the allocator does not know of them.
        traced: columns about the traced step.
    """

    losses: list[float]
    steps_us: list[float]
    tokens_per_s: float
    reserved_bytes: int
    active_bytes: int
    symmetric_bytes: int
    traced: dict[str, float | str]

    @staticmethod
    def of(series: Series, steps: int) -> TrainMetrics:
        """Pick them out of what a run of ``steps`` steps, the last one traced, has logged.

        Raises:
            SymmMemError: a step is missing.
        """
        wanted = list(range(1, steps + 1))
        for tag in (_LOSS, _STEP_S, _TOKENS, _RESERVED, _ACTIVE):
            if (found := sorted(series.get(tag, {}))) != wanted:
                raise SymmMemError(
                    problem(
                        f"bench train: {tag} is not complete",
                        found=f"steps {found}",
                        expected=f"steps 1 to {steps}",
                        fix="look at the run's log",
                    )
                )
        timed = timed_steps(steps)
        tokens = sorted(series[_TOKENS][step] for step in timed)
        return TrainMetrics(
            losses=[series[_LOSS][step] for step in wanted],
            steps_us=[series[_STEP_S][step] * 1e6 for step in timed],
            tokens_per_s=tokens[len(tokens) // 2],
            reserved_bytes=_peak(series, _RESERVED),
            active_bytes=_peak(series, _ACTIVE),
            symmetric_bytes=int(max(series.get("fsdp_symm/arena_bytes", {0: 0.0}).values())),
            traced=_traced(series, steps),
        )


def timed_steps(steps: int) -> range:
    """Which steps of a run are timed, where the last one is traced."""
    return range(WARM_STEPS + 1, steps - 1)


def _peak(series: Series, tag: str) -> int:
    return int(max(series[tag].values()) * 2**30)


def _traced(series: Series, step: int) -> dict[str, float | str]:
    """Communication of the traced step on rank 0; empty columns where its trace could not be judged."""
    columns: dict[str, float | str] = {}
    for name in ("exposed_ms", "comm_ms", "sm_ms"):
        value = series.get(f"fsdp_symm/trace/{name}", {}).get(step)
        columns[name] = "" if value is None else round(value, 3)
    shares = {
        tag.removeprefix(_SHARES): values[step]
        for tag, values in sorted(series.items())
        if tag.startswith(_SHARES) and step in values
    }
    columns["engines"] = "; ".join(f"{name} {share:.2f}" for name, share in shares.items())
    return columns
