"""Contracts between the tiers, the mover and the cache."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from kvtier.index.pool import SlotArray
from kvtier.tiers.host import HostPool


class Tier(StrEnum):
    """Where a page is, nearest first."""

    DEVICE = "device"
    HOST = "host"
    REDIS = "redis"


class Route(StrEnum):
    """The ways a page can take."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    HOST_TO_REDIS = "host_to_redis"
    REDIS_TO_HOST = "redis_to_host"


class SharedMemoryFile(NamedTuple):
    """A device pool in POSIX shared memory: its file."""

    path: str


class CudaIpc(NamedTuple):
    """A device pool on a GPU: its CUDA IPC handle, and the UUID of the GPU as nvidia-smi prints it."""

    ipc_handle: bytes
    device_uuid: str


class PoolHandle(NamedTuple):
    """What another process needs to map a device pool."""

    memory: SharedMemoryFile | CudaIpc
    num_pages: int
    page_bytes: int


class DevicePool(Protocol):
    """Page images where workers read and write them: slot i is bytes `i * page_bytes` to `(i + 1) * page_bytes`.

    The copies block until they are complete and may run in any thread; slots are distinct, and the caller holds them.
    They raise `GpuError`, with nothing under way any more: then the pages that were to be written hold anything.
    """

    num_pages: int
    page_bytes: int

    def handle(self) -> PoolHandle:
        """How a worker maps this pool."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host pool that are pinned for copies of this pool."""

    def pin(self, host: HostPool) -> None:
        """Begins to pin a host pool, if that makes copies faster, and returns at once; `close` ends it."""

    def read_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        """Copies pages down into host slots."""

    def write_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        """Copies pages up from host slots."""

    def close(self) -> None:
        """Gives the memory back; workers that mapped it keep their mapping."""
