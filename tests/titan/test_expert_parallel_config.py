"""``[expert_parallel]`` in TOML: what is refused, and what reaches the dispatchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_symm.titan.config import load
from fsdp_symm.titan.overlay import ConfigError

REPO = Path(__file__).parents[2]
MOE = "configs/debug_moe_cpu.toml"
KEY = "expert_parallel"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# (overrides without their prefix, the one-line message)
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "negative tokens": ({"max_tokens_per_rank": "-1"}, f"{KEY}.max_tokens_per_rank: found -1; allowed: 0 or more"),
    "negative rows": ({"rows_per_peer": "-1"}, f"{KEY}.rows_per_peer: found -1; allowed: 0 or more"),
    "negative capacity": (
        {"recv_capacity_per_rank": "-1"},
        f"{KEY}.recv_capacity_per_rank: found -1; allowed: 0 or more",
    ),
    "negative factor": (
        {"recv_capacity_factor": "-0.5"},
        f"{KEY}.recv_capacity_factor: found -0.5; allowed: a finite number of 0 or more",
    ),
    "endless factor": (
        {"recv_capacity_factor": "inf"},
        f"{KEY}.recv_capacity_factor: found inf; allowed: a finite number of 0 or more",
    ),
    "two capacities": (
        {"recv_capacity_factor": "1.5", "recv_capacity_per_rank": "64"},
        f"{KEY}.recv_capacity_factor: found 1.5 beside recv_capacity_per_rank = 64; allowed: one of the two",
    ),
    "more tokens than a size holds": (
        {"max_tokens_per_rank": "99999999999999999999"},
        f"{KEY}.max_tokens_per_rank: found 99999999999999999999; allowed: at most {2**40}",
    ),
    "a factor beyond all rows": (
        {"recv_capacity_factor": "1e308"},
        f"{KEY}.recv_capacity_factor: found 1e+308, inf rows of 768 in an even share; allowed: at most {2**40} rows",
    ),
    "timeout": ({"timeout_s": "0"}, f"{KEY}.timeout_s: found 0; allowed: seconds from 0.01 to 1000000"),
    "unknown policy": (
        {"overflow": "rais"},
        f"{KEY}.overflow: found 'rais' (str); allowed: 'grow', 'raise', 'drop'; nearest: 'raise'",
    ),
    "unknown implementation": (
        {"implementation": "copy_engin"},
        f"{KEY}.implementation: found 'copy_engin' (str); allowed: 'torchtitan', 'auto', 'copy_engine',"
        " 'copy_engine_exact', 'all_to_all'; nearest: 'copy_engine'",
    ),
    "policy of torchtitan": (
        {"implementation": "torchtitan", "overflow": "drop"},
        f"{KEY}.overflow: found 'drop' beside implementation = 'torchtitan', which has no such setting; allowed:"
        " 'grow', or another implementation",
    ),
    "timeout of torchtitan": (
        {"implementation": "torchtitan", "timeout_s": "5"},
        f"{KEY}.timeout_s: found 5.0 beside implementation = 'torchtitan', which has no such setting; allowed:"
        " 60.0, or another implementation",
    ),
    "rows by collectives": (
        {"implementation": "all_to_all", "rows_per_peer": "8"},
        f"{KEY}.rows_per_peer: found 8 beside implementation = 'all_to_all'; allowed: 0, or 'copy_engine',"
        " 'copy_engine_exact' as the implementation",
    ),
    "exact rows dropped": (
        {"implementation": "copy_engine_exact", "rows_per_peer": "8", "overflow": "drop"},
        f"{KEY}.rows_per_peer: found 8 beside implementation = 'copy_engine_exact' and overflow = 'drop': an exact"
        " exchange drops nothing on the way; allowed: 0 (bound what a rank receives instead)",
    ),
    "too few tokens": (
        {"max_tokens_per_rank": "255", "overflow": "raise"},
        f"{KEY}.max_tokens_per_rank: found 255 with overflow = 'raise'; allowed: 0, or 256 (the tokens of one local"
        " batch) or more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_with_its_key(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        load(MOE, [f"--{KEY}.{key}={value}" for key, value in changes.items()])
    assert str(refused.value) == f"command line: {message}"


@pytest.mark.parametrize("degree", [3, 0, -2])
def test_a_degree_that_does_not_divide_the_experts(degree: int) -> None:
    with pytest.raises(ConfigError) as refused:
        load(MOE, ["--parallelism.expert_parallel_degree", str(degree)])
    assert str(refused.value) == (
        f"command line: parallelism.expert_parallel_degree: found {degree} for the 8 experts of"
        " layers.1.moe.routed_experts; allowed: a divisor of 8, from 1 on"
    )


@pytest.mark.parametrize("key", ["seq_len", "local_batch_size"])
def test_a_batch_without_tokens(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(MOE, [f"--training.{key}", "0"])
    assert str(refused.value) == f"command line: training.{key}: found 0; allowed: 1 or more"


def test_spmd_types_are_not_checked_through_our_operators() -> None:
    words = ["--debug.spmd_typechecking", "--parallelism.spmd_backend", "spmd_types"]
    with pytest.raises(ConfigError) as refused:
        load(MOE, words)
    assert str(refused.value) == (
        "command line: debug.spmd_typechecking: found true beside expert_parallel.implementation = 'copy_engine',"
        " whose operators carry no SPMD types; allowed: false"
    )


def test_a_dispatcher_that_pads_for_quantized_experts_is_not_replaced() -> None:
    words = ["--model.module=tests.titan.tiny_moe", "--model.config=padded"]
    with pytest.raises(ConfigError) as refused:
        load(MOE, words)
    assert str(refused.value) == (
        f"{MOE}: expert_parallel.implementation: found 'copy_engine' for a model whose layers.1.moe.routed_experts"
        " asks for TorchAOTokenDispatcher; allowed: 'torchtitan'"
    )
    assert load(MOE, [*words, "--expert_parallel.implementation=torchtitan"])


def test_a_model_without_experts_takes_any_implementation() -> None:
    dense = load("configs/debug_dense_cpu.toml", ["--expert_parallel.implementation=copy_engine"])
    _install(dense)
    assert load("configs/debug_dense_cpu.toml").expert_parallel.implementation == "torchtitan"


def _install(config: Any) -> list[Any]:
    """The dispatcher configs of the built trainer."""
    from fsdp_symm.titan import experts

    experts.install(config)
    return [layer.token_dispatcher for _, layer in experts.moe_layers(config.model_spec)]


@pytest.mark.parametrize(("model", "layers"), [("deepseek_v3", 2), ("qwen3", 1), ("gpt_oss", 1)])
def test_every_layer_gets_our_dispatcher_with_the_sizes_of_the_batch(model: str, layers: int) -> None:
    config = load(MOE, ["--model.module=tests.titan.tiny_moe", f"--model.config={model}"])
    found = _install(config)
    assert len(found) == layers
    experts, topk = {"deepseek_v3": (8, 3), "qwen3": (64, 8), "gpt_oss": (8, 4)}[model]
    for dispatcher in found:
        assert type(dispatcher).__qualname__ == "ExchangeTokenDispatcher.Config"
        assert (dispatcher.num_experts, dispatcher.top_k, dispatcher.hidden_dim) == (experts, topk, 256)
        assert dispatcher.implementation == "copy_engine"
        assert dispatcher.payload_dtype == "bfloat16"
        assert dispatcher.max_tokens_per_rank == 2 * 128
        assert dispatcher.recv_capacity_per_rank is None
        assert dispatcher.rows_per_peer is None


def test_every_size_reaches_the_dispatcher() -> None:
    sizes = {"max_tokens_per_rank": 300, "rows_per_peer": 100, "timeout_s": 7.0, "overflow": "raise"}
    words = [f"--{KEY}.{key}={value}" for key, value in sizes.items()]
    first, *_ = _install(load(MOE, [*words, f"--{KEY}.recv_capacity_factor=1.25"]))
    assert {key: getattr(first, key) for key in sizes} == sizes
    assert first.recv_capacity_per_rank == 300 * 3 * 1.25
    first, *_ = _install(load(MOE, [f"--{KEY}.recv_capacity_per_rank=90"]))
    assert first.recv_capacity_per_rank == 90


def test_parallel_dimensions_that_shard_the_sequence_take_fewer_tokens() -> None:
    from fsdp_symm.titan.experts import tokens_per_rank

    words = ["--parallelism.tensor_parallel_degree=2", "--training.seq_len=129"]
    assert tokens_per_rank(load(MOE, words)) == 2 * 65


def test_torchtitans_dispatcher_is_left_alone() -> None:
    config = load(MOE, ["--expert_parallel.implementation=torchtitan"])
    before = [id(layer) for layer in _dispatchers(config)]
    assert [id(dispatcher) for dispatcher in _install(config)] == before


def _dispatchers(config: Any) -> list[Any]:
    from fsdp_symm.titan.experts import moe_layers

    return [layer.token_dispatcher for _, layer in moe_layers(config.model_spec)]


def test_selective_checkpoints_keep_what_was_exchanged() -> None:
    import torch

    policy = load(MOE, ["--activation_checkpoint.mode=selective"]).activation_checkpoint
    kept = policy.build().get_save_ops()
    assert torch.ops.fsdp_symm_ep.dispatch.default in kept
    assert torch.ops._c10d_functional.all_to_all_single.default in kept, "torchtitan's own as well"
    assert type(load(MOE, ["--activation_checkpoint.mode=full"]).activation_checkpoint).__qualname__ == "FullAC.Config"
