"""torchtitan's metrics, plus what the switch did: ``fsdp_symm/...`` scalars in TensorBoard, one set a logged step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan.components.metrics import MetricsProcessor


class CommStats(Protocol):
    """The part of ``SymmMemHandle.stats()`` that is logged; all but ``arena_bytes`` only ever grows."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""
        ...

    @property
    def bytes_moved(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes by role and engine since the switch."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for peers since the switch."""
        ...


@dataclass(frozen=True)
class Totals:
    """Cumulative figures of one rank, summed over its model parts."""

    arena_bytes: int = 0
    wait_s: float = 0.0
    bytes_moved: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, all_stats: Sequence[CommStats]) -> Totals:
        """Sum the stats of several handles."""
        moved: dict[tuple[str, str], int] = {}
        for stats in all_stats:
            for role, by_engine in stats.bytes_moved.items():
                for engine, count in by_engine.items():
                    moved[role, engine] = moved.get((role, engine), 0) + count
        return cls(sum(s.arena_bytes for s in all_stats), sum(s.wait_s for s in all_stats), moved)


def scalars(before: Totals, now: Totals, steps: int) -> dict[str, float]:
    """The TensorBoard scalars for the ``steps`` steps between two readings: bytes and seconds are a step's mean."""
    values: dict[str, float] = {
        "fsdp_symm/arena_bytes": now.arena_bytes,
        "fsdp_symm/wait_s_per_step": (now.wait_s - before.wait_s) / steps,
    }
    for (role, engine), count in sorted(now.bytes_moved.items()):
        moved = count - before.bytes_moved.get((role, engine), 0)
        values[f"fsdp_symm/bytes_per_step/{role}/{engine}"] = moved / steps
    return values


class SymmMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics processor with the switch's figures among its scalars, and the losses kept for a summary.

    With ``metrics.log_freq`` above 1 the per-step figures are means over the steps since the last log. They are
    this rank's own; torchtitan logs rank 0 unless ``metrics.save_for_all_ranks`` is set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's keys, unchanged."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.losses: list[tuple[int, float]] = []
        self._read: Callable[[], Sequence[CommStats]] | None = None
        self._last = Totals()
        self._last_step = 0

    def watch(self, read: Callable[[], Sequence[CommStats]], step: int) -> None:
        """Log what ``read`` returns from now on; ``step`` is the last finished step (0 in a fresh run)."""
        self._read = read
        self._last = Totals.of(read())
        self._last_step = step

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """As torchtitan's, with the ``fsdp_symm/`` scalars added."""
        self.losses.append((step, float(global_avg_loss)))
        extra = dict(extra_metrics or {})
        if self._read is not None:
            now = Totals.of(self._read())
            extra |= scalars(self._last, now, max(1, step - self._last_step))
            self._last, self._last_step = now, step
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra)
