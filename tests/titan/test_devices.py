"""Which GPU a rank gets, with faked counts."""

from __future__ import annotations

import pytest

from fsdp_symm.titan.devices import device_index, place_rank
from fsdp_symm.titan.overlay import ConfigError


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
        " (NCCL 2.30 or newer)"
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
