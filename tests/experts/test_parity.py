"""Every implementation against one dense process: outputs, and gradients of tokens, router weights and experts.

Uninitialised memory and slots hold NaN, and the experts return NaN in the rows behind their zones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.experts.moe import Case, check_steps
from tests.harness import Ranks

EXCHANGES = ["copy_engine", "copy_engine_exact", "all_to_all"]
DTYPES = ["float32", "bfloat16", "float16"]


@st.composite
def cases(draw: Any, ranks: int) -> Case:
    """Sizes, routing, masks, types, policies."""
    experts = ranks * draw(st.integers(1, 3))
    routing = draw(st.sampled_from(["any", "any", "distinct", "first_rank", "last_expert", "even_experts"]))
    k = draw(st.integers(1, min(experts, 4)))
    shared = draw(st.booleans())
    implementation = draw(st.sampled_from([*EXCHANGES, "auto", *(["all_reduce"] if shared else [])]))
    tokens = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    config: dict[str, Any] = {"alignment": draw(st.sampled_from([1, 1, 8]))}
    bounded = draw(st.booleans())
    if bounded:
        config["max_tokens_per_rank"] = 9 + draw(st.integers(0, 2))
        config["overflow"] = draw(st.sampled_from(["raise", "drop", "grow"]))
        roomy = ranks * 11 * k + 8 * experts
        config["recv_capacity_per_rank"] = draw(st.sampled_from([None, -(-roomy // 8) * 8]))
    if bounded and implementation != "copy_engine_exact":
        config["rows_per_peer"] = draw(st.sampled_from([None, 9]))  # packed, and still enough for everybody
    return Case(
        tokens=tuple([tokens[0]] * ranks if shared else tokens),
        topk=k,
        num_experts=experts,
        hidden=draw(st.sampled_from([1, 5, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=routing,
        masked=draw(st.sampled_from([0.0, 0.3, 1.0])),
        idx_dtype=draw(st.sampled_from(["int32", "int64"])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        implementation=implementation,
        weighting=draw(st.sampled_from(["combine", "experts"])),
        shared_batch=shared,
        config=config,
    )


FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(deadline=None, max_examples=60, suppress_health_check=FIXTURES, derandomize=True)
@given(case=cases(2))
def test_any_program_on_two_ranks(ranks2: Ranks, case: Case) -> None:
    ranks2.run(check_steps, case)


@settings(deadline=None, max_examples=25, suppress_health_check=FIXTURES, derandomize=True)
@given(case=cases(4))
def test_any_program_on_four_ranks(ranks4: Ranks, case: Case) -> None:
    ranks4.run(check_steps, case)


@pytest.mark.parametrize("implementation", EXCHANGES)
@pytest.mark.parametrize("tokens", [(4, 0), (0, 3), (0, 0), (5, 4), (1, 0)], ids=str)
def test_ranks_without_tokens(ranks2: Ranks, implementation: str, tokens: tuple[int, int]) -> None:
    ranks2.run(check_steps, Case(tokens=tokens, implementation=implementation), 3)


@pytest.mark.parametrize("implementation", EXCHANGES)
def test_one_token_in_the_world(ranks4: Ranks, implementation: str) -> None:
    ranks4.run(check_steps, Case(tokens=(1, 0, 0, 0), implementation=implementation), 2)


@pytest.mark.parametrize("implementation", EXCHANGES)
@pytest.mark.parametrize("routing", ["first_rank", "last_expert"])
def test_ranks_that_receive_nothing(ranks2: Ranks, implementation: str, routing: str) -> None:
    answers = ranks2.run(check_steps, Case(implementation=implementation, routing=routing))
    idle = answers[1 if routing == "first_rank" else 0]
    assert not any(any(map(any, expert)) for expert in idle["first"]), "gradients are zeros, not missing"


@pytest.mark.parametrize("implementation", EXCHANGES)
def test_repeated_experts_of_one_token(ranks2: Ranks, implementation: str) -> None:
    case = Case(topk=4, num_experts=4, routing="even_experts", implementation=implementation, hidden=5)
    ranks2.run(check_steps, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_implementations_agree_in_every_bit(ranks2: Ranks, dtype: str) -> None:
    """They differ in what travels, not in what is added up in which order."""
    case = Case(tokens=(9, 6), topk=3, dtype=dtype, masked=0.2, config={"max_tokens_per_rank": 9})
    reference = ranks2.run(check_steps, case)
    for implementation in ["copy_engine_exact", "all_to_all"]:
        assert ranks2.run(check_steps, replace(case, implementation=implementation)) == reference, implementation
    packed = replace(case, config={"max_tokens_per_rank": 9, "rows_per_peer": 9})
    assert ranks2.run(check_steps, packed) == reference, "packed rows"


@pytest.mark.parametrize("implementation", ["copy_engine", "all_to_all"])
def test_alignment_with_empty_and_odd_zones(ranks2: Ranks, implementation: str) -> None:
    """Padding rows count in weight gradients of grouped GEMMs: they have to be zero."""
    case = Case(tokens=(17, 3), routing="even_experts", implementation=implementation, config={"alignment": 16})
    ranks2.run(check_steps, case, 3)


def test_many_local_experts(ranks2: Ranks) -> None:
    ranks2.run(check_steps, Case(num_experts=66, topk=3, tokens=(20, 20)))
