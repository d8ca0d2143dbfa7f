"""The ``[expert_parallel]`` section applied to a model: checks, dispatchers, what recomputation keeps, figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from fsdp_symm.experts import ops  # noqa: F401  # registers the operators named below
from fsdp_symm.experts.context import open_contexts
from fsdp_symm.titan.dispatcher import ExchangeTokenDispatcher
from fsdp_symm.titan.overlay import FieldError
from fsdp_symm.titan.sections import MOST_ROWS, ExpertParallelSection

# The dispatchers that ours stands in for; others pad for quantized experts, or were asked for by the model.
_REPLACEABLE = (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config, ExchangeTokenDispatcher.Config)


def moe_layers(model_spec: Any) -> Iterator[tuple[str, Any]]:
    """Name and config of every ``RoutedExperts`` of a model."""
    for name, config, _, _ in model_spec.model.traverse(RoutedExperts.Config):
        yield name, config


def tokens_per_rank(config: Any) -> int:
    """The most tokens that a rank brings to one MoE layer: cp and tp shard the sequence before it.

    Args:
        config: a ``Trainer.Config``.
    """
    parallelism, training = config.parallelism, config.training
    shards = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    pipelined = parallelism.pipeline_parallel_degree > 1
    batch = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    return batch * -(-training.seq_len // shards)


def check(config: Any) -> None:
    """Refuse what the section's implementation cannot do for this model; a model without experts is fine.

    Args:
        config: a ``SymmTrainer.Config``.

    Raises:
        FieldError: with the dotted key.
    """
    section: ExpertParallelSection = config.expert_parallel
    if section.implementation == "torchtitan" or config.model_spec is None:
        return
    layers = list(moe_layers(config.model_spec))
    for name, layer in layers:
        _check_layer(name, layer, section, config.parallelism.expert_parallel_degree)
    if layers and config.debug.spmd_typechecking and config.parallelism.spmd_backend == "spmd_types":
        raise FieldError(
            "debug.spmd_typechecking",
            f"found true beside expert_parallel.implementation = {section.implementation!r}, whose operators carry no"
            " SPMD types; allowed: false",
        )
    needed = tokens_per_rank(config)
    if layers and needed < 1:
        name = "seq_len" if config.training.seq_len < 1 else "local_batch_size"
        raise FieldError(f"training.{name}", f"found {getattr(config.training, name)}; allowed: 1 or more")
    for _, layer in layers:
        _check_capacity(section, (section.max_tokens_per_rank or needed) * layer.token_dispatcher.top_k)
    if layers and section.overflow != "grow" and 0 < section.max_tokens_per_rank < needed:
        raise FieldError(
            "expert_parallel.max_tokens_per_rank",
            f"found {section.max_tokens_per_rank} with overflow = {section.overflow!r}; allowed: 0, or {needed} (the"
            " tokens of one local batch) or more",
        )


def _check_layer(name: str, layer: Any, section: ExpertParallelSection, degree: int) -> None:
    dispatcher = layer.token_dispatcher
    if type(dispatcher) not in _REPLACEABLE:
        raise FieldError(
            "expert_parallel.implementation",
            f"found {section.implementation!r} for a model whose {name} asks for"
            f" {type(dispatcher).__qualname__.removesuffix('.Config')}; allowed: 'torchtitan'",
        )
    if degree < 1 or dispatcher.num_experts % degree:
        raise FieldError(
            "parallelism.expert_parallel_degree",
            f"found {degree} for the {dispatcher.num_experts} experts of {name}; allowed: a divisor of"
            f" {dispatcher.num_experts}, from 1 on",
        )


def _check_capacity(section: ExpertParallelSection, even_share: int) -> None:
    rows = section.recv_capacity_factor * even_share
    if rows > MOST_ROWS:
        raise FieldError(
            "expert_parallel.recv_capacity_factor",
            f"found {section.recv_capacity_factor:g}, {rows:g} rows of {even_share} in an even share; allowed: at most"
            f" {MOST_ROWS} rows",
        )


def install(config: Any) -> None:
    """Put our dispatcher in the place of torchtitan's in every MoE layer; ``"torchtitan"`` leaves all as they are.

    Args:
        config: a checked ``SymmTrainer.Config`` whose model is not built yet.
    """
    section: ExpertParallelSection = config.expert_parallel
    if section.implementation == "torchtitan":
        return
    tokens = section.max_tokens_per_rank or tokens_per_rank(config)
    for _, layer in moe_layers(config.model_spec):
        known = layer.token_dispatcher
        layer.token_dispatcher = ExchangeTokenDispatcher.Config(
            num_experts=known.num_experts,
            top_k=known.top_k,
            hidden_dim=layer.inner_experts.dim,
            implementation=section.implementation,
            payload_dtype=config.training.mixed_precision_param,
            overflow=section.overflow,
            max_tokens_per_rank=tokens,
            rows_per_peer=section.rows_per_peer or None,
            recv_capacity_per_rank=_capacity(section, tokens * known.top_k),
            timeout_s=section.timeout_s,
        )


def _capacity(section: ExpertParallelSection, even_share: int) -> int | None:
    if section.recv_capacity_factor:
        return math.ceil(section.recv_capacity_factor * even_share)
    return section.recv_capacity_per_rank or None


class SymmSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpoints, which also keep what our exchanges brought instead of exchanging again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's keys, unchanged."""

    def get_save_ops(self) -> set[Any]:
        """torchtitan's operators and ours."""
        ours = torch.ops.fsdp_symm_ep
        return super().get_save_ops() | {ours.prepare.default, ours.dispatch.default, ours.combine.default}


def keep_exchanges(policy: Any) -> Any:
    """The activation checkpoint config with ours in the place of torchtitan's selective one."""
    if type(policy) is not SelectiveAC.Config:
        return policy
    return SymmSelectiveAC.Config(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})


@dataclass(frozen=True)
class ExchangeStats:
    """The exchanges' figures, as ``fsdp_symm.titan.metrics.CommStats``."""

    arena_bytes: int
    bytes_moved: Mapping[str, Mapping[str, int]]
    wait_s: float


def stats() -> list[ExchangeStats]:
    """One entry for each context: layers of one shape share theirs."""
    found = [context.exchange.traffic() for context in open_contexts()]
    return [ExchangeStats(t.arena_bytes, {"experts": {t.engine: t.bytes_moved}}, t.wait_s) for t in found]
