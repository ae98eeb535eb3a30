"""The host pool: page images in shared memory."""

from __future__ import annotations

from kvtier.tiers.shared_memory import ByteArray, SharedMemory


class HostPool:
    """`num_pages` page images. `pages` has shape (num_pages, page_bytes), uint8."""

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._shared = SharedMemory(name, num_pages * page_bytes)
        self.pages: ByteArray = self._shared.memory.reshape(num_pages, page_bytes)

    @property
    def address(self) -> int:
        """Where the first page lies in this process."""
        return self.pages.ctypes.data

    def image(self, slot: int) -> memoryview:
        """The bytes of one page; writing to it writes the pool."""
        return memoryview(self.pages[slot])

    def close(self) -> None:
        """Gives the memory back."""
        self._shared.close()
