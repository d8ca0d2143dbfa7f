"""Random programs: models with random options, random things done between and inside steps, compared with plain FSDP2.

360 steps in all, 500 on a GPU (profiles/gpu_checks.sh); the seed is printed, FSDP_SYMM_SEED gives another.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import set_symm_mem_for_comm
from tests.harness import Ranks
from tests.models import DEVICE, WAYS, Options, batch, build, grads, held_bytes, poison

SEED = int(os.environ.get("FSDP_SYMM_SEED", "20261129"))
MODELS, STEPS = 10, 30
MODELS_4, STEPS_4 = int(os.environ.get("FSDP_SYMM_RANDOM_MODELS_4", "3")), 20  # HSDP on four ranks
SMALLEST_BLOCK = 512 if DEVICE == "cuda" else 1  # of torch's allocator, bytes: a tensor leaked a step is more than that


def _random_options(rng: random.Random, hsdp: bool) -> Options:
    mixed = rng.choice([(None, None), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), (None, "float16")])
    blocks = rng.randint(1, 5)
    return Options(
        hsdp=hsdp,
        blocks=blocks,
        hidden=rng.choice([1, 7, 16, 20, 33]),
        param_dtype=mixed[0],
        reduce_dtype=mixed[1],
        shard_dim=rng.choice([0, 0, 0 if hsdp else 1]),
        reshard=rng.choice([None, True, False]),
        cpu_offload=rng.random() < 0.2 and not hsdp,
        frozen=rng.random() < 0.2 and blocks > 1,  # something must be left to train
        unused=rng.random() < 0.3,
        # FSDP2 itself refuses zero gradients in param_dtype beside accumulated ones in reduce_dtype (torch 2.13-2.14).
        reduce_unused=rng.random() < 0.3 and mixed[0] == mixed[1],
        prefetch=rng.choice([0, 0, 1, 2]),
        input_buffers=rng.choice([1, 1, 2, 3]),
        separate_group=rng.random() < 0.2,
        checkpointing=rng.random() < 0.3,
        shared_block=rng.random() < 0.2,
        parameterless_root=rng.random() < 0.2,
    )


def _random_step(model: Any, optimizer: torch.optim.Optimizer, step: int, rng: random.Random) -> list[float]:
    """One step of random shape; ``rng`` decides the program, so both models and all ranks do the same."""
    losses = []
    if rng.random() < 0.2:
        with torch.no_grad():
            losses.append(model(batch(step, 9)).float().sum().item())
    micros = rng.randint(1, 3)
    sync_last_only = rng.random() < 0.5
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1 or not sync_last_only)
        if rng.random() < 0.3:
            early = rng.sample(list(model.blocks), rng.randint(1, min(2, len(model.blocks))))
            for handle in [block.unshard(async_op=rng.random() < 0.5) for block in early]:
                if handle is not None:
                    handle.wait()
        loss = model(batch(step, micro)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    if rng.random() < 0.2:
        for block in model.blocks:
            block.set_reshard_after_forward(rng.random() < 0.5)
    if rng.random() < 0.2:
        model.reshard()
    optimizer.step()
    return losses


def _program(seed: int, way: str, steps: int = STEPS, hsdp: bool = False) -> dict[str, int]:
    rng = random.Random(seed)
    options = _random_options(rng, hsdp)
    plain, model = build(options), build(options)
    switch = dict(WAYS[way][0])
    if switch.get("all_gather") == "staged":
        switch["slots"] = 8  # outputs of modules that are unsharded early live on
    handle = set_symm_mem_for_comm(model, strict=True, timeout_s=60, **switch)
    poison(handle.arenas)
    start_bytes = handle.stats().arena_bytes
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (plain, model)]
    own = random.Random(seed + dist.get_rank())
    held: list[int] = []
    calls = 0
    for step in range(steps):
        step_seed = rng.randrange(10**9)
        expected = _random_step(plain, optimizers[0], step, random.Random(step_seed))
        if own.random() < 0.3:
            gc.collect()  # on this rank alone
        found = _random_step(model, optimizers[1], step, random.Random(step_seed))
        where = f"seed {seed}, step {step}, {switch}, {options}"
        assert found == expected or str(found) == str(expected), f"{where}: {found} != {expected}"
        for index, (a, b) in enumerate(zip(grads(model), grads(plain), strict=True)):
            assert (a is None and b is None) or torch.equal(a, b), f"{where}: gradient {index}"
        assert handle.stats().arena_bytes == start_bytes, where
        set_to_none = rng.random() < 0.5
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        if (step + 1) % (steps // 5) == 0:
            held.append(held_bytes(plain, model))
        if rng.random() < 0.05:  # off for a while, with the memory still held
            handle.disable()
            calls += sum(handle.stats().calls["all_gather"].values())
            handle.close()
            handle = set_symm_mem_for_comm(model, strict=True, timeout_s=60, **switch)
            assert handle.stats().arena_bytes == start_bytes, where
    calls += sum(handle.stats().calls["all_gather"].values())
    assert "plain" not in handle.stats().calls["all_gather"]
    # The first fifth makes optimizer states and what streams keep. Then less than one block of the allocator a step.
    assert max(held[1:]) - held[0] < SMALLEST_BLOCK * (steps - steps // 5), f"seed {seed}: bytes held {held}, {options}"
    handle.close()
    return {"all_gathers": calls}


def _in_turn(count: int) -> list[tuple[int, str]]:
    """So many numbers, each with a way: all ways come equally often."""
    return list(zip(range(count), itertools.cycle(WAYS), strict=False))


@pytest.mark.parametrize(("index", "way"), _in_turn(MODELS))
def test_random_programs_equal_plain_fsdp2(ranks2: Ranks, index: int, way: str) -> None:
    print(f"FSDP_SYMM_SEED={SEED} (model {index}, seed {SEED + index}, {way})")
    for answer in ranks2.run(_program, SEED + index, way):
        assert answer["all_gathers"] > STEPS // 2


@pytest.mark.parametrize(("index", "way"), _in_turn(MODELS_4))
def test_random_hsdp_programs_equal_plain_fsdp2(ranks4: Ranks, index: int, way: str) -> None:
    print(f"FSDP_SYMM_SEED={SEED} (HSDP model {index}, seed {SEED + 1000 + index}, {way})")
    for answer in ranks4.run(_program, SEED + 1000 + index, way, STEPS_4, True):
        assert answer["all_gathers"] > STEPS_4 // 2
