"""The device pool in the memory of a GPU: page images that workers map by CUDA IPC and read with their kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuda.bindings import driver

from kvtier.cuda_driver import OUT_OF_MEMORY, CudaMemory, Gpu, check
from kvtier.errors import ConfigurationError
from kvtier.index.pool import SlotArray
from kvtier.tiers.base import CudaIpc, PoolHandle
from kvtier.tiers.copy_stream import CopyStream
from kvtier.tiers.host import HostPool
from kvtier.tiers.pinning import Pinning
from kvtier.tiers.slot_copies import Pieces, batches_of, pieces_of

_FIRST_BATCH_BYTES = 4 << 20  # queued at once: the bus is idle meanwhile
_BATCH_BYTES = 64 << 20  # later: long enough to hide what queueing costs, short enough to take turns
_PIN_CHUNK_BYTES = 64 << 20  # one takes milliseconds, during which other threads may not get new memory
_ALLOCATION_BYTES = 2 << 20


class CudaDevicePool:
    """A `DevicePool` on one GPU, in one allocation.

    Spills and promotions have a stream each, so that both directions of the bus are used at once. A spill reads pages
    that kernels of other processes wrote, without waiting for these: who commits a page promises that its bytes are
    complete. A promoted page is complete when `write_pages` returns.

    `memory` is the pool for kernels of this process.
    """

    def __init__(self, gpu: Gpu, num_pages: int, page_bytes: int, pin_chunk_bytes: int = _PIN_CHUNK_BYTES) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._gpu = gpu
        self._pin_chunk_bytes = pin_chunk_bytes
        self._pinning: Pinning | None = None
        self.memory = CudaMemory(gpu, _allocate(gpu, num_pages, page_bytes), num_pages, page_bytes)
        self._down, self._up = CopyStream(gpu), CopyStream(gpu)

    def handle(self) -> PoolHandle:
        with self._gpu.current():
            handle = check(driver.cuIpcGetMemHandle(self.memory.address), "cuIpcGetMemHandle")
        return PoolHandle(CudaIpc(handle.reserved, self._gpu.uuid), self.num_pages, self.page_bytes)

    @property
    def pinned_bytes(self) -> int:
        return self._pinning.pinned_bytes if self._pinning else 0

    def pin(self, host: HostPool) -> None:
        self._pinning = Pinning(
            _CudaRegistrar(self._gpu),
            host.address,
            self._pin_chunk_bytes,
            final_bytes=lambda: host.final_bytes,
            ready_bytes=lambda: host.ready_bytes,
        )

    def read_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        self._down.copy(
            ((host.address + piece.host, self.memory.address + piece.device, piece.num_bytes), is_pinned)
            for piece, is_pinned in self._batches(slots, host_slots)
        )

    def write_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        self._up.copy(
            ((self.memory.address + piece.device, host.address + piece.host, piece.num_bytes), is_pinned)
            for piece, is_pinned in self._batches(slots, host_slots)
        )

    def _batches(self, slots: SlotArray, host_slots: SlotArray) -> Iterator[tuple[Pieces, bool]]:
        # NOTE: No copy crosses the end of a pinned chunk: CUDA takes a range in two of them for an error.
        pieces = pieces_of(slots, host_slots, self.page_bytes, min(_BATCH_BYTES, self._pin_chunk_bytes))
        is_pinned = pieces.host + pieces.num_bytes <= self.pinned_bytes
        for which, pinned in ((is_pinned, True), (~is_pinned, False)):
            for batch in batches_of(pieces.select(which), _FIRST_BATCH_BYTES, _BATCH_BYTES):
                yield batch, pinned

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each of them, whatever happens to the others
            stack.callback(self._free)
            stack.callback(self._up.close)
            stack.callback(self._down.close)
            if self._pinning:
                stack.callback(self._pinning.close)

    def _free(self) -> None:
        with self._gpu.current():
            check(driver.cuMemFree(self.memory.address), "cuMemFree")


def _allocate(gpu: Gpu, num_pages: int, page_bytes: int) -> int:
    # NOTE: In whole blocks of the driver's, so that what other processes map has no other allocation in it.
    num_bytes = num_pages * page_bytes
    with gpu.current():
        status, pointer = driver.cuMemAlloc(-(-num_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES)
    if status == OUT_OF_MEMORY:
        free_bytes, total_bytes = gpu.memory_info()
        raise ConfigurationError(
            f"a device pool of {num_bytes:,} bytes ({num_pages:,} pages of {page_bytes:,}) does not fit on {gpu}: "
            f"{free_bytes:,} of {total_bytes:,} bytes are free; give the daemon less --device-bytes, or end what else "
            "uses this GPU (workers of a former daemon keep its pool until they attach anew)"
        )
    return int(check((status, pointer), "cuMemAlloc"))


class _CudaRegistrar:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def register(self, address: int, num_bytes: int) -> None:
        with self._gpu.current():
            check(driver.cuMemHostRegister(address, num_bytes, 0), "cuMemHostRegister")

    def unregister(self, address: int) -> None:
        with self._gpu.current():
            check(driver.cuMemHostUnregister(address), "cuMemHostUnregister")
