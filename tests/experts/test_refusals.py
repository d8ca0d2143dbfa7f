"""What is refused, and in which words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import compat
from fsdp_symm.errors import SymmMemConfigError, SymmMemTimeoutError
from fsdp_symm.experts import (
    AllToAllEP,
    EpBuffer,
    EpConfig,
    EPImplementation,
    EPImplementationInterface,
    GroupedExperts,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    scale_expert_gradients,
    symm_mem_alloc,
)
from fsdp_symm.experts.context import EpContext
from tests.experts.moe import Case, build, make_batch
from tests.experts.test_api import H, K, T, bootstrap, identity_routing, inputs
from tests.harness import Ranks, fresh_ranks

SIZES: dict[str, Any] = {"num_experts": 4, "num_topk": 2, "hidden_dim": 8}

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "topk_0": ({"num_topk": 0}, "EpConfig.num_topk.*found: 0.*an integer >= 1"),
    "topk_bool": ({"num_topk": True}, "EpConfig.num_topk.*found: True"),
    "experts_float": ({"num_experts": 4.0}, "EpConfig.num_experts.*found: 4.0"),
    "hidden_0": ({"hidden_dim": 0}, "EpConfig.hidden_dim.*found: 0"),
    "hidden_huge": ({"hidden_dim": 2**62}, "EpConfig.hidden_dim.*found: 4611686018427387904.*at most 1099511627776"),
    "alignment_huge": ({"alignment": 2**60}, "alignment.*found: 1152921504606846976.*up to 1048576"),
    "topk_above_experts": ({"num_topk": 5}, "found: num_topk 5, num_experts 4.*expected: 1 <= num_topk <= num_experts"),
    "tokens_0": ({"max_tokens_per_rank": 0}, "EpConfig.max_tokens_per_rank.*found: 0"),
    "rows_without_tokens": ({"rows_per_peer": 3}, "a bound on rows needs a bound on tokens"),
    "capacity_0": ({"recv_capacity_per_rank": 0}, "EpConfig.recv_capacity_per_rank.*found: 0"),
    "capacity_alignment": ({"recv_capacity_per_rank": 12, "alignment": 8}, "found: 12 rows with an alignment.*use 16"),
    "alignment_0": ({"alignment": 0}, "alignment.*found: 0.*a power of two"),
    "alignment_12": ({"alignment": 12}, "alignment.*found: 12.*a power of two"),
    "float64": ({"payload_dtype": torch.float64}, "payload dtype.*found: torch.float64.*torch.bfloat16"),
    "int8": ({"payload_dtype": torch.int8}, "payload dtype.*found: torch.int8.*quantize inside the experts"),
    "policy": ({"overflow": "trap"}, "EpConfig.overflow: unknown policy.*found: 'trap'.*grow"),
    "timeout": ({"timeout_s": 0}, "EpConfig.timeout_s.*found: 0"),
    "timeout_text": ({"timeout_s": "x"}, "EpConfig.timeout_s.*found: 'x'"),
    "timeout_none": ({"timeout_s": None}, "EpConfig.timeout_s.*found: None"),
    "timeout_forever": ({"timeout_s": float("inf")}, "EpConfig.timeout_s.*found: inf"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    changes, expected = CONFIGS[name]
    with pytest.raises(SymmMemConfigError, match=f"(?s){expected}"):
        EpConfig(**{**SIZES, **changes})


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EpConfig(**SIZES).num_topk = 1  # type: ignore[misc]


# --- the registry ------------------------------------------------------------------------------------------


class Doubled(AllToAllEP):
    """Somebody's own implementation."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return 2 * super().__call__(hidden_states, top_k_index, top_k_weights)


def test_defining_a_class_registers_nothing() -> None:
    assert EPImplementationInterface.names() == ["all_reduce", "all_to_all", "auto", "copy_engine", "copy_engine_exact"]


@pytest.mark.parametrize("wrong", [int, "all_to_all", lambda *args: None], ids=str)
def test_only_implementations_are_registered(wrong: Any) -> None:
    with pytest.raises(SymmMemConfigError, match=r"(?s)register\('mine'\).*expected: a subclass of EPImplementation"):
        EPImplementationInterface.register("mine", wrong)
    assert "mine" not in EPImplementationInterface.names()


