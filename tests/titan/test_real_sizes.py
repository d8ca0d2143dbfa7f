"""The configurations of real size, and models with fewer layers than their registry has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_symm.titan.config import load
from fsdp_symm.titan.overlay import ConfigError

REPO = Path(__file__).parents[2]
MOE = "configs/debug_moe_cpu.toml"
REAL_SIZE = {"llama3_8b.toml": 8_030_261_248, "moe_16b.toml": 9_273_157_632}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.model_spec.model.build().parameters())


@pytest.mark.parametrize("name", REAL_SIZE)
def test_real_sizes_are_as_large_as_their_comments_compute(name: str) -> None:
    from tokenizers import Tokenizer

    config = load(f"configs/{name}")
    assert _parameters(config) == REAL_SIZE[name]
    training = config.training
    assert (training.seq_len, training.local_batch_size) == (8192, 1)
    assert (training.mixed_precision_param, training.mixed_precision_reduce) == ("bfloat16", "float32")
    assert config.activation_checkpoint is not None, "nothing recomputed does not fit"
    vocabulary = Tokenizer.from_file(f"{config.hf_assets_path}/tokenizer.json").get_vocab_size()
    assert vocabulary <= config.model_spec.model.vocab_size
    assert f" {vocabulary} tokens: " in (REPO / "configs" / name).read_text()
    assert (config.expert_parallel.implementation == "copy_engine") is (name == "moe_16b.toml")
    # the layer that the comment's formula counts on
    fewer = load(f"configs/{name}", ["--model.layers", "4"])
    layer = {"llama3_8b.toml": 218_112_000, "moe_16b.toml": 584_847_872}[name]
    assert _parameters(config) - _parameters(fewer) == (len(config.model_spec.model.layers) - 4) * layer


def test_a_model_keeps_its_first_layers() -> None:
    whole, some = load(MOE).model_spec.model, load(MOE, ["--model.layers", "3"]).model_spec.model
    assert (len(whole.layers), len(some.layers)) == (6, 3)
    assert [layer.moe is None for layer in some.layers] == [True, False, False]  # the first one is the dense one
    assert len(load(MOE, ["--model.layers", "6"]).model_spec.model.layers) == 6


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["7"], "command line: model.layers: found 7; allowed for 'deepseek_v3_debugmodel': 0 (all) to 6"),
        (["-1"], "command line: model.layers: found -1; allowed: 0 or more"),
        (["two"], "command line: model.layers: found 'two' (str); allowed: int"),
        (
            ["2", "--model.module", "flux", "--model.config", "flux_debugmodel"],
            "command line: model.layers: found 2 for 'flux_debugmodel', whose model has no list of layers;"
            " allowed: 0 (the whole model)",
        ),
    ],
)
def test_layers_that_a_model_does_not_have(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(MOE, ["--model.layers", *words])
    assert str(refused.value) == complaint


def test_attention_takes_heads_whose_values_are_narrower_than_their_queries() -> None:
    from torch.nn.attention import SDPBackend
    from torchtitan.models.common.attention import ScaledDotProductAttention

    load(MOE)
    kernels = ScaledDotProductAttention.sdpa_backends
    assert kernels.index(SDPBackend.EFFICIENT_ATTENTION) < kernels.index(SDPBackend.MATH)
    assert SDPBackend.CUDNN_ATTENTION not in kernels
