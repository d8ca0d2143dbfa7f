"""The switch over real NCCL: engines seen in a profile, losses over 50 steps, a clean end. Needs a GPU.

Run with ``FSDP_SYMM_TEST_DEVICE=cuda``; ranks share GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_symm import set_symm_mem_for_comm
from tests.harness import Ranks
from tests.models import DEVICE, Options, build, train_step

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FSDP_SYMM_TEST_DEVICE=cuda")

ROOT = Path(__file__).parents[2]
BF16 = Options(blocks=4, param_dtype="bfloat16", reduce_dtype="float32")


def _fifty_steps(arguments: dict[str, Any]) -> tuple[list[float], list[float]]:
    plain, model = build(BF16), build(BF16)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, model)]
    with set_symm_mem_for_comm(model, strict=True, **arguments):
        found = [train_step(model, optimizers[1], step, BF16) for step in range(50)]
    return found, [train_step(plain, optimizers[0], step, BF16) for step in range(50)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_fifty_steps(request: pytest.FixtureRequest, world_size: int) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{world_size}")
    for found, plain in ranks.run(_fifty_steps, {"reduce_scatter": False}):
        assert found == plain, "all-gather alone changes no digit"
    for found, plain in ranks.run(_fifty_steps, {}):
        assert found == pytest.approx(plain, rel=1e-5)


def _engines(path: str, arguments: dict[str, Any]) -> None:
    model = build(BF16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    handle = set_symm_mem_for_comm(model, strict=True, **arguments)
    train_step(model, optimizer, 0, BF16)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        train_step(model, optimizer, 1, BF16)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)
    handle.close()


@pytest.mark.parametrize(
    ("arguments", "reduces"),
    [
        ({"all_gather": "staged", "reduce_scatter": "nccl"}, "symmetric_kernel"),
        ({"all_gather": "direct", "reduce_scatter": "nccl"}, "symmetric_kernel"),
        ({"all_gather": "direct", "reduce_scatter": "copy_engine"}, "copy_engine"),
        ({"backend": "cuda"}, "copy_engine"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_engines_in_a_trace(
    request: pytest.FixtureRequest, tmp_path: Path, world_size: int, arguments: dict[str, Any], reduces: str
) -> None:
    from fsdp_symm.trace import inspect_traces

    path = tmp_path / "trace.json"
    request.getfixturevalue(f"ranks{world_size}").run(_engines, str(path), arguments)
    (rank,) = inspect_traces(path).ranks
    kinds = {kind: {c.engine for c in rank.calls if c.kind == kind} for kind in ("all_gather", "reduce_scatter")}
    assert kinds["all_gather"] == {"copy_engine"}
    assert kinds["reduce_scatter"] == {reduces}
    copied_out = "split_with_sizes_copy" in path.read_text()
    assert copied_out == (arguments.get("all_gather") == "staged"), "direct placement has no copy-out"


START = """
import sys, warnings
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\\.")
import torch, torch.distributed as dist
from fsdp_symm import cta_policy, set_symm_mem_for_comm, zero_cta_mesh
from fsdp_symm.errors import SymmMemConfigError
from tests.models import WAYS, Options, build, train_step
rank = int(sys.argv[1])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)

def start(store):
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2, device_id=device)
    return build(Options())

def steps_are_equal(plain, model, count):
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for step in range(count):
        losses = [train_step(m, o, step, Options()) for m, o in zip((plain, model), optimizers)]
        assert losses[0] == losses[1], losses
"""

REBUILT = """
model = start(sys.argv[2])
handle = set_symm_mem_for_comm(model, all_gather="staged", dedicated_all_gather=True)
train_step(model, torch.optim.SGD(model.parameters(), 0.1), 0, Options())
assert cta_policy(dist.group.WORLD, device) == "default"
assert cta_policy(handle.arenas[0].group, device) == "zero"
mesh = zero_cta_mesh((2,), ("dp",))
assert cta_policy(mesh.get_group("dp"), device) == "zero"
if rank == 0:
    print(handle)
handle.close()
again = set_symm_mem_for_comm(model)
train_step(model, torch.optim.SGD(model.parameters(), 0.1), 1, Options())
again.close()
torch.cuda.synchronize()
dist.destroy_process_group()

plain, model = start(sys.argv[3]), build(Options())
rebuilt = set_symm_mem_for_comm(model, strict=True)
steps_are_equal(plain, model, 3)
assert rebuilt.stats().calls["all_gather"].keys() == {"copy_engine"}
rebuilt.close()
torch.cuda.synchronize()
dist.destroy_process_group()
"""

EXPANDABLE = """
start(sys.argv[2])
try:
    set_symm_mem_for_comm(build(Options()), strict=True)
except SymmMemConfigError as error:
    assert "expandable segments are on" in str(error), error
else:
    raise SystemExit("strict took expandable segments")
for name, (switch, gathers, _) in WAYS.items():
    plain, model = build(Options()), build(Options())
    with set_symm_mem_for_comm(model, **switch) as handle:
        steps_are_equal(plain, model, 5)
        assert handle.stats().calls["all_gather"].keys() == {gathers}, (name, handle.stats().calls)
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def _errors_of_two(script: str, folder: Path, **environment: str) -> list[str]:
    """What two processes that run the script, and must end well, say on stderr; they get two files for rendezvous."""
    stores = [f"file://{folder}/{name}" for name in ("first", "second")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + script, str(rank), *stores],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        ends = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err, code in ends:
        print(out)
        assert code == 0, err
    return [err for _, err, _ in ends]


def test_a_run_ends_without_a_warning_and_its_group_can_be_rebuilt(tmp_path: Path) -> None:
    for err in _errors_of_two(REBUILT, tmp_path):
        assert "ncclCommWindowDeregister" not in err
        assert "Warning" not in err, err


def test_expandable_segments_change_no_number_and_are_refused_under_strict(tmp_path: Path) -> None:
    _errors_of_two(EXPANDABLE, tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