def _custom() -> bool:
    EPImplementationInterface.register("doubled", Doubled)
    case = Case(implementation="doubled")
    model, plain = build(case), build(Case(implementation="all_to_all"))
    batch = make_batch(case, dist.get_rank())
    same = torch.equal(model(batch.tokens, batch.ids, batch.weights), 2 * plain(batch.tokens, batch.ids, batch.weights))
    ep_finalize()
    del EPImplementationInterface._known["doubled"]
    return same


def test_a_registered_name_is_used(ranks2: Ranks) -> None:
    assert ranks2.run(_custom) == [True, True]


def test_an_implementation_needs_a_call() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EPImplementation(lambda: None, None, None)  # type: ignore[abstract, arg-type]


# --- modules -----------------------------------------------------------------------------------------------


def _module(changes: dict[str, Any]) -> None:
    dist.barrier()  # nobody leaves while another rank is still connecting
    build(Case(**changes))


MODULES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_name": (
        {"implementation": "deep_ep"},
        r"unknown implementation.*found: 'deep_ep'.*\['all_reduce', 'all_to_all', 'auto', 'copy_engine'",
    ),
    "all_reduce_of_own_batches": (
        {"implementation": "all_reduce"},
        r"AllReduceEP sends no tokens.*shared_batch=False.*the same tokens on all ranks \[0, 1\]",
    ),
    "uneven_experts": ({"num_experts": 5}, "do not divide among the ranks.*found: 5 experts over 2 ranks"),
    "weighting": ({"weighting": "router"}, "weighting.*found: 'router'.*'combine', 'experts'"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(ranks2: Ranks, name: str) -> None:
    changes, expected = MODULES[name]
    for failure in ranks2.failures(_module, changes):
        assert failure.kind == "SymmMemConfigError"
        assert re.search(expected, failure.text, re.DOTALL), failure.text


def _wrong_experts(kind: str) -> None:
    case = Case(implementation="all_to_all")
    model = build(case)
    answers = {"shape": lambda rows, counts: rows[:, :3], "dtype": lambda rows, counts: rows.bfloat16()}
    model.implementation.experts = answers[kind]
    batch = make_batch(case, dist.get_rank())
    model(batch.tokens, batch.ids, batch.weights)


@pytest.mark.parametrize(
    ("kind", "expected"), [("shape", r"found: torch.float32 \[\d+, 3\]"), ("dtype", r"found: torch.bfloat16 \[")]
)
def test_what_experts_return(ranks2: Ranks, kind: str, expected: str) -> None:
    for failure in ranks2.failures(_wrong_experts, kind):
        assert "what the experts returned" in failure.text
        assert re.search(expected, failure.text)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((2, 8, 8), (2, 8, 8), (2, 8, 4)), "gate and up"),
        (((2, 8, 8), (3, 8, 8), (2, 8, 8)), "gate and up"),
        (((2, 6, 8), (2, 6, 8), (2, 8, 6)), "rows of a multiple of 16 bytes"),
    ],
)
def test_grouped_experts(shapes: Any, expected: str) -> None:
    gate, up, down = (torch.zeros(s) for s in shapes)
    with pytest.raises(SymmMemConfigError, match=f"(?s)GroupedExperts.*{expected}"):
        GroupedExperts(gate=gate, up=up, down=down)


def test_scaling_needs_fully_shard() -> None:
    with pytest.raises(SymmMemConfigError, match=r"(?s)scale_expert_gradients.*found: 0 FSDP modules"):
        scale_expert_gradients(torch.nn.Linear(2, 2), 4)


# --- functions: all of them leave the group usable -------------------------------------------------------


