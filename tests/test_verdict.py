"""What the switch makes of the guards' findings, with faked facts where the hardware cannot show them."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import pytest

from fsdp_symm import fsdp, guards, verdict
from fsdp_symm.errors import SymmMemConfigError
from fsdp_symm.guards import GroupFacts
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import Ring

DEFAULT = GroupFacts(policies=("default",) * 4)


@dataclass(frozen=True)
class FakePlan:
    """What :func:`verdict.judge_all` reads of a plan."""

    rings: tuple[Ring, ...]
    name: str = "g"
    backend: str = "nccl"
    group: object = None
    device: object = None


GATHER = FakePlan((Ring("all_gather", 2, 4096), Ring("reduce_scatter", 1, 4096)))
REDUCE = FakePlan((Ring("reduce_scatter", 1, 4096),))


def _judge(monkeypatch, facts: GroupFacts, plan: FakePlan, dedicated: bool = False) -> verdict.Verdict:
    monkeypatch.setattr(guards, "collect", lambda *_, **__: facts)
    return verdict.judge_all([plan], dedicated=dedicated, timeout_s=1)["g"]


def test_a_good_group_runs_on_copy_engines(monkeypatch) -> None:
    judged = _judge(monkeypatch, GroupFacts(), GATHER)
    assert judged.engines["all_gather"][0] == "copy engine"
    assert judged.engines["reduce_scatter"][0] == "symmetric kernel"
    assert judged.blocked is None
    assert judged.downgrades == ()


def test_the_policy_counts_only_where_all_gathers_run(monkeypatch) -> None:
    judged = _judge(monkeypatch, DEFAULT, GATHER)
    assert judged.engines["all_gather"][0] == "symmetric kernel"
    assert "the CTA policy is not zero" in judged.downgrades[0]
    assert _judge(monkeypatch, DEFAULT, REDUCE).downgrades == ()


def test_a_dedicated_communicator_brings_its_own_policy(monkeypatch) -> None:
    judged = _judge(monkeypatch, DEFAULT, GATHER, dedicated=True)
    assert judged.engines["all_gather"][0] == "copy engine"
    assert judged.downgrades == ()
    forced = dataclasses.replace(DEFAULT, policy_source="env")
    assert _judge(monkeypatch, forced, GATHER, dedicated=True).engines["all_gather"][0] == "symmetric kernel"


def test_a_blocked_group_is_an_error_under_strict_and_a_warning_otherwise(monkeypatch) -> None:
    two = GroupFacts(
        ranks=(0, 1),
        hosts=("a", "a"),
        devices=("GPU-0", "GPU-1"),
        policies=("zero", "zero"),
        nccl_version=(2, 30, 7),
        nccl_built=(2, 30, 7),
    )
    judged = _judge(monkeypatch, two, GATHER)
    assert judged.blocked is not None
    assert "NCCL_NVLS_ENABLE=0" in judged.blocked
    with pytest.raises(SymmMemConfigError, match=r"2\.31\.2"):
        fsdp._announce_verdicts({"g": judged}, strict=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fsdp._announce_verdicts({"g": judged}, strict=False)
    assert {w.category for w in seen} == {SymmMemFallbackWarning}
    assert any("2.31.2" in str(w.message) for w in seen)
