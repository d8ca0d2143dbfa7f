"""NVLink as NVML sees it, through the optional package ``pynvml`` (nvidia-ml-py)."""

from __future__ import annotations

import importlib
from typing import Any


def active_nvlinks() -> dict[str, int] | None:
    """Active links of each GPU of this machine, by UUID as torch writes it, in NVML's order.

    Returns:
        ``None`` without ``pynvml``, or where NVML cannot be asked: no driver, a GPU that is lost or not this user's.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return {_uuid(nvml, handle): _links(nvml, handle) for handle in handles}
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    text = uuid.decode() if isinstance(uuid, bytes) else uuid  # bytes before nvidia-ml-py 11.515
    return text.removeprefix("GPU-")


def _links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # "not supported": the GPU has fewer links
            break
    return active