def _calls() -> dict[str, str]:
    """Each wrong call raises before anything is sent, so the ranks stay together."""
    texts: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            texts[name] = f"{type(error).__name__}: {error}"
        else:
            texts[name] = "nothing was raised"

    refused("before_bootstrap", EpBuffer)
    group = bootstrap(max_token_dtype=torch.bfloat16)
    tokens, ids, weights = inputs(torch.bfloat16)
    refused("bootstrap_twice", bootstrap)
    refused("buffer_alignment", lambda: EpBuffer(alignment=3))
    refused("buffer_capacity", lambda: EpBuffer(alignment=8, recv_capacity_per_rank=9))
    refused("buffer_wider", lambda: EpBuffer(payload_dtype=torch.float32))
    buffer = EpBuffer()
    refused("combine_first", lambda: ep_combine(buffer, tokens))
    refused("counts_first", lambda: buffer.tokens_per_expert)
    refused("no_ids", lambda: ep_dispatch(buffer, tokens, None, weights))
    for dtype in (torch.uint32, torch.int16, torch.float32):
        refused(f"ids_{dtype}", lambda dtype=dtype: ep_prepare(buffer, ids.to(dtype)))
    refused("ids_flat", lambda: ep_prepare(buffer, ids.flatten()))
    refused("ids_k", lambda: ep_prepare(buffer, ids[:, :1]))
    refused("ids_rows", lambda: ep_dispatch(buffer, tokens, ids[:2], weights))
    refused("tokens_dtype", lambda: ep_dispatch(buffer, tokens.float(), ids, weights))
    refused("tokens_double", lambda: ep_dispatch(buffer, tokens.double(), ids, weights))
    refused("tokens_width", lambda: ep_dispatch(buffer, tokens[:, :5], ids, weights))
    refused("tokens_dim", lambda: ep_dispatch(buffer, tokens.view(2, 2, H), ids, weights))
    refused("weights_dtype", lambda: ep_dispatch(buffer, tokens, ids, weights.bfloat16()))
    refused("weights_shape", lambda: ep_dispatch(buffer, tokens, ids, weights[:, :1]))
    refused("ids_list", lambda: ep_prepare(buffer, ids.tolist()))
    refused("tokens_none", lambda: ep_dispatch(buffer, None, ids, weights))
    refused("weights_none", lambda: ep_dispatch(buffer, tokens, ids, None))
    elsewhere = ids.to("meta")
    refused("ids_elsewhere", lambda: ep_dispatch(buffer, tokens, elsewhere, weights))
    refused("weights_elsewhere", lambda: ep_dispatch(buffer, tokens, ids, weights.to("meta")))
    rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
    refused("rows_none", lambda: ep_combine(buffer, None))
    refused("row_weights_list", lambda: ep_combine(buffer, rows, recv_topk_weights=[1.0] * 8))
    refused("recv_tuple", lambda: ep_dispatch(buffer, tokens, ids, weights, recv_tokens=(rows,)))
    refused("rows_elsewhere", lambda: ep_combine(buffer, rows.to("meta")))
    refused("recv_elsewhere", lambda: ep_dispatch(buffer, tokens, ids, weights, recv_tokens=rows.detach().to("meta")))
    refused("row_weights_dtype", lambda: ep_combine(buffer, rows, recv_topk_weights=row_weights.long()))
    refused("row_weights_elsewhere", lambda: ep_combine(buffer, rows, recv_topk_weights=row_weights.to("meta")))
    refused("rows_of_another", lambda: ep_combine(buffer, rows[1:]))
    refused("rows_dtype", lambda: ep_combine(buffer, rows.float()))
    refused("weights_of_another", lambda: ep_combine(buffer, rows, recv_topk_weights=row_weights[1:]))
    refused("recv_shape", lambda: ep_dispatch(buffer, tokens, ids, weights, recv_tokens=rows.detach()[1:]))
    refused("recv_dtype", lambda: ep_dispatch(buffer, tokens, ids, weights, recv_tokens=rows.detach().float()))
    leaf = rows.detach().clone().requires_grad_()
    refused("recv_grad", lambda: ep_dispatch(buffer, tokens, ids, weights, recv_tokens=leaf))
    refused("alloc_shape", lambda: symm_mem_alloc((-1, H), torch.bfloat16, group))
    refused("device", lambda: buffer.context.exchange.prepare(ids.to("meta")))
    refused("transport", lambda: EpContext(group, buffer.context.config, "deep_ep"))
    exact_drop = EpConfig(**SIZES, max_tokens_per_rank=4, rows_per_peer=2, overflow="drop")
    refused("exact_drop", lambda: EpContext(group, exact_drop, "copy_engine_exact"))
    unbounded = EpConfig(**SIZES, overflow="raise")
    refused("unbounded", lambda: EpContext(group, unbounded, "copy_engine"))
    out = ep_combine(buffer, rows, recv_topk_weights=row_weights)  # and still everything works
    torch.testing.assert_close(out, tokens, rtol=1e-2, atol=1e-2)
    ep_finalize()
    refused("backward_after_finalize", lambda: out.sum().backward())
    refused("after_finalize", lambda: ep_prepare(buffer, identity_routing(0, 2)))
    return texts


