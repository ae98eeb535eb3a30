"""The device pool of a machine without a GPU: the same page images, in POSIX shared memory."""

from __future__ import annotations

from kvtier.index.pool import SlotArray
from kvtier.tiers.base import PoolHandle, SharedMemoryFile
from kvtier.tiers.host import HostPool
from kvtier.tiers.shared_memory import ByteArray, SharedMemory


class SharedMemoryDevicePool:
    """A `DevicePool` whose workers are processes of this host."""

    pinned_bytes = 0

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._shared = SharedMemory(name, num_pages * page_bytes)
        self._pages: ByteArray = self._shared.memory.reshape(num_pages, page_bytes)

    def handle(self) -> PoolHandle:
        return PoolHandle(SharedMemoryFile(str(self._shared.path)), self.num_pages, self.page_bytes)

    def pin(self, host: HostPool) -> None:
        """Copies by the CPU need nothing pinned."""

    def read_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        for slot, host_slot in zip(slots.tolist(), host_slots.tolist(), strict=True):
            host.pages[host_slot] = self._pages[slot]

    def write_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        for slot, host_slot in zip(slots.tolist(), host_slots.tolist(), strict=True):
            self._pages[slot] = host.pages[host_slot]

    def close(self) -> None:
        self._shared.close()
