"""Which GPU and backend a rank gets, with faked counts, and the zero-CTA policy, with a faked NCCL."""

from __future__ import annotations

import logging

import pytest

from fsdp_symm.errors import SymmMemConfigError, problem
from fsdp_symm.titan import devices
from fsdp_symm.titan.devices import check_backend, device_index, place_rank, request_zero_cta
from fsdp_symm.titan.overlay import ConfigError, FieldError


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "gpus", "share", "masked", "index"),
    [
        (3, 4, 8, False, False, 3),
        (3, 4, 4, True, False, 3),
        (1, 2, 1, True, False, 0),
        (5, 8, 3, True, False, 2),
        (1, 2, 1, False, True, 0),
    ],
)
def test_index(local_rank: int, local_ranks: int, gpus: int, share: bool, masked: bool, index: int) -> None:
    assert device_index(local_rank, local_ranks, gpus, share=share, masked=masked) == index


@pytest.mark.parametrize(("gpus", "masked"), [(1, False), (2, False), (2, True)])
def test_too_many_ranks_without_permission(gpus: int, masked: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        device_index(0, 4, gpus, share=False, masked=masked)
    assert str(refused.value) == (
        f"devices: found 4 ranks for {gpus} GPU(s) on this host; expected at most one rank a GPU;"
        f" fix: torchrun --nproc-per-node {gpus}, or set NCCL_MULTI_RANK_GPU_ENABLE=1 to share GPUs"
        " (NCCL 2.30.7 or newer)"
    )


@pytest.mark.parametrize(
    ("extra", "gpus", "expected"),
    [
        ({}, 8, "3"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 2, "1"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_VISIBLE_DEVICES": "6"}, 1, "0"),
        ({"CUDA_VISIBLE_DEVICES": "6"}, 1, "0"),
    ],
)
def test_local_rank_is_rewritten_for_torchtitan(extra: dict[str, str], gpus: int, expected: str) -> None:
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **extra}
    place_rank(environment, gpus)
    assert environment["LOCAL_RANK"] == expected


def test_sharing_needs_the_variable_to_be_one() -> None:
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    with pytest.raises(ConfigError):
        place_rank(environment, 2)


@pytest.mark.parametrize(
    ("backend", "on_cpu", "text"),
    [
        ("auto", True, None),
        ("auto", False, None),
        ("host", True, None),
        ("nccl", False, None),
        ("nccl", True, "found 'nccl'; allowed on CPU: 'auto', 'host'"),
        ("host", False, "found 'host'; allowed on a GPU: 'auto', 'nccl', 'cuda'"),
    ],
)
def test_a_backend_serves_one_device(backend: str, on_cpu: bool, text: str | None) -> None:
    if text is None:
        check_backend(backend, on_cpu=on_cpu)
        return
    with pytest.raises(FieldError) as refused:
        check_backend(backend, on_cpu=on_cpu)
    assert refused.value.field == "fsdp_symm.backend"
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("found", "left", "warns"),
    [
        (None, "2", False),
        ("2", "2", False),
        ("ZERO", "ZERO", False),
        ("0", "0", True),
        ("EFFICIENCY", "EFFICIENCY", True),
    ],
)
def test_zero_cta_goes_to_every_communicator_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None, left: str, warns: bool
) -> None:
    monkeypatch.setattr(devices, "zero_cta_options", lambda: None)
    environment = {"RANK": "0"} | ({} if found is None else {"NCCL_CTA_POLICY": found})
    with caplog.at_level(logging.WARNING):
        request_zero_cta(environment)
    assert environment["NCCL_CTA_POLICY"] == left
    texts = [f"fsdp_symm.zero_cta = true has no effect: NCCL_CTA_POLICY={left} is set and beats it"] if warns else []
    assert [record.getMessage() for record in caplog.records] == texts


def test_zero_cta_without_such_an_nccl_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise SymmMemConfigError(problem("no policy", found="NCCL 2.27.5", expected="NCCL 2.28", fix="update torch"))

    monkeypatch.setattr(devices, "zero_cta_options", refuse)
    environment: dict[str, str] = {}
    with pytest.raises(ConfigError) as refused:
        request_zero_cta(environment)
    assert str(refused.value) == (
        "fsdp_symm.zero_cta: no policy; found: NCCL 2.27.5; expected: NCCL 2.28; fix: update torch"
    )
    assert environment == {}