CALLS = {
    "before_bootstrap": "expert parallelism is not set up",
    "bootstrap_twice": r"set up already.*found: EpContext\(copy_engine, ranks=\[0, 1\].*ep_finalize\(\) first",
    "buffer_alignment": "alignment.*found: 3",
    "buffer_capacity": "found: 9 rows with an alignment of 8.*use 16",
    "buffer_wider": "EpBuffer: payload_dtype.*found: torch.float32.*at most 2 bytes",
    "combine_first": "no routing yet",
    "counts_first": "no routing yet",
    "no_ids": "no routing yet",
    "ids_torch.uint32": r"topk_idx.*found: torch.uint32.*torch.int32 or torch.int64.*topk_idx.long\(\)",
    "ids_torch.int16": "topk_idx.*found: torch.int16",
    "ids_torch.float32": "topk_idx.*found: torch.float32",
    "ids_flat": r"topk_idx.*found: shape \[8\].*\[tokens, 2\]",
    "ids_k": r"topk_idx.*found: shape \[4, 1\]",
    "ids_rows": r"topk_idx.*found: shape \[2, 2\].*\[4, 2\]",
    "tokens_double": r"tokens.*found: torch.float64.*fix: cast the tokens$",
    "tokens_dtype": r"tokens.*found: torch.float32.*torch.bfloat16 \(payload_dtype\).*cast",
    "tokens_width": r"tokens.*found: shape \[4, 5\].*\[tokens, 32\]",
    "tokens_dim": r"tokens.*found: shape \[2, 2, 32\].*flatten",
    "weights_dtype": r"topk_weights.*found: torch.bfloat16.*torch.float32.*topk_weights.float\(\)",
    "weights_shape": r"topk_weights.*found: shape \[4, 1\].*\[4, 2\]",
    "ids_list": r"topk_idx.*found: list \[\[.*expected: a tensor",
    "tokens_none": "parallelism: tokens.*found: NoneType None.*expected: a tensor",
    "weights_none": "topk_weights.*found: NoneType None.*expected: a tensor",
    "rows_none": "what the experts returned.*found: NoneType None.*expected: a tensor",
    "row_weights_list": r"recv_topk_weights.*found: list \[1.0, 1.0.*expected: a tensor",
    "recv_tuple": r"recv_tokens.*found: tuple \(.*expected: a tensor",
    "ids_elsewhere": "topk_idx.*found: a tensor on meta.*one on cpu, where the tokens are",
    "weights_elsewhere": r"topk_weights.*found: a tensor on meta.*one on cpu.*\.to\('cpu'\)",
    "rows_elsewhere": "what the experts returned.*found: a tensor on meta.*one on cpu",
    "recv_elsewhere": r"recv_tokens.*found: torch.bfloat16 \[8, 32\] on meta.*on cpu",
    "row_weights_dtype": r"recv_topk_weights.*found: torch.int64 \[8\] on cpu.*torch.float32",
    "row_weights_elsewhere": r"recv_topk_weights.*found: torch.float32 \[8\] on meta.*on cpu",
    "rows_of_another": r"what the experts returned.*found: torch.bfloat16 \[7, 32\].*\[8, 32\]",
    "rows_dtype": "what the experts returned.*found: torch.float32",
    "weights_of_another": r"ep_combine: recv_topk_weights.*found: torch.float32 \[7\] on cpu.*\[8\]",
    "recv_shape": r"ep_dispatch: recv_tokens.*found: torch.bfloat16 \[7, 32\]",
    "recv_dtype": "ep_dispatch: recv_tokens.*found: torch.float32",
    "recv_grad": "ep_dispatch: recv_tokens.*requires grad",
    "alloc_shape": r"symm_mem_alloc: shape.*found: \[-1, 32\]",
    "device": "topk_idx.*found: a tensor on meta.*tensors on cpu",
    "transport": "unknown transport.*found: 'deep_ep'.*copy_engine",
    "exact_drop": "an exact exchange drops no rows",
    "unbounded": "the number of tokens has no bound.*set max_tokens_per_rank, or overflow='grow'",
    "backward_after_finalize": "is closed.*backward pass included",
    "after_finalize": "is closed",
}


