"""Our own wire on GPUs: reuse of slots without any synchronisation, sums in rank order, stuck and dead peers.

Run with ``FSDP_SYMM_TEST_DEVICE=cuda``; ranks share GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import SymmMemArena, set_symm_mem_for_comm
from fsdp_symm.plan import Ring
from fsdp_symm.wire import wire_of
from fsdp_symm.wire.pulls import Block, PullPlan
from fsdp_symm.wire.reduce import reduce_chunks
from tests.harness import Ranks
from tests.models import DEVICE, Options, build

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FSDP_SYMM_TEST_DEVICE=cuda")

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("FSDP_SYMM_SEED", "20261130"))
BACKENDS = ("nccl", "cuda")


def _arena(backend: str, ring: Ring) -> SymmMemArena:
    return SymmMemArena(dist.group.WORLD, [ring], backend=backend, device=torch.device("cuda", 0))


def _slots_without_synchronisation(backend: str, seed: int, calls: int) -> None:
    """Tiny pulls on random streams, ranks at different speeds; every result is looked at when all calls are over."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(seed), random.Random(seed + 1 + rank)
    arena = _arena(backend, Ring("unshard", 2, 4096))
    wire = wire_of(arena)
    plans = {
        n: PullPlan(
            [Block(p, 0, 0, p * n, n) for p in range(world_size) if p != rank], rank=rank, world_size=world_size
        )
        for n in (16, 512, 4096)
    }
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for call in range(calls):
        size, stream = common.choice(list(plans)), streams[common.randrange(3)]
        target = torch.full((world_size * size,), 0xFF, dtype=torch.uint8, device="cuda")
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            slot, lease = arena.acquire_lease("unshard", size, owner="t")
            slot.fill_((7 * call + rank) % 251)
            target.narrow(0, rank * size, size).copy_(slot)
            wire.pull(lease, arena.next_epoch(lease), plans[size], [target], what="t", async_op=False)
            del slot
        results.append((call, size, target))
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(2_000_000))
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
    torch.cuda.synchronize()
    for call, size, target in results:
        expected = [(7 * call + peer) % 251 for peer in range(world_size)]
        assert target.view(world_size, size).cpu().eq(torch.tensor(expected).view(-1, 1)).all(), f"call {call}"
    arena.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_slot_is_never_overwritten_early(request: pytest.FixtureRequest, backend: str, world_size: int) -> None:
    print(f"FSDP_SYMM_SEED={SEED}")
    request.getfixturevalue(f"ranks{world_size}").run(_slots_without_synchronisation, backend, SEED, 3000)


def _sums(backend: str) -> None:
    from fsdp_symm.wire import pull_reduce

    rank, world_size = dist.get_rank(), dist.get_world_size()
    arena = _arena(backend, Ring("reduce_scatter", 1, 64 << 20))
    wire = wire_of(arena)
    wire.reduce_scatter_way = "copy_engine"
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.3)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for numel in (1, 1000, 1 << 20):
            for op in ops:
                whole = torch.randn(world_size, world_size, numel, generator=torch.Generator().manual_seed(3)).to(dtype)
                expected = torch.empty(numel, dtype=dtype)
                reduce_chunks(expected, [whole[r][rank] for r in range(world_size)], op)
                for piece in (1 << 16, pull_reduce.PIECE_BYTES):
                    found = _sum_once(wire, arena, whole[rank], op, piece)
                    assert torch.equal(found, expected), (dtype, numel, op, piece)
    arena.close()


def _sum_once(wire: Any, arena: SymmMemArena, mine: torch.Tensor, op: Any, piece: int) -> torch.Tensor:
    from fsdp_symm.wire import pull_reduce

    kept, pull_reduce.PIECE_BYTES = pull_reduce.PIECE_BYTES, piece
    try:
        slot, lease = arena.acquire_lease("reduce_scatter", mine.nbytes, owner="t")
        source = slot.view(mine.dtype)
        source.copy_(mine.flatten())
        output = torch.full((mine.size(1),), float("nan"), dtype=mine.dtype, device="cuda")
        wire.reduce_scatter(output, source, op, lease, arena.next_epoch(lease), module="t", async_op=False)
        return output.cpu()
    finally:
        pull_reduce.PIECE_BYTES = kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_run_in_rank_order_for_every_piece_size(
    request: pytest.FixtureRequest, backend: str, world_size: int
) -> None:
    request.getfixturevalue(f"ranks{world_size}").run(_sums, backend)


def _thousand_steps(reduce_scatter: str) -> tuple[list[float], list[float]]:
    """Tiny layers, nobody ever waits for the GPU; losses are read at the end."""
    options = Options(blocks=4, hidden=8, param_dtype="bfloat16", reduce_dtype="float32")
    answers = []
    for switched in (False, True):
        model = build(options)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        handle = set_symm_mem_for_comm(model, strict=True, reduce_scatter=reduce_scatter) if switched else None
        inputs = torch.randn(64, 6, 12, generator=torch.Generator().manual_seed(dist.get_rank())).cuda()
        losses = []
        for step in range(1000):
            loss = model(inputs[step % 64]).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        answers.append(torch.stack(losses).tolist())
        if handle is not None:
            handle.close()
    return answers[0], answers[1]


@pytest.mark.parametrize("reduce_scatter", ["nccl", "copy_engine"])
def test_a_thousand_steps_without_synchronisation(ranks2: Ranks, reduce_scatter: str) -> None:
    for plain, found in ranks2.run(_thousand_steps, reduce_scatter):
        assert found == plain


# --- ranks that do not come --------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from fsdp_symm import set_symm_mem_for_comm
from tests.models import Options, build, train_step
from tests.harness import init_process_group
rank, fate = int(sys.argv[1]), sys.argv[3]
init_process_group(rank, 2, sys.argv[2])
model = build(Options())
handle = set_symm_mem_for_comm(model, strict=True, timeout_s=4, reduce_scatter="copy_engine")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train_step(model, optimizer, 0, Options())
torch.cuda.synchronize()
if rank == 1:
    if fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
print("before", flush=True)
train_step(model, optimizer, 1, Options())
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("fate", "text"),
    [
        ("asleep", "of group [0, 1]: ranks [1] have not issued this call"),
        ("killed", "of group [0, 1]: ranks [1] are gone"),
    ],
)
def test_the_watchdog_names_the_missing_rank_and_ends_the_process(tmp_path: Path, fate: str, text: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), fate],
            env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    start = time.monotonic()
    out, errors = ranks[0].communicate(timeout=90)
    lasted = time.monotonic() - start
    ranks[1].kill()
    ranks[1].communicate(timeout=30)
    assert out == "before\n", errors
    assert text in errors, errors
    assert "unshard of " in errors
    assert ranks[0].returncode == -6
    assert lasted < 75
