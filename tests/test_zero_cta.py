from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import compat_nccl, zero_cta
from fsdp_symm.errors import SymmMemConfigError
from fsdp_symm.zero_cta import cta_policy, parse_policy, policy_name, zero_cta_mesh, zero_cta_options

CUDA = torch.device("cuda", 0)
HAS_NCCL = compat_nccl.nccl_class() is not None


class FakeNccl:
    """What ProcessGroupNCCL offers to this package (bindings of torch 2.14.1)."""

    NCCL_CTA_POLICY_ZERO = 2

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(cta_policy=compat_nccl.UNDEFINED)
            self._timeout = timedelta(minutes=10)

    def __init__(self, policy: int = compat_nccl.UNDEFINED, pointer: int = 0) -> None:
        self.options = FakeNccl.Options()
        self.options.config.cta_policy = policy
        self._comm_ptr = lambda: pointer

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, int, int]:
        return (2, 30, 7)


class FakeGroup:
    group_name = "7"

    def __init__(self, backend: object) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> object:
        if self._backend is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backend


@pytest.fixture
def fake_nccl(monkeypatch):
    monkeypatch.setattr(compat_nccl, "nccl_class", lambda: FakeNccl)
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)


@pytest.mark.skipif(HAS_NCCL, reason="a build with NCCL")
def test_a_cpu_build_says_what_is_missing():
    with pytest.raises(SymmMemConfigError, match="with no NCCL") as caught:
        zero_cta_options()
    assert "expected: a CUDA build of torch with NCCL 2.28 or newer" in str(caught.value)
    for reader in (compat_nccl.nccl_version, compat_nccl.nccl_runtime_version):
        with pytest.raises(SymmMemConfigError, match="without NCCL"):
            reader()
    with pytest.raises(SymmMemConfigError):
        zero_cta_mesh((1,), ("dp",))


@pytest.mark.skipif(not HAS_NCCL, reason="needs a build with NCCL")
def test_real_options_carry_the_policy():
    options = zero_cta_options(timedelta(seconds=7), high_priority=True)
    assert options.config.cta_policy == dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    assert options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=7)


@pytest.mark.usefixtures("fake_nccl")
def test_options_carry_policy_timeout_and_priority():
    options = zero_cta_options(timedelta(seconds=7), high_priority=True)
    assert (options.config.cta_policy, options._timeout.seconds, options.is_high_priority_stream) == (2, 7, True)
    assert zero_cta_options()._timeout == timedelta(minutes=10)


@pytest.mark.usefixtures("fake_nccl")
def test_an_old_nccl_has_no_policy(monkeypatch):
    monkeypatch.setattr(compat_nccl, "zero_policy", lambda: None)
    monkeypatch.setattr(compat_nccl, "nccl_version", lambda: (2, 27, 5))
    with pytest.raises(SymmMemConfigError, match=r"with NCCL 2\.27\.5"):
        zero_cta_options()


@pytest.mark.parametrize(
    ("text", "policy", "old"),
    [
        ("0", "default", "default"),
        ("1", "efficiency", "efficiency"),
        ("2", "zero", "zero"),
        ("7", None, "default"),
        ("ZERO", "zero", None),
        ("zero", "zero", None),
        ("EFFICIENCY|ZERO", "zero", None),
        ("DEFAULT", "default", None),
        ("DEFAULT|EFFICIENCY", "efficiency", None),
        ("fast", None, None),
        (" ZERO", None, None),
        ("", None, None),
    ],
)
def test_the_variable_is_read_as_nccl_reads_it(text, policy, old):
    assert parse_policy(text) == parse_policy(text, (2, 30, 7)) == policy
    assert parse_policy(text, (2, 28, 9)) == old


def test_policy_names():
    assert [policy_name(m) for m in (None, 0, 1, 2, 3, -5, 9)] == [
        "default", "default", "efficiency", "zero", "zero", "default", "default",
    ]  # fmt: skip


@pytest.mark.usefixtures("fake_nccl")
def test_the_policy_is_the_groups_unless_the_variable_overrides(monkeypatch):
    assert cta_policy(FakeGroup(FakeNccl(2)), CUDA) == "zero"
    assert cta_policy(FakeGroup(FakeNccl()), CUDA) == "default"
    assert cta_policy(FakeGroup(SimpleNamespace(wrapped_pg=FakeNccl(1))), CUDA) == "efficiency"
    monkeypatch.setenv("NCCL_CTA_POLICY", "0")
    assert zero_cta.policy_and_source(FakeGroup(FakeNccl(2)), CUDA) == ("default", "env")
    monkeypatch.setenv("NCCL_CTA_POLICY", "nonsense")
    assert zero_cta.policy_and_source(FakeGroup(FakeNccl(2)), CUDA) == ("zero", "config")


@pytest.mark.usefixtures("fake_nccl")
@pytest.mark.parametrize(("backend", "word"), [(None, "No backend type"), (SimpleNamespace(), "SimpleNamespace")])
def test_groups_without_nccl_are_named(backend, word):
    with pytest.raises(SymmMemConfigError, match=f"group 7 does not use NCCL(.|\n)*{word}"):
        cta_policy(FakeGroup(backend), CUDA)