def test_every_wrong_call_is_refused_in_words(ranks2: Ranks) -> None:
    for texts in ranks2.run(_calls):
        assert texts.keys() == CALLS.keys()
        for name, expected in CALLS.items():
            assert re.search(expected, texts[name], re.DOTALL), f"{name}: {texts[name]}"
            assert re.search(r"found: .*expected: .*fix: ", texts[name], re.DOTALL), f"{name}: {texts[name]}"


def _alone() -> None:
    bootstrap(num_experts=2)


def test_one_rank_needs_no_exchange() -> None:
    with fresh_ranks(1) as ranks:
        (failure,) = ranks.failures(_alone)
    assert "found: 1 rank" in failure.text


def _left_behind() -> EpBuffer:
    bootstrap()
    return EpBuffer()


def _stale() -> None:
    global _kept
    dist.barrier()  # nobody leaves while another rank is still connecting
    try:
        ep_prepare(_kept, identity_routing(0, 2))
    finally:
        del _kept


def _keep() -> None:
    global _kept
    _kept = _left_behind()


def test_a_destroyed_group_is_named(ranks2: Ranks) -> None:
    ranks2.run(_keep)
    for failure in ranks2.failures(_stale):
        assert "the process group of this context was destroyed" in failure.text
        assert "ep_finalize() or close() before destroy_process_group()" in failure.text


def _huge() -> None:
    bootstrap(max_tokens_per_rank=2**40)


def test_memory_that_cannot_be_had_is_an_error_on_every_rank(ranks2: Ranks) -> None:
    for failure in ranks2.failures(_huge):
        assert failure.kind == "SymmMemMemoryError"
        assert "could not be had" in failure.text


# --- ranks that do not come --------------------------------------------------------------------------------


def _lockstep(absent: bool) -> None:
    """Rank 1 leaves the loop one step early, as with uneven numbers of batches."""
    bootstrap(timeout_s=3.0)
    buffer = EpBuffer()
    try:
        for step in range(3):
            if absent and dist.get_rank() and step == 2:
                compat.default_store().wait(["named"])  # alive, but elsewhere
                break
            ep_prepare(buffer, torch.zeros(T, K, dtype=torch.int64))
    finally:
        if dist.get_rank() == 0:
            compat.default_store().set("named", "")


def test_a_rank_that_runs_fewer_steps_is_named() -> None:
    with fresh_ranks(2) as ranks:
        waiting = ranks.results(_lockstep, True)[0]
    assert waiting.kind == "SymmMemTimeoutError"
    assert "ep dispatch: expert ids" in waiting.text
    assert "ranks [1]" in waiting.text
    assert "every rank to reach this call" in waiting.text


def _wrapped_ids(transport: str) -> None:
    """What int64 has no room for in int32 must stay masked, and not become an expert."""
    bootstrap(transport=transport, overflow="grow")
    answers = []
    for mask in (-1, -(2**32), -(2**32) + 3, torch.iinfo(torch.int64).min):
        tokens, ids, weights = inputs()
        ids = ids.clone()
        ids[::2, 0] = mask
        buffer = EpBuffer()
        rows, row_weights, _ = ep_dispatch(buffer, tokens, ids, weights)
        answers.append(ep_combine(buffer, rows, recv_topk_weights=row_weights))
    ep_finalize()
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


@pytest.mark.parametrize("transport", ["copy_engine", "copy_engine_exact", "all_to_all"])
def test_masks_of_int64_stay_masks(ranks2: Ranks, transport: str) -> None:
    ranks2.run(_wrapped_ids, transport)


