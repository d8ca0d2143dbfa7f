"""Small models with experts trained by :class:`SymmTrainer` on two real ranks, under every implementation."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import Ranks, fresh_ranks

REPO = Path(__file__).parents[2]
STEPS = 3
OURS = ("copy_engine", "copy_engine_exact", "all_to_all")
FAST = {
    "training.steps": STEPS,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "trace.enable": "false",
    "metrics.enable_tensorboard": "false",
}


class Ran(NamedTuple):
    """What a rank's training left."""

    losses: list[tuple[int, float]]
    transports: list[str]
    bytes_moved: int
    dispatcher: str
    segments: int  # while training


def _trainer(folder: str, model: str, settings: dict[str, Any]) -> Any:
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", HF_HUB_OFFLINE="1")
    os.chdir(REPO)
    from fsdp_symm.titan.config import load

    chosen = {**FAST, "dump_folder": folder, "model.module": "tests.titan.tiny_moe", "model.config": model, **settings}
    config = load("configs/debug_moe_cpu.toml", [f"--{key}={value}" for key, value in chosen.items()])
    return config.build()


def _train(folder: str, model: str, settings: dict[str, Any]) -> Ran:
    """Build, train, finish and close, as ``train.py`` does."""
    from fsdp_symm.experts.context import open_contexts

    trainer = _trainer(folder, model, settings)
    from torchtitan import trainer as native  # after fsdp_symm.titan has prepared a machine without a GPU

    failure = None
    try:
        # torchtitan's rank 0 sleeps two seconds at the end of every training.
        awake = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        with mock.patch.object(native, "time", awake):
            trainer.train()
        contexts = open_contexts()
        transports = [context.transport for context in contexts]
        moved = sum(context.exchange.traffic().bytes_moved for context in contexts)
        layers = [m for m in trainer.model_parts[0].modules() if hasattr(m, "token_dispatcher")]
        kind = type(layers[0].token_dispatcher).__name__
        held = _segments()
        trainer.finish()
        assert not open_contexts(), "closed while the process group is there"
        return Ran(trainer.metrics_processor.losses, transports, moved, kind, held)
    except BaseException as error:
        failure = error
        raise
    finally:
        trainer.close(failure)
        torch.use_deterministic_algorithms(False)


class Runs:
    """Each model and its settings are trained once and looked at by several tests."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks = ranks
        self.folder = str(folder)
        self._done: dict[Any, Ran] = {}

    def get(self, model: str = "deepseek_v3", **settings: Any) -> Ran:
        key = model, tuple(sorted(settings.items()))
        if key not in self._done:
            named = {name.replace("__", "."): value for name, value in settings.items()}
            first, second = self.ranks.run(_train, self.folder, model, named)
            assert [step for step, _ in first.losses] == list(range(1, STEPS + 1))
            assert first.losses == second.losses, "the mean over ranks"
            assert self.ranks.run(_segments) == [0, 0], "memory is given back"
            self._done[key] = first
        return self._done[key]


@pytest.fixture(scope="module")
def runs(titan_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(titan_ranks, tmp_path_factory.mktemp("runs"))


def _difference(found: Ran, expected: Ran) -> float:
    return max(abs(a - b) for (_, a), (_, b) in zip(found.losses, expected.losses, strict=True))


def _segments() -> int:
    """Shared memory that this process maps; its files have no names that a listing of /dev/shm would show."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/#" in line for line in maps)


@pytest.mark.parametrize(
    ("model", "implementations"), [("deepseek_v3", OURS), ("qwen3", OURS[::2]), ("gpt_oss", OURS[::2])]
)
def test_all_implementations_have_the_losses_of_experts_on_every_rank(
    runs: Runs, model: str, implementations: tuple[str, ...]
) -> None:
    undivided = runs.get(model, parallelism__expert_parallel_degree=1)
    assert undivided.losses[0][1] > undivided.losses[-1][1] + 0.1, "it learns"
    assert undivided.transports == []
    found = {name: runs.get(model, expert_parallel__implementation=name) for name in implementations}
    for name, ran in found.items():
        assert ran.transports == [name], "layers of one shape share one context"
        assert ran.dispatcher == "ExchangeTokenDispatcher"
        assert ran.bytes_moved > 0
        assert ran.losses == found["all_to_all"].losses, "bit by bit"
        assert _difference(ran, undivided) < 2e-4, "sums may run in another order"
    held = {name: ran.segments for name, ran in found.items()}
    assert held["copy_engine"] > held["all_to_all"] > 0, "memory of the experts beside that of the switch"


