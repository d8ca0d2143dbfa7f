"""A mixture-of-experts model under FSDP2, experts and parameters over the same wire.

    torchrun --nproc-per-node 2 examples/moe.py --check
    torchrun --nproc-per-node 4 examples/moe.py --check --expert-ranks 2 --implementation all_to_all

Experts are spread over ``--expert-ranks`` ranks; ranks that hold the same experts shard them with FSDP2. All other
parameters are sharded over all ranks. ``--check`` also trains a dense model on everybody's tokens in one process, and
compares losses and parameters.

Legend: T tokens of a rank, H hidden width, K experts a token, E experts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_symm import set_symm_mem_for_comm, zero_cta_options
from fsdp_symm.experts import EpConfig, ExpertParallel, GroupedExperts, ep_finalize, scale_expert_gradients

T, H, INNER, E, K, BLOCKS = 48, 32, 64, 8, 2, 3


def say(text: str) -> None:
    """One write at once: ranks share a pipe, and lines must not be torn."""
    print(f"{text}\n", end="", flush=True)


class DenseMoE(nn.Module):
    """All experts in one process; stands where :class:`ExpertParallel` will."""

    def __init__(self) -> None:
        super().__init__()
        shape = E, INNER, H
        self.experts = GroupedExperts(
            gate=torch.randn(shape) / H**0.5, up=torch.randn(shape) / H**0.5, down=torch.randn(E, H, INNER) / INNER**0.5
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=E)
        answers = self.experts(x[order // K], counts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // K, answers)


class Block(nn.Module):
    """Norm, router, experts, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.router = nn.Linear(H, E, bias=False)
        self.moe: DenseMoE | ExpertParallel = DenseMoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights, ids = self.router(h).softmax(-1).topk(K)
        return x + self.moe(h, ids, weights)


class Model(nn.Module):
    """A few blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(H, 1)

    def every_block(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: Model, expert_mesh: DeviceMesh, dense_mesh: DeviceMesh, implementation: str) -> None:
    """Experts over ``expert_mesh`` (``fsdp`` x ``ep``), everything else over ``dense_mesh``."""
    config = EpConfig(num_experts=E, num_topk=K, hidden_dim=H, payload_dtype=torch.float32, max_tokens_per_rank=T)
    group = expert_mesh.get_group("ep")
    mine = slice(group.rank() * E // group.size(), (group.rank() + 1) * E // group.size())
    for block in model.every_block():
        every = block.moe.experts
        experts = GroupedExperts(**{name: weight.detach()[mine].clone() for name, weight in every.named_parameters()})
        fully_shard(experts, mesh=expert_mesh["fsdp"])
        scale_expert_gradients(experts, dense_mesh.size())  # a loss is the mean over all ranks, not over those of fsdp
        block.moe = ExpertParallel(experts, group, config, implementation=implementation)
        fully_shard(block, mesh=dense_mesh)
    fully_shard(model, mesh=dense_mesh)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens and targets."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(T, H, generator=random), torch.randn(T, 1, generator=random)


def loss_of(model: nn.Module, step: int, ranks: range, device: torch.device) -> torch.Tensor:
    """Mean squared error over the tokens of ``ranks``."""
    tokens, targets = (torch.cat(parts).to(device) for parts in zip(*(batch(step, r) for r in ranks), strict=True))
    return (model(tokens) - targets).square().mean()


def train(model: Model, reference: Model | None, steps: int, device: torch.device) -> None:
    """A few steps, beside the reference if there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference) if m is not None]
    for step in range(steps):
        loss = loss_of(model, step, range(rank, rank + 1), device)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= size
        line = f"step {step + 1}: loss {mean.item():.5f}"
        if reference is not None:
            expected = loss_of(reference, step, range(size), device)
            expected.backward()
            torch.testing.assert_close(mean, expected.detach(), rtol=1e-4, atol=1e-5)
            line += f", dense {expected.item():.5f}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            say(line)


def compare(model: Model, reference: Model, group: dist.ProcessGroup) -> None:
    """Every parameter of the trained model against the dense one's; this rank's experts against their part of all."""
    dense = dict(reference.named_parameters())
    mine = slice(group.rank() * E // group.size(), (group.rank() + 1) * E // group.size())
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        expected = dense[name][mine] if ".experts." in name else dense[name]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@contextmanager
def processes(kind: str) -> Iterator[torch.device]:
    """The process group and this rank's device; ranks share GPUs where there are fewer."""
    if kind == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank(0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, pg_options=zero_cta_options())
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with a dense model in one process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--expert-ranks", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--implementation", default="auto", help="all_to_all, copy_engine, ...")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with processes(args.device) as device:
        size = dist.get_world_size()
        if size % args.expert_ranks:
            parser.error(f"--expert-ranks {args.expert_ranks} does not divide {size} processes")
        dense_mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dense",))
        shape = size // args.expert_ranks, args.expert_ranks
        expert_mesh = init_device_mesh(device.type, shape, mesh_dim_names=("fsdp", "ep"))
        torch.manual_seed(0)
        model = Model().to(device)
        reference = copy.deepcopy(model) if args.check else None
        parallelize(model, expert_mesh, dense_mesh, args.implementation)
        with set_symm_mem_for_comm(model) as handle:
            if dist.get_rank() == 0:
                say(str(handle))
            train(model, reference, args.steps, device)
            if reference is not None:
                compare(model, reference, expert_mesh.get_group("ep"))
                say(f"rank {dist.get_rank()}: losses and parameters equal the dense model's")
        ep_finalize()


if __name__ == "__main__":
    main()
