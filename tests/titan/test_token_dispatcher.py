"""Our token dispatcher around torchtitan's own experts on two real ranks, against its local one in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.experts.moe import poison
from tests.harness import Ranks

E, K, H, INNER, T = 4, 2, 16, 32, 6
KINDS = ["swiglu", "biases"]


def _parameters(kind: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(11)
    shapes: dict[str, tuple[int, ...]] = {
        "swiglu": {"w1_EFD": (E, INNER, H), "w2_EDF": (E, H, INNER), "w3_EFD": (E, INNER, H)},
        "biases": {
            "mlp1_weight_EGD": (E, 2 * INNER, H),
            "mlp1_bias_EG": (E, 2 * INNER),
            "mlp2_weight_EDF": (E, H, INNER),
            "mlp2_bias_ED": (E, H),
        },
    }[kind]
    return {name: torch.randn(shape, generator=random) / 4 for name, shape in shapes.items()}


def _routed(kind: str, mine: slice, dispatcher: Any) -> Any:
    """torchtitan's ``RoutedExperts`` with some of the experts."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    set_spmd_backend("partial_dtensor")
    parameters = _parameters(kind)
    experts = {"swiglu": GroupedExperts, "biases": GptOssGroupedExperts}[kind]
    inner = experts.Config(dim=H, hidden_dim=INNER, num_experts=mine.stop - mine.start)
    routed = RoutedExperts(RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher))
    for name, parameter in parameters.items():
        getattr(routed.inner_experts, name).data.copy_(parameter[mine])
    return routed


