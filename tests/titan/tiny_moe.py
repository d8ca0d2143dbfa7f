"""torchtitan's debug models with experts, cut down to few and narrow layers; ``module = "tests.titan.tiny_moe"``."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug


def _cut(config: Any, layers: int) -> Any:
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    for _, experts, _, _ in model.traverse(GroupedExperts.Config):
        experts.hidden_dim = 64
    return config


def deepseek_v3() -> Any:
    """A dense layer and two with experts."""
    return _cut(deepseek_v3_debugmodel(), 3)


def qwen3() -> Any:
    """One layer with 64 experts."""
    return _cut(qwen3_moe_debug(), 1)


def gpt_oss() -> Any:
    """One layer whose experts have biases."""
    return _cut(gpt_oss_debugmodel_flex(), 1)


def padded() -> Any:
    """Experts whose dispatcher pads for a quantized GEMM."""
    config = deepseek_v3()
    for _, layer, _, _ in config.model_spec.traverse(RoutedExperts.Config):
        known = layer.token_dispatcher
        layer.token_dispatcher = TorchAOTokenDispatcher.Config(
            num_experts=known.num_experts, top_k=known.top_k, pad_multiple=16
        )
    return config