def test_torchtitans_own_dispatcher_is_used_where_it_is_asked_for(runs: Runs) -> None:
    ours = runs.get()
    assert ours.transports == ["copy_engine"], "what configs/debug_moe_cpu.toml asks for"
    own = runs.get(expert_parallel__implementation="torchtitan")
    assert own.dispatcher == "AllToAllTokenDispatcher"
    assert own.transports == []
    assert _difference(own, ours) < 2e-4


def test_auto_takes_symmetric_memory(runs: Runs) -> None:
    assert runs.get(expert_parallel__implementation="auto").transports == ["copy_engine"]


def test_activation_checkpoints_change_no_loss(runs: Runs) -> None:
    none, full, selective = (runs.get(activation_checkpoint__mode=mode) for mode in ("none", "full", "selective"))
    assert full.losses == selective.losses == none.losses
    assert full.bytes_moved > none.bytes_moved, "all is exchanged again"
    assert selective.bytes_moved == none.bytes_moved, "nothing is exchanged again"


def test_buffers_that_have_to_grow_change_no_loss(runs: Runs) -> None:
    full = {"activation_checkpoint__mode": "full"}
    assert runs.get(**full, expert_parallel__rows_per_peer=4).losses == runs.get(**full).losses


def test_accumulated_gradients(runs: Runs) -> None:
    accumulate = {"training__global_batch_size": 4, "training__local_batch_size": 1}
    found = [runs.get(expert_parallel__implementation=name, **accumulate) for name in ("copy_engine", "all_to_all")]
    assert found[0].losses == found[1].losses
    undivided = runs.get(parallelism__expert_parallel_degree=1, **accumulate)
    assert _difference(found[0], undivided) < 2e-4


def test_without_the_switch_of_fsdp(runs: Runs) -> None:
    plain = runs.get(fsdp_symm__enable="false")
    assert plain.transports == ["copy_engine"]
    assert plain.losses == runs.get().losses


@pytest.mark.parametrize("implementation", ["copy_engine", "all_to_all"])
def test_a_bounded_capacity_drops_or_raises_on_every_rank(runs: Runs, implementation: str) -> None:
    bound = {"expert_parallel__implementation": implementation, "expert_parallel__recv_capacity_factor": 0.5}
    plenty = runs.get(expert_parallel__implementation=implementation)
    dropping = runs.get(**bound, expert_parallel__overflow="drop")
    assert dropping.losses != plenty.losses, "half of the routes have no room"
    raising = {name.replace("__", "."): value for name, value in bound.items()} | {"expert_parallel.overflow": "raise"}
    for answer in runs.ranks.failures(_train, runs.folder, "deepseek_v3", raising):
        assert answer.kind == "SymmMemError"
        assert "ep_prepare: a rank receives more rows than recv_capacity_per_rank" in answer.text
        assert "expected: at most 96" in answer.text
    assert runs.ranks.run(_segments) == [0, 0]


def _one_fails(folder: str) -> float:
    """Rank 1 fails in the second step, between a dispatch and its combine; how long rank 0 waited for it."""
    trainer = _trainer(folder, "deepseek_v3", {})
    calls = 0
    (layer, *_) = [m for m in trainer.model_parts[0].modules() if hasattr(m, "token_dispatcher")]

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise ValueError("a bad expert")

    layer.inner_experts.register_forward_pre_hook(fail)
    failure, started = None, time.monotonic()
    try:
        trainer.train()
    except BaseException as error:
        failure, started = error, time.monotonic() - started
        raise
    finally:
        held = _segments()
        trainer.close(failure)
        torch.use_deterministic_algorithms(False)
        assert started < 30, "not the 60 seconds of the timeout"
        assert held > 0
    raise AssertionError("it trained on")


def test_a_rank_that_fails_alone_is_quoted_by_the_others_at_once(tmp_path: Path) -> None:
    with fresh_ranks(2) as ranks:
        waiting, failing = ranks.results(_one_fails, str(tmp_path))
        assert ranks.run(_segments) == [0, 0]
    assert failing.kind == "ValueError"
    assert waiting.kind == "SymmMemPeerError"
    assert "a bad expert" in waiting.text


def _no_memory(folder: str) -> None:
    _trainer(folder, "deepseek_v3", {"expert_parallel.max_tokens_per_rank": 2**40})


def test_buffers_that_cannot_be_had_are_an_error_of_every_rank_before_training(runs: Runs) -> None:
    for failure in runs.ranks.failures(_no_memory, runs.folder):
        assert failure.kind == "SymmMemMemoryError"
        assert "could not be had" in failure.text
    assert runs.ranks.run(_segments) == [0, 0]
