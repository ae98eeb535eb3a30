"""Where the device pools of a daemon lie: on a GPU, or in shared memory where there is none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvtier.errors import ConfigurationError, GpuError, InvalidRequestError
from kvtier.tiers.base import DevicePool
from kvtier.tiers.device import SharedMemoryDevicePool
from kvtier.tiers.shared_memory import free_bytes

if TYPE_CHECKING:
    from kvtier.cuda_driver import Gpu

_log = logging.getLogger(__name__)

_GPU_DEVICE = Path("/dev/nvidiactl")


class PoolMemory(Protocol):
    """Memory for device pools."""

    def free_bytes(self) -> int:
        """What pools could take now."""

    def check_worker(self, device_uuid: str) -> None:
        """Raises `InvalidRequestError` when a worker on this GPU cannot use the pools; "" takes them where they are."""

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        """A pool; raises `ConfigurationError` when it does not fit."""


class HostMemory:
    """Shared memory of this machine."""

    def free_bytes(self) -> int:
        return free_bytes()

    def check_worker(self, device_uuid: str) -> None:
        if device_uuid:
            raise InvalidRequestError(
                f"device_uuid is {device_uuid!r}, but this daemon's device pool lies in host memory; "
                "attach without device_uuid"
            )

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        return SharedMemoryDevicePool(name, num_pages, page_bytes)


class GpuMemory:
    """The memory of one GPU. A daemon's context on it takes some hundred megabytes beside the pools."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        free, total = gpu.memory_info()
        _log.info("device pools lie on %s: %d of %d bytes are free", gpu, free, total)

    def free_bytes(self) -> int:
        return self._gpu.memory_info().free_bytes

    def check_worker(self, device_uuid: str) -> None:
        if device_uuid and device_uuid != self._gpu.uuid:
            raise InvalidRequestError(
                f"device_uuid is {device_uuid!r}, but this daemon's device pool lies on {self._gpu}; run the worker "
                "there, or a daemon for the other GPU"
            )

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        from kvtier.tiers.cuda_device import CudaDevicePool

        return CudaDevicePool(self._gpu, num_pages, page_bytes)


def choose_memory(device: str) -> PoolMemory:
    """What the setting `device` names; raises `ConfigurationError` when this machine has no such GPU."""
    if device == "shared-memory":
        return HostMemory()
    try:
        return GpuMemory(_find_gpu(device))
    except (GpuError, ImportError) as error:
        if device == "auto":
            level = logging.WARNING if _GPU_DEVICE.exists() else logging.INFO  # a GPU is there, and of no use
            _log.log(level, "device pools lie in shared memory: %s", error)
            return HostMemory()
        raise ConfigurationError(
            f"device is {device!r}, but this process cannot use a GPU: {error}; install the NVIDIA driver and "
            "'kvtier[gpu]', or set device to shared-memory"
        ) from error


def _find_gpu(device: str) -> Gpu:
    from kvtier.cuda_driver import find_gpu, gpus

    if device.startswith(("GPU-", "MIG-")):
        return find_gpu(device)
    ordinal = int(device.partition(":")[2] or 0)
    if ordinal >= len(gpus()):
        raise ConfigurationError(
            f"device is {device!r}, but this process sees {len(gpus())} GPUs: {', '.join(map(str, gpus()))}"
        )
    return gpus()[ordinal]