def _configured_differently(name: str, values: tuple[Any, Any]) -> None:
    settings: dict[str, Any] = {"overflow": "drop", "recv_capacity_per_rank": 512, "timeout_s": 60.0}
    bootstrap(**settings | {name: values[dist.get_rank()]})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens_per_rank", (T, 2 * T)),
        ("rows_per_peer", (None, T)),
        ("recv_capacity_per_rank", (512, 256)),
        ("overflow", ("raise", "grow")),
        ("transport", ("copy_engine", "all_to_all")),
        ("num_topk", (1, 2)),
    ],
)
def test_ranks_that_are_configured_differently_are_told_at_once(ranks2: Ranks, name: str, values: Any) -> None:
    for failure in ranks2.failures(_configured_differently, name, values, timeout_s=40):
        assert failure.kind == "SymmMemConfigError"
        assert f"found: {name} {values[0]} on rank 0, {name} {values[1]} on rank 1" in failure.text
        assert f"expected: the same {name} on every rank of group [0, 1]\n" in failure.text
        assert "fix: pass the same arguments on all ranks" in failure.text


def _allocated_differently(shapes: tuple[Any, Any], dtypes: tuple[Any, Any]) -> None:
    rank = dist.get_rank()
    symm_mem_alloc(shapes[rank], dtypes[rank], dist.group.WORLD)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "text"),
    [
        (((T, H), (T, 2 * H)), (torch.float32,) * 2, f"shape [{T}, {H}] on rank 0, shape [{T}, {2 * H}] on rank 1"),
        (((T, H),) * 2, (torch.float32, torch.int32), "dtype torch.float32 on rank 0, dtype torch.int32 on rank 1"),
    ],
)
def test_ranks_that_allocate_differently_are_told_at_once(ranks2: Ranks, shapes: Any, dtypes: Any, text: str) -> None:
    for failure in ranks2.failures(_allocated_differently, shapes, dtypes, timeout_s=40):
        assert failure.kind == "SymmMemConfigError"
        assert f"symm_mem_alloc: the ranks pass different arguments\n  found: {text}" in failure.text


def _allocated_alone() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(SymmMemTimeoutError) as caught:
        symm_mem_alloc((T, H), torch.float32, dist.group.WORLD, timeout_s=1.0)
    return str(caught.value)


def test_a_rank_that_allocates_alone_names_the_others() -> None:
    with fresh_ranks(2) as ranks:  # rank 1 has not taken its place in this exchange: no later test may meet it
        text, _ = ranks.run(_allocated_alone)
    assert (
        "comparing the ranks' arguments of symm_mem_alloc: ranks [1] of group [0, 1] did not arrive within 1 s" in text
    )
    assert "fix: do the same on every rank of the group, in the same order" in text


def test_timeouts_may_differ(ranks2: Ranks) -> None:
    ranks2.run(_configured_differently, "timeout_s", (30.0, 60.0))


def _empty_slice_in_place() -> None:
    group = bootstrap()
    tokens = symm_mem_alloc([T, H], torch.float32, group)
    tokens.fill_(1.0)
    rows = 0 if dist.get_rank() == 0 else T
    _, ids, weights = inputs()
    buffer = EpBuffer()
    received, row_weights, _ = ep_dispatch(buffer, tokens[:rows], ids[:rows], weights[:rows])
    answer = ep_combine(buffer, received, recv_topk_weights=row_weights)
    assert answer.shape == (rows, H)
    assert torch.allclose(answer, torch.ones(rows, H))
    ep_finalize()


def test_a_rank_without_tokens_may_hold_them_in_symmetric_memory(ranks2: Ranks) -> None:
    ranks2.run(_empty_slice_in_place)


def _buffer_of_nothing() -> str:
    bootstrap(recv_capacity_per_rank=64)
    with pytest.raises(SymmMemConfigError) as caught:
        EpBuffer(recv_capacity_per_rank=0)
    ep_finalize()
    return str(caught.value)


def test_a_capacity_of_zero_is_not_the_default(ranks2: Ranks) -> None:
    assert "found: 0" in ranks2.run(_buffer_of_nothing)[0]


@pytest.mark.parametrize("name", [3, "", None])
def test_an_implementation_needs_a_name(name: Any) -> None:
    with pytest.raises(SymmMemConfigError, match=r"register(.|\n)*expected: a name"):
        EPImplementationInterface.register(name, AllToAllEP)
    assert all(isinstance(known, str) and known for known in EPImplementationInterface.names())