@pytest.mark.usefixtures("fake_nccl")
def test_a_communicator_must_exist():
    assert compat_nccl.comm_pointer(FakeGroup(FakeNccl(2, pointer=4096)), CUDA) == 4096
    with pytest.raises(SymmMemConfigError, match=r"no NCCL communicator yet(.|\n)*device_id="):
        compat_nccl.comm_pointer(FakeGroup(FakeNccl(2)), CUDA)


class FakeMesh:
    def __init__(self, policies: dict[str, int]) -> None:
        self._policies = policies

    def get_coordinate(self) -> list[int]:
        return [0]

    def get_group(self, name: str) -> FakeGroup:
        return FakeGroup(FakeNccl(self._policies[name]))


@pytest.fixture
def asked(monkeypatch, fake_nccl):
    """What init_device_mesh was asked for; its groups take the policy of the override unless told otherwise."""
    calls: dict = {}

    def init(device_type, shape, *, mesh_dim_names, backend_override):
        calls.update(device_type=device_type, shape=shape, names=mesh_dim_names, override=dict(backend_override))
        policies = {n: o.config.cta_policy for n, (_, o) in backend_override.items()}
        return FakeMesh({**policies, **calls.get("lost", {})})

    monkeypatch.setattr(zero_cta, "init_device_mesh", init)
    return calls


def test_every_dimension_has_options_of_its_own(asked):
    zero_cta_mesh((2, 4), ("dp_replicate", "dp_shard"), timeout=timedelta(seconds=30))
    assert (asked["device_type"], asked["shape"], asked["names"]) == ("cuda", (2, 4), ("dp_replicate", "dp_shard"))
    options = [o for _, o in asked["override"].values()]
    assert list(asked["override"]) == ["dp_replicate", "dp_shard"]
    assert options[0] is not options[1]
    assert [(o.config.cta_policy, o._timeout.seconds) for o in options] == [(2, 30), (2, 30)]


def test_a_mesh_over_the_whole_world_is_overridden_too(asked):
    zero_cta_mesh((8,), ("dp_shard",))
    assert asked["override"]["dp_shard"][1].config.cta_policy == 2


@pytest.mark.parametrize(
    ("config", "backend"),
    [(None, None), ("cpu:gloo,cuda:nccl", None), ("cuda:nccl", None), ("cpu:gloo,cuda:gloo", "nccl")],
)
def test_groups_keep_the_default_groups_backends_where_it_has_nccl(asked, monkeypatch, config, backend):
    monkeypatch.setattr(dist, "is_initialized", lambda: config is not None)
    monkeypatch.setattr(compat_nccl, "backend_config", lambda: config)
    zero_cta_mesh((2,), ("dp",))
    assert asked["override"]["dp"][0] == backend


def test_a_group_that_lost_the_policy_is_an_error(asked):
    asked["lost"] = {"dp_shard": 0}
    with pytest.raises(SymmMemConfigError, match=r"'dp_shard' came out without the policy(.|\n)*NCCL_CTA_POLICY=2"):
        zero_cta_mesh((2, 2), ("dp_replicate", "dp_shard"))


def test_an_overriding_variable_is_told(asked, monkeypatch):
    monkeypatch.setenv("NCCL_CTA_POLICY", "0")
    with pytest.warns(UserWarning, match="overrides the policy of every group"):
        zero_cta_mesh((2,), ("dp",))


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2), ("dp",)),
        ((), ()),
        (2, ("dp",)),
        ((2,), "dp"),
        ((0,), ("dp",)),
        ((1, 1), ("dp", "dp")),
        ((True,), ("dp",)),
        ((2,), ("",)),
        ((2,), (1,)),
        ((2,), (["a"],)),
        (None, None),
        ((2,), None),
    ],
)
def test_shape_and_names_must_fit(shape, names):
    with pytest.raises(SymmMemConfigError, match=r"do not fit together(.|\n)*found: (.|\n)*fix: for example"):
        zero_cta_mesh(shape, names)


@pytest.mark.parametrize("device_type", ["cpu", "bogus", None])
def test_a_mesh_is_of_gpus(device_type):
    with pytest.raises(
        SymmMemConfigError, match=r"device_type\n  found: (.|\n)*expected: 'cuda': NCCL serves no other"
    ):
        zero_cta_mesh((2,), ("dp",), device_type=device_type)


@pytest.mark.parametrize(("group", "device"), [(None, CUDA), (5, CUDA), ("world", CUDA), (SimpleNamespace(), "cuda")])
def test_a_policy_is_of_a_group_and_a_device(group, device):
    with pytest.raises(SymmMemConfigError, match=r"bad arguments(.|\n)*expected: a process group and a torch.device"):
        cta_policy(group, device)


@pytest.mark.usefixtures("fake_nccl")
@pytest.mark.parametrize("timeout", [5, "x", timedelta(), timedelta(seconds=-1)])
def test_a_timeout_is_a_span_of_time(timeout):
    with pytest.raises(SymmMemConfigError, match=r"timeout\n  found: (.|\n)*expected: a datetime.timedelta above 0"):
        zero_cta_options(timeout)


def gloo_policy() -> str:
    try:
        cta_policy(dist.group.WORLD, torch.device("cpu"))
    except SymmMemConfigError as error:
        return str(error)
    return ""


def test_gloo_groups_have_no_policy(ranks2):
    assert all("does not use NCCL for cpu tensors" in text for text in ranks2.run(gloo_policy))
