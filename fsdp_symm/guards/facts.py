"""What decides how NCCL will move a group's bytes, as plain values: gathered once, judged elsewhere."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp_symm import compat, compat_nccl, compat_symm
from fsdp_symm.errors import SymmMemConfigError
from fsdp_symm.nvlink import active_nvlinks
from fsdp_symm.rendezvous import exchange
from fsdp_symm.zero_cta import Policy, policy_and_source

Nvls = Literal["off", "on", "unknown"]

# Variables that change which engine NCCL takes (2.28.9 to 2.32.3), or how copies and kernels share the device.
ENVIRONMENT = (
    "NCCL_CTA_POLICY", "NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_WIN_STRIDE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS",
    "NCCL_SYM_CTAS", "NCCL_SYM_KERNEL", "NCCL_NVLS_ENABLE", "NCCL_SYM_CE_THRESHOLD", "NCCL_SYM_NOWIN_ENABLE",
    "NCCL_SYM_TMA_ENABLE", "NCCL_SYM_GIN_KERNELS_ENABLE", "NCCL_LSA_TEAM_SIZE", "NCCL_NUM_RMA_CTX",
    "NCCL_RMA_DISABLE", "NCCL_CHECK_MODE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_CE_CHUNK_SIZE",
    "NCCL_CE_COLL_AG_MULTICAST_THRESHOLD", "NCCL_CE_INTRA_GPU_MEMCPY_ENABLE", "NCCL_HIER_CE_COLL_AG_RAIL_RING_ENABLE",
    "NCCL_HIER_CE_COLL_NUM_CTX", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_HOSTID", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS", "TORCH_SYMMMEM", "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MPS_PIPE_DIRECTORY", "LD_PRELOAD", "FSDP_SYMM_SHM_DIR",
)  # fmt: skip


@dataclass(frozen=True)
class GroupFacts:
    """One process group on this machine. The defaults describe a group for which nothing stands in the way.

    Attributes:
        name: of the process group.
        ranks: global ranks in group order.
        nccl_version: of the loaded library; ``None`` without NCCL.
        nccl_built: that torch was compiled against.
        driver_version: the CUDA version that the driver reports (``cuDriverGetVersion`` 12040 is (12, 4)); with
            forward-compatibility packages that is newer than the kernel driver. ``None`` if unknown.
        capability: compute capability of this rank's GPU.
        hosts: a host identity for each rank (host name and boot id, or NCCL_HOSTID, as NCCL tells hosts apart).
        devices: GPU UUID of each rank.
        policies: CTA policy of each rank.
        policy_source: whether this rank's policy comes from the group's options or from NCCL_CTA_POLICY.
        nvls: NVLink multicast: off for certain, on, or not known (treated as on where on is dangerous).
        peer_access: whether every visible pair of the group's GPUs can address each other; ``None`` if unknown.
        one_nvlink_domain: whether all ranks load and store each other's memory over NVLink: not where one of their
            GPUs has no active link; ``None`` if unknown.
        current_device: index that CUDA calls of this thread go to.
        model_device: index of the model's GPU.
        capturing: a CUDA graph is being captured on the current stream.
        symm_backend: torch's process-wide symmetric-memory backend now.
        wanted_symm_backend: the one that our memory needs; ``None`` for memory that goes to NCCL directly.
        environment: the variables of :data:`ENVIRONMENT` that are set.
        nccl_libraries: paths of all NCCL libraries mapped into this process.
    """

    name: str = "default"
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    nccl_version: tuple[int, int, int] | None = (2, 31, 2)
    nccl_built: tuple[int, int, int] | None = (2, 31, 2)
    driver_version: tuple[int, int] | None = (13, 0)
    capability: tuple[int, int] | None = (9, 0)
    hosts: tuple[str, ...] = ("a", "a", "a", "a")
    devices: tuple[str, ...] = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    policies: tuple[Policy, ...] = ("zero", "zero", "zero", "zero")
    policy_source: Literal["config", "env"] = "config"
    nvls: Nvls = "unknown"
    peer_access: bool | None = None
    one_nvlink_domain: bool | None = None
    current_device: int | None = 0
    model_device: int | None = 0
    capturing: bool = False
    symm_backend: str | None = None
    wanted_symm_backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    nccl_libraries: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    @property
    def policy(self) -> Policy:
        """The policy that all ranks have; the first rank's where they differ (which is a finding)."""
        return self.policies[0] if self.policies else "default"

    @property
    def num_hosts(self) -> int:
        """Different hosts."""
        return len(set(self.hosts))

    @property
    def ranks_per_gpu(self) -> int:
        """Most ranks of one host on one GPU."""
        return max(Counter(zip(self.hosts, self.devices, strict=False)).values(), default=0)

    @property
    def shared_gpus(self) -> bool:
        """Whether two ranks of one host use the same GPU."""
        return self.ranks_per_gpu > 1


