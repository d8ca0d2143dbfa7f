"""transformers' own models with ``ep_implementation="copy_engine"``: real ranks against one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Ranks, fresh_ranks

transformers: Any = pytest.importorskip(
    "transformers", minversion="5.24", reason='needs transformers: pip install "transformers>=5.24"'
)
pytest.importorskip("accelerate", reason="transformers loads distributed models with it: pip install accelerate")
torch: Any = pytest.importorskip("torch")

E, K, H, LENGTH = 4, 2, 32, 6
COMMON = {
    "vocab_size": 64,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LAYOUTS = {
    "own batches": {"fsdp_size": 2, "ep_size": 2},
    "shared batch": {"tp_size": 2, "ep_size": 2},
}


def _config(name: str) -> Any:
    if name == "mixtral":
        return transformers.MixtralConfig(**COMMON, num_local_experts=E)
    return transformers.Qwen3MoeConfig(**COMMON, num_experts=E, moe_intermediate_size=24, head_dim=8)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, saved as ``from_pretrained`` reads it."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(_config(request.param))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate" in name:
                parameter.normal_(std=0.5)  # answers of experts that differ, and routes that are no ties
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with fresh_ranks(2) as ranks:
        yield ranks


def _load(folder: Path, layout: str | None, implementation: str = "copy_engine", **options: Any) -> Any:
    if layout is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    import torch.distributed as dist

    import fsdp_symm.hf

    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    fsdp_symm.hf.register()
    config = transformers.distributed.DistributedConfig(**LAYOUTS[layout], ep_implementation=implementation)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def _batch(rank: int, layout: str) -> Any:
    """Embeddings of a sentence; with batches of their own, ranks have other numbers of tokens."""
    random = torch.Generator().manual_seed(7 + (rank if layout == "own batches" else 0))
    length = LENGTH + (2 * rank if layout == "own batches" else 0)
    return torch.randn(1, length, H, generator=random)


def _full(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _gradients(model: Any) -> dict[str, Any]:
    return {n: _full(p.grad) for n, p in model.named_parameters() if "experts" in n or "gate.weight" in n}


def _checkpointed(model: Any, mode: str) -> None:
    model.train()
    if mode != "train":
        kwargs = {"use_reentrant": mode == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def _close(found: Any, expected: Any, what: str) -> None:
    scale = float(expected.abs().max())
    assert scale > 1e-6, f"{what}: nothing to compare"
    error = float((found - expected).abs().max()) / scale
    assert error < 2e-5, f"{what}: relative error {error:.1e}"


def _train(folder: Path, layout: str, mode: str) -> list[str]:
    """One step of this rank's batch; the reference is one process with everybody's."""
    import torch.distributed as dist

    from fsdp_symm.experts import ep_finalize
    from fsdp_symm.experts.context import open_contexts

    rank = dist.get_rank()
    model, reference = _load(folder, layout), _load(folder, None)
    _checkpointed(model, mode)
    reference.train()
    batches = [_batch(r, layout).requires_grad_() for r in range(2 if layout == "own batches" else 1)]
    outs = [reference(inputs_embeds=b).logits for b in batches]
    torch.stack([out.square().mean() for out in outs]).mean().backward()
    index = rank if layout == "own batches" else 0

    mine = _batch(rank, layout).requires_grad_()
    out = model(inputs_embeds=mine).logits
    _close(out.detach(), outs[index].detach(), "logits")
    out.square().mean().backward()
    _close(mine.grad, batches[index].grad * len(batches), "input gradient")
    found, expected = _gradients(model), _gradients(reference)
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for name in expected:
        _close(found[name], expected[name], name)
    transports = [context.transport for context in open_contexts()]
    ep_finalize()
    return transports


@pytest.mark.parametrize("mode", ["train", "checkpoint", "reentrant"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_one_process(ranks: Ranks, folder: Path, layout: str, mode: str) -> None:
    for transports in ranks.run(_train, folder, layout, mode):
        assert sorted(transports) == (["copy_engine"] if layout == "own batches" else ["copy_engine", "local"])


def _infer(folder: Path, layout: str, dtype: str) -> None:
    import torch.distributed as dist

    from fsdp_symm.experts import ep_finalize

    model, reference = (_load(folder, chosen).to(getattr(torch, dtype)).eval() for chosen in (layout, None))
    batch = _batch(dist.get_rank(), layout).to(getattr(torch, dtype))
    # FSDP2 (torch 2.13) runs under no_grad, but not in inference mode.
    with torch.no_grad() if layout == "own batches" else torch.inference_mode():
        out, expected = (m(inputs_embeds=batch).logits for m in (model, reference))
    assert out.dtype == expected.dtype
    assert not out.requires_grad
    scale = float(expected.float().abs().max())
    assert float((out - expected).float().abs().max()) / scale < (2e-5 if dtype == "float32" else 5e-2)
    ep_finalize()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_equals_one_process(ranks: Ranks, folder: Path, layout: str, dtype: str) -> None:
    ranks.run(_infer, folder, layout, dtype)


def _one_token(folder: Path, kernel: str) -> list[int]:
    """A rank whose experts get nothing: one token a rank, all of its routes on rank 0."""
    import torch.distributed as dist

    from fsdp_symm.experts import ep_finalize

    model = _load(folder, "own batches", experts_implementation=kernel)
    experts = [m for n, m in model.named_modules() if n.endswith("mlp.experts")]
    weights = torch.full((1, K), 0.5, requires_grad=True)
    x = torch.ones(1, H, requires_grad=True)
    out = experts[0](x, torch.tensor([[0, 1]]), weights)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert bool((x.grad != 0).any())
    assert bool((weights.grad != 0).any())
    zeros = [int((_local(p.grad) == 0).all()) for p in experts[0].parameters()]
    ep_finalize()
    assert dist.get_world_size() == 2
    return zeros


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
def test_a_rank_whose_experts_get_nothing_has_zero_gradients(ranks: Ranks, folder: Path, kernel: str) -> None:
    assert ranks.run(_one_token, folder, kernel) == [[0, 0], [1, 1]]


def _two_lengths(folder: Path) -> None:
    """A second forward makes the buffers grow before the first one is recomputed."""
    import torch.distributed as dist

    from fsdp_symm.experts import ep_finalize
    from fsdp_symm.experts.context import open_contexts

    model = _load(folder, "own batches")
    _checkpointed(model, "checkpoint")
    random = torch.Generator().manual_seed(dist.get_rank())
    short, long = (torch.randn(n, 40, H, generator=random).requires_grad_() for n in (1, 3))
    first = model(inputs_embeds=short).logits.square().mean()
    (context,) = open_contexts()
    before = context.exchange.room()
    second = model(inputs_embeds=long).logits.square().mean()
    assert context.exchange.room() > before, "the case is what it says"
    (first + second).backward()
    assert short.grad is not None
    assert long.grad is not None
    ep_finalize()


def test_buffers_may_grow_between_a_forward_and_its_recomputation(ranks: Ranks, folder: Path) -> None:
    ranks.run(_two_lengths, folder)


def _wrong_name(folder: Path) -> None:
    _load(folder, "own batches", implementation="copy_engines")


def test_an_unknown_name_is_refused_by_transformers_with_ours_among_the_known(ranks: Ranks, folder: Path) -> None:
    for failure in ranks.failures(_wrong_name, folder):
        assert "`ep_implementation='copy_engines'` names no registered implementation" in failure.text
        assert "'copy_engine'," in failure.text


def test_registering_twice_is_registering_once() -> None:
    import fsdp_symm.hf

    first = fsdp_symm.hf.register()
    assert fsdp_symm.hf.register() is first
    interface = transformers.distributed.expert_parallel.EPImplementationInterface()
    assert interface["copy_engine"] is first
    assert {"auto", "all_to_all", "all_reduce"} <= set(interface)
    assert issubclass(first, transformers.distributed.expert_parallel.EPImplementation)
