"""What the switch makes of the guards' findings, with faked facts where the hardware cannot show them."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import pytest

from fsdp_symm import fsdp, guards, verdict
from fsdp_symm.decisions import make_report
from fsdp_symm.errors import SymmMemConfigError
from fsdp_symm.guards import GroupFacts
from fsdp_symm.memory.mixin import SymmMemFallbackWarning
from fsdp_symm.plan import BufferNeed, Ring

DEFAULT = GroupFacts(policies=("default",) * 4)


@dataclass(frozen=True)
class FakePlan:
    """What :func:`verdict.judge_all` reads of a plan."""

    rings: tuple[Ring, ...]
    needs: tuple[BufferNeed, ...] = ()
    name: str = "g"
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    backend: str = "nccl"
    group: object = None
    device: object = None


SMALL = (
    BufferNeed("m", "reduce_scatter", (0, 1, 2, 3), "g", 4096, "float32"),
    BufferNeed("m", "unshard", (0, 1, 2, 3), "g", 1 << 40, "bfloat16"),
)
GATHER = FakePlan((Ring("all_gather", 2, 4096), Ring("reduce_scatter", 1, 4096)), SMALL)
DIRECT = FakePlan((Ring("unshard", 2, 4096), Ring("reduce_scatter", 1, 4096)), SMALL)
REDUCE = FakePlan((Ring("reduce_scatter", 1, 4096),), SMALL)


def _judge(
    monkeypatch,
    facts: GroupFacts,
    plan: FakePlan,
    dedicated: bool = False,
    reduce_scatter: str = "nccl",
    addresses: bool = True,
) -> verdict.Verdict:
    monkeypatch.setattr(guards, "collect", lambda *_, **__: facts)
    monkeypatch.setattr(verdict, "peer_addresses_known", lambda: addresses)
    return verdict.judge_all([plan], dedicated=dedicated, timeout_s=1, reduce_scatter=reduce_scatter)["g"]


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


def test_direct_placement_and_pulled_sums_need_no_policy(monkeypatch) -> None:
    judged = _judge(monkeypatch, DEFAULT, DIRECT, reduce_scatter="copy_engine")
    assert judged.engines["unshard"] == ("copy engine", "peer copies; placed directly")
    assert judged.engines["reduce_scatter"] == (
        "copy engine",
        "peer copies, summed here by one kernel in rank order",
    )
    assert (judged.blocked, judged.downgrades, judged.staged) == (None, (), None)


def test_nvlink_counts_only_where_nccl_moves_the_bytes(monkeypatch) -> None:
    apart = GroupFacts(one_nvlink_domain=False)
    assert _judge(monkeypatch, apart, DIRECT, reduce_scatter="copy_engine").downgrades == ()
    for plan in (GATHER, DIRECT, REDUCE):  # an all-gather, or a reduce-scatter, of NCCL's
        judged = _judge(monkeypatch, apart, plan, reduce_scatter="nccl")
        assert "the ranks are not in one NVLink domain" in judged.downgrades[0]
        assert judged.engines["reduce_scatter"][0] == "plain kernel"


def _need(mib: int, *, ranks: int = 4, narrow: bool = False) -> BufferNeed:
    """Of a reduce-scatter whose chunk of a rank has so many MiB."""
    return BufferNeed("m", "reduce_scatter", tuple(range(ranks)), "g", ranks * mib << 20, "float32", narrow)


def _reducing(*needs: BufferNeed) -> FakePlan:
    return dataclasses.replace(DIRECT, needs=(*DIRECT.needs, *needs))


@pytest.mark.parametrize(("mib", "engine"), [(31, "symmetric kernel"), (32, "copy engine")])
def test_auto_pulls_large_reduce_scatters(monkeypatch, mib, engine) -> None:
    way, plan = ("copy_engine" if mib >= 32 else "nccl"), _reducing(_need(mib))
    judged = _judge(monkeypatch, GroupFacts(), plan, reduce_scatter="auto")
    assert judged.engines["reduce_scatter"][0] == engine
    assert judged.reduce_way == way
    assert verdict.reduce_way([DIRECT, plan], 1, "auto") == way, "the largest of all plans"
    assert verdict.reduce_way([plan], 1, "nccl") == "nccl"
    assert verdict.reduce_way([], 1, "auto") == "nccl"


@pytest.mark.parametrize(
    ("sharers", "needs", "way"),
    [
        (2, [_need(63, ranks=2)], "nccl"),
        (2, [_need(64, ranks=2)], "copy_engine"),
        (2, [_need(63, ranks=2, narrow=True)], "nccl"),
        (2, [_need(64, ranks=8)], "copy_engine"),  # pairs on four GPUs
        (4, [_need(256)], "nccl"),
        (4, [_need(63, narrow=True)], "nccl"),
        (4, [_need(64, narrow=True)], "copy_engine"),
        (4, [_need(64, narrow=True), _need(63)], "copy_engine"),
        (4, [_need(65, narrow=True), _need(64)], "nccl"),
        (4, [_need(64), _need(65, narrow=True)], "nccl"),
    ],
)
def test_auto_asks_more_where_ranks_share_a_gpu(sharers, needs, way) -> None:
    plan = _reducing(*needs)
    assert verdict.reduce_way([plan], sharers, "auto") == way
    assert verdict.reduce_way([plan], sharers, "copy_engine") == "copy_engine"


CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("environment", "backend"),
    [
        (CONNECTIONS, "nccl"),
        (CONNECTIONS, "cuda"),
        (SEGMENTS, "nccl"),
        (SEGMENTS, "cuda"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "nccl"),
    ],
)
def test_settings_that_undo_the_switch_are_errors_under_strict(monkeypatch, environment, backend) -> None:
    plan = dataclasses.replace(DIRECT, backend=backend)
    judged = _judge(monkeypatch, GroupFacts(environment=environment), plan)
    assert judged.engines["unshard"][0] == judged.engines["all_gather"][0] == "copy engine", "the engine is the same"
    (text,) = judged.downgrades
    assert next(iter(environment)) in text
    with pytest.raises(SymmMemConfigError, match=next(iter(environment))):
        fsdp._announce_verdicts({"g": judged}, strict=True)
    with pytest.warns(SymmMemFallbackWarning, match=next(iter(environment))):
        fsdp._announce_verdicts({"g": judged}, strict=False)


@pytest.mark.parametrize("backend", ["nccl", "cuda"])
def test_advice_is_in_the_report(monkeypatch, backend) -> None:
    facts = GroupFacts(environment={"CUDA_LAUNCH_BLOCKING": "1"})
    judged = _judge(monkeypatch, facts, dataclasses.replace(DIRECT, backend=backend))
    assert judged.downgrades == ()
    assert "nothing overlaps" in judged.advice[0]
    report = make_report([], (), [], {"g": judged, "h": judged})
    assert report.findings == judged.advice, "each once"
    assert str(report).endswith(judged.advice[0])


def test_an_old_driver_matters_to_nccls_all_gathers_only(monkeypatch) -> None:
    old = GroupFacts(driver_version=(12, 4))
    assert _judge(monkeypatch, old, DIRECT, reduce_scatter="copy_engine").downgrades == ()
    assert "the driver is too old" in _judge(monkeypatch, old, GATHER).downgrades[0]


def test_facts_of_a_shared_gpu_reach_the_choice(monkeypatch) -> None:
    shared, plan = GroupFacts(devices=("GPU-0",) * 4), _reducing(_need(256))
    assert _judge(monkeypatch, shared, plan, reduce_scatter="auto").reduce_way == "nccl"
    assert _judge(monkeypatch, GroupFacts(), plan, reduce_scatter="auto").reduce_way == "copy_engine"
    narrow = _reducing(_need(256, narrow=True))
    assert _judge(monkeypatch, shared, narrow, reduce_scatter="auto").reduce_way == "copy_engine"


@pytest.mark.parametrize(
    ("facts", "addresses", "reason"),
    [
        (GroupFacts(hosts=("a", "a", "b", "b")), True, "the group spans 2 hosts"),
        (GroupFacts(), False, "this NCCL does not tell peers' addresses (ncclGetPeerDevicePointer, 2.29)"),
    ],
)
def test_what_keeps_shards_from_being_placed(monkeypatch, facts, addresses, reason) -> None:
    judged = _judge(monkeypatch, facts, DIRECT, reduce_scatter="copy_engine", addresses=addresses)
    assert judged.staged == reason
    assert judged.engines["reduce_scatter"][0] != "copy engine"
    assert judged.reduce_way == "nccl"
    (text,) = [t for t in judged.downgrades if "reduce-scatters are not pulled" in t]
    assert f"found: {reason}" in text
    assert "fix: reduce_scatter='auto' or 'nccl'" in text
    unasked = _judge(monkeypatch, facts, DIRECT, reduce_scatter="auto", addresses=addresses).downgrades
    assert not [t for t in unasked if "reduce-scatters are not pulled" in t]


def test_peer_memory_asks_only_for_reachable_gpus_and_its_backend(monkeypatch) -> None:
    plan = dataclasses.replace(DIRECT, backend="cuda")
    assert _judge(monkeypatch, dataclasses.replace(DEFAULT, nccl_version=None), plan).blocked is None
    taken = GroupFacts(symm_backend="NVSHMEM", wanted_symm_backend="CUDA")
    assert "torch's symmetric-memory backend of this process is another one" in str(
        _judge(monkeypatch, taken, plan).blocked
    )
    assert "cannot address each other" in str(_judge(monkeypatch, GroupFacts(peer_access=False), plan).blocked)


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