def collect(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    timeout_s: float = 60.0,
    wanted_symm_backend: str | None = None,
) -> GroupFacts:
    """Gather the facts of one group from the living process. Collective over the group: one exchange over the store.

    Args:
        group: whose collectives are to be served.
        device: the model's device on this rank, with an index for CUDA.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        SymmMemTimeoutError: a rank did not come.
        SymmMemPeerError: the store is gone.
    """
    local = local_facts(device)
    policy, source = _policy(group, device)
    payload = {"host": local.hosts[0], "device": local.devices[0], "policy": policy}
    answers = exchange(
        group,
        json.dumps(payload).encode(),
        what="collecting what the group's ranks run on",
        timeout_s=timeout_s,
        fix="call it on every rank of the group",
    )
    peers: list[dict[str, Any]] = [json.loads(a) for a in answers]
    hosts, devices = tuple(p["host"] for p in peers), tuple(p["device"] for p in peers)
    shared = len(set(zip(hosts, devices, strict=True))) < len(peers)
    return GroupFacts(
        **{
            **local.__dict__,
            "name": compat.group_name(group),
            "ranks": compat.group_ranks(group),
            "hosts": hosts,
            "devices": devices,
            "policies": tuple(p["policy"] for p in peers),
            "policy_source": source,
            # NCCL refuses NVLS for several ranks on a GPU (2.30.7 src/init.cc:1052-1060, src/transport/nvls.cc:252-258)
            "nvls": "off" if shared else local.nvls,
            "peer_access": _peer_access(local, hosts, devices),
            "one_nvlink_domain": one_nvlink_domain(hosts, devices),
            "wanted_symm_backend": wanted_symm_backend,
        }
    )


def local_facts(device: torch.device) -> GroupFacts:
    """The part that one process knows without a group; ``ranks`` has one entry."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if cuda else None
    return GroupFacts(
        name="",
        ranks=(0,),
        nccl_version=_version(compat_nccl.nccl_runtime_version),
        nccl_built=_version(compat_nccl.nccl_version),
        driver_version=driver_version(),
        capability=capability,
        hosts=(host_id(),),
        devices=(compat.device_uuid(device) if cuda else str(device),),
        policies=("default",),
        nvls=_nvls(capability),
        current_device=torch.cuda.current_device() if cuda else None,
        model_device=(device.index if device.index is not None else torch.cuda.current_device()) if cuda else None,
        capturing=cuda and torch.cuda.is_current_stream_capturing(),
        symm_backend=compat_symm.symm_backend(device) if cuda else None,
        environment=environment(),
        nccl_libraries=nccl_libraries(),
    )


def _policy(group: dist.ProcessGroup, device: torch.device) -> tuple[Policy, Literal["config", "env"]]:
    try:
        return policy_and_source(group, device)
    except SymmMemConfigError:  # not an NCCL group: no policy to speak of
        return "default", "config"


def _version(reader: Any) -> tuple[int, int, int] | None:
    try:
        return reader()
    except SymmMemConfigError:
        return None


def environment() -> dict[str, str]:
    """The variables of :data:`ENVIRONMENT` that are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def host_id() -> str:
    """Short name that is equal on two ranks exactly if NCCL takes them for one host (host name and boot id)."""
    if forced := os.environ.get("NCCL_HOSTID"):
        return forced
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{text[:8]}"


def driver_version() -> tuple[int, int] | None:
    """The CUDA version of the driver library, as NCCL asks for it; ``None`` without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def nccl_libraries(maps: str | None = None) -> tuple[str, ...]:
    """Paths of the NCCL libraries mapped into this process, in order of address.

    Args:
        maps: text of ``/proc/self/maps``; ``None`` reads it.
    """
    if maps is None:
        path = Path("/proc/self/maps")
        maps = path.read_text() if path.exists() else ""
    found = re.findall(r"(/\S*/libnccl\.so\S*)", maps)
    return tuple(dict.fromkeys(found))


def _nvls(capability: tuple[int, int] | None) -> Nvls:
    if os.environ.get("NCCL_NVLS_ENABLE") == "0" or (capability is not None and capability < (9, 0)):
        return "off"  # multicast objects need Hopper or newer
    return "on" if os.environ.get("NCCL_NVLS_ENABLE") == "1" else "unknown"


def one_nvlink_domain(hosts: tuple[str, ...], devices: tuple[str, ...]) -> bool | None:
    """The same on every rank of a host: NVML counts the links of all its GPUs, visible to this process or not. Links
    say nothing about which GPUs they join, so this can be no, and yes only for one GPU."""
    if len(set(zip(hosts, devices, strict=True))) == 1:
        return True
    links = active_nvlinks() if len(set(hosts)) == 1 else None
    names = [device.removeprefix("GPU-") for device in devices]
    if links is None or not set(names) <= set(links):
        return None
    return None if all(links[name] for name in names) else False


def _peer_access(local: GroupFacts, hosts: tuple[str, ...], devices: tuple[str, ...]) -> bool | None:
    """Whether this rank's GPU reaches all the group's GPUs of this host; ``None`` if some are not visible here."""
    if local.model_device is None:
        return None
    index = {compat.device_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    wanted = {d for h, d in zip(hosts, devices, strict=True) if h == local.hosts[0] and d != local.devices[0]}
    if not wanted <= set(index):
        return None
    return all(torch.cuda.can_device_access_peer(local.model_device, index[d]) for d in wanted)