def _batch(rank: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[1, T, H]`` tokens, ``[1, T, K]`` scores and ids; ranks have other numbers of tokens."""
    random = torch.Generator().manual_seed(20 + rank)
    count = T + 3 * rank
    ids = torch.rand(count, E, generator=random).argsort(1)[:, :K].contiguous()
    if routing == "first rank":
        ids = torch.tensor([[0, 1]]).expand(count, K).contiguous()
    tokens, scores = torch.randn(1, count, H, generator=random), torch.rand(1, count, K, generator=random)
    return tokens.requires_grad_(), scores.requires_grad_(), ids.unsqueeze(0)


def _step(routed: Any, rank: int, routing: str) -> list[torch.Tensor]:
    """Output, and gradients of tokens and scores."""
    tokens, scores, ids = _batch(rank, routing)
    counts = torch.bincount(ids.flatten(), minlength=E)
    out = routed(tokens, scores, ids, counts)
    out.square().sum().backward()
    assert tokens.grad is not None
    assert scores.grad is not None
    return [out.detach(), tokens.grad, scores.grad]


def _dispatcher(**settings: Any) -> Any:
    import fsdp_symm.titan.trainer  # noqa: F401  # prepares a machine without a GPU before torchtitan is imported
    from fsdp_symm.titan.dispatcher import ExchangeTokenDispatcher

    sizes = {"num_experts": E, "top_k": K, "hidden_dim": H, "payload_dtype": "float32", "timeout_s": 20.0}
    return ExchangeTokenDispatcher.Config(**{**sizes, "implementation": "copy_engine", **settings})


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.isfinite(found).all(), f"{what}: not finite"
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()), msg=what)


def _parity(kind: str, routing: str, settings: dict[str, Any]) -> None:
    """torchtitan computes in bfloat16 inside its experts, but the same rows in both programs."""
    from fsdp_symm.experts import ep_finalize

    rank, half = dist.get_rank(), E // 2
    torch.use_deterministic_algorithms(True)
    routed = _routed(kind, slice(rank * half, (rank + 1) * half), _dispatcher(**settings))
    routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    reference = _routed(kind, slice(0, E), _dispatcher())
    assert reference.token_dispatcher.ep_mesh is None, "ours is torchtitan's local dispatcher then"
    native = _routed(kind, slice(0, E), LocalTokenDispatcher.Config(num_experts=E, top_k=K))
    poison()
    found = _step(routed, rank, routing)
    expected = [_step(reference, r, routing) for r in range(2)]
    for mine, theirs, name in zip(found, expected[rank], ("output", "tokens", "scores"), strict=True):
        _close(mine, theirs, name)
    for name, parameter in routed.inner_experts.named_parameters():
        whole = getattr(reference.inner_experts, name).grad
        assert parameter.grad is not None, name
        _close(parameter.grad, whole[rank * half : (rank + 1) * half], name)
    if kind == "swiglu":  # torchtitan's own cannot run gpt_oss in float32
        for mine, theirs in zip(_step(native, rank, routing), expected[rank], strict=True):
            assert torch.equal(mine, theirs)
    torch.use_deterministic_algorithms(False)
    ep_finalize()


SETTINGS = [
    {},
    {"implementation": "all_to_all"},
    {"implementation": "copy_engine_exact"},
    {"overflow": "drop", "max_tokens_per_rank": 9, "recv_capacity_per_rank": 40},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("routing", ["any", "first rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_torchtitan(titan_ranks: Ranks, kind: str, routing: str, settings: dict[str, Any]) -> None:
    """``first rank``: the other rank's experts get nothing. The capacity leaves rows behind the zones, in memory
    full of NaN."""
    titan_ranks.run(_parity, kind, routing, settings)


def _grow() -> tuple[int, int]:
    """The first batch is recomputed after the second has made the buffers grow."""
    from fsdp_symm.experts import ep_finalize

    half, rank = E // 2, dist.get_rank()
    routed = _routed("swiglu", slice(rank * half, (rank + 1) * half), _dispatcher(max_tokens_per_rank=4))
    routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    expected = _step(routed, rank, "any")
    (context,) = routed.token_dispatcher._contexts.values()
    before = context.exchange.room()
    tokens, scores, ids = _batch(rank, "any")
    out = checkpoint(routed, tokens, scores, ids, torch.bincount(ids.flatten(), minlength=E), use_reentrant=False)
    many = torch.randn(1, 300, H), torch.rand(1, 300, K), torch.zeros(1, 300, K, dtype=torch.int64)
    routed(*many, torch.tensor([300 * K, 0, 0, 0]))
    out.square().sum().backward()
    assert tokens.grad is not None
    assert torch.equal(tokens.grad, expected[1])
    after = context.exchange.room()
    ep_finalize()
    return before, after


def test_a_recomputation_after_buffers_have_grown(titan_ranks: Ranks) -> None:
    for before, after in titan_ranks.run(_grow):
        assert before < 300 <= after, "the case is what it says"


def _closed() -> None:
    from fsdp_symm.experts import ep_finalize

    routed = _routed("swiglu", slice(0, E // 2), _dispatcher())
    routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    ep_finalize()
    _step(routed, dist.get_rank(), "any")


def test_a_call_after_the_end_is_named(titan_ranks: Ranks) -> None:
    for failure in titan_ranks.failures(_closed):
        assert failure.kind == "SymmMemError"
        assert "is closed" in failure.text
        assert "calls before ep_finalize() or close()" in failure.text


def _without_an_exchange() -> None:
    from fsdp_symm.experts import EPImplementation, EPImplementationInterface

    class Mine(EPImplementation):
        """Computes everything itself."""

        def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
            return batch[0]

    EPImplementationInterface.register("mine", Mine)
    routed = _routed("swiglu", slice(0, E // 2), _dispatcher(implementation="mine"))
    routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))


def test_an_implementation_that_exchanges_nothing_cannot_dispatch(ranks2: Ranks) -> None:
    for failure in ranks2.failures(_without_an_exchange):
        assert failure.kind == "SymmMemConfigError"
        assert "found: 'mine' (Mine), which has no dispatch and combine of its own" in failure.text
        assert "fix: use 'copy_engine', 'copy_engine_exact', 'all_to_all' or 'auto'" in failure.text
