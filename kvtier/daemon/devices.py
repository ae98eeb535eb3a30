"""Where the device pools of a daemon lie: on GPUs, or in shared memory where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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


class Device(Protocol):
    """Memory for device pools."""

    def free_bytes(self) -> int:
        """What pools could take now."""

    def local_cpus(self) -> frozenset[int]:
        """The CPUs near it, whose memory its host pool should have; none when any will do."""

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        """A pool; raises `ConfigurationError` when it does not fit."""


class SharedMemoryDevice:
    """Shared memory of this machine."""

    def free_bytes(self) -> int:
        return free_bytes()

    def local_cpus(self) -> frozenset[int]:
        return frozenset()

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        return SharedMemoryDevicePool(name, num_pages, page_bytes)


class GpuDevice:
    """The memory of one GPU. A daemon that has a pool there has a context too, of some hundred megabytes."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def free_bytes(self) -> int:
        return self._gpu.memory_info().free_bytes

    def local_cpus(self) -> frozenset[int]:
        return self._gpu.local_cpus()

    def open_pool(self, name: str, num_pages: int, page_bytes: int) -> DevicePool:
        from kvtier.tiers.cuda_device import CudaDevicePool

        return CudaDevicePool(self._gpu, num_pages, page_bytes)


class Devices(Protocol):
    """The devices of a daemon."""

    def of_ranks(self, device_uuids: Sequence[str], world_size: int) -> list[Device]:
        """Where the pools of a model's ranks belong when its workers run on these GPUs.

        Raises `InvalidRequestError` when workers could not use them there.
        """


class SharedMemoryOnly:
    """The devices of a daemon without a GPU."""

    def __init__(self) -> None:
        self._device = SharedMemoryDevice()

    def of_ranks(self, device_uuids: Sequence[str], world_size: int) -> list[Device]:
        if device_uuids:
            raise InvalidRequestError(
                f"device_uuids has {device_uuids[0]!r}, but this daemon's device pools lie in host memory; load the "
                "model on the CPU, or start the daemon on a machine with a GPU"
            )
        return [self._device] * world_size


class Gpus:
    """The devices of a daemon with GPUs: pools lie where the workers run, or on the first for workers that say not."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._devices = {gpu.uuid: GpuDevice(gpu) for gpu in gpus}
        _log.info("device pools lie on %s", ", ".join(map(str, gpus)))

    def of_ranks(self, device_uuids: Sequence[str], world_size: int) -> list[Device]:
        uuids = device_uuids or list(self._devices)[:1]
        if len(uuids) != world_size:
            raise InvalidRequestError(
                f"device_uuids names {len(device_uuids)} GPUs for {world_size} ranks; name that of every rank, in order"
            )
        if missing := [uuid for uuid in uuids if uuid not in self._devices]:
            raise InvalidRequestError(
                f"device_uuids names {', '.join(missing)}, but this daemon's device pools lie on "
                f"{', '.join(self._devices)}; run the worker there, or start the daemon with another --device"
            )
        return [self._devices[uuid] for uuid in uuids]


def choose_devices(device: str) -> Devices:
    """What the setting `device` names; raises `ConfigurationError` when this machine has no such GPU."""
    if device == "shared-memory":
        return SharedMemoryOnly()
    try:
        return Gpus(_find_gpus(device))
    except (GpuError, ImportError) as error:
        if device == "auto":
            level = logging.WARNING if _GPU_DEVICE.exists() else logging.INFO  # a GPU is there, and of no use
            _log.log(level, "device pools lie in shared memory: %s", error)
            return SharedMemoryOnly()
        raise ConfigurationError(
            f"device is {device!r}, but this process cannot use a GPU: {error}; install the NVIDIA driver and "
            "'kvtier[gpu]', or set device to shared-memory"
        ) from error


def _find_gpus(device: str) -> list[Gpu]:
    from kvtier.cuda_driver import find_gpu, gpus

    visible = gpus()
    if device in ("auto", "cuda"):
        return list(visible)
    if device.startswith(("GPU-", "MIG-")):
        return [find_gpu(device)]
    ordinal = int(device.partition(":")[2])
    if ordinal >= len(visible):
        raise ConfigurationError(
            f"device is {device!r}, but this process sees {len(visible)} GPUs: {', '.join(map(str, visible))}"
        )
    return [visible[ordinal]]
