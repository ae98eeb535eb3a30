"""Copies in one direction between a GPU and host memory, on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from kvtier.cuda_driver import Gpu, check, has_batch_copies
from kvtier.errors import GpuError

_QUEUED_BATCHES = 4

Addresses = npt.NDArray[np.int64]
Copies = tuple[Addresses, Addresses, Addresses]
"""Targets, sources and lengths in bytes."""


class CopyStream:
    """A stream of `gpu` for copies. Threads may share it: their batches take turns, and each waits for its own only."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._has_batch_copies = has_batch_copies()
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # The copy engines move the bytes: the multiprocessors are the workers'.
        self._attributes.flags = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        with gpu.current():
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = check(driver.cuStreamCreate(flags), "cuStreamCreate")

    def copy(self, batches: Iterable[tuple[Copies, bool]]) -> None:
        """Does batches of copies and returns when all are complete; the thread sleeps meanwhile.

        A batch comes with whether all its host memory is pinned. At most a few are queued at a time, so that copies of
        another thread are not behind all of them. Raises `GpuError`; then nothing of the copies is under way any more,
        and some may have been done.
        """
        with self._gpu.current():
            queued: deque[driver.CUevent] = deque()
            try:
                for copies, is_pinned in batches:
                    self._queue(copies, is_pinned)
                    queued.append(self._record())
                    if len(queued) == _QUEUED_BATCHES:
                        _wait(queued.popleft())
                while queued:
                    _wait(queued.popleft())
            except GpuError:
                driver.cuStreamSynchronize(self._stream)
                raise
            finally:
                for event in queued:
                    driver.cuEventDestroy(event)

    def _queue(self, copies: Copies, is_pinned: bool) -> None:
        targets, sources, sizes = (part.tolist() for part in copies)
        if is_pinned and self._has_batch_copies and len(sizes) > 1:
            pointers = [driver.CUdeviceptr(address) for address in targets + sources]
            check(
                driver.cuMemcpyBatchAsync(
                    pointers[: len(sizes)],
                    pointers[len(sizes) :],
                    sizes,
                    len(sizes),
                    [self._attributes],
                    [0],
                    1,
                    self._stream,
                ),
                "cuMemcpyBatchAsync",
            )
            return
        for target, source, size in zip(targets, sources, sizes, strict=True):
            check(driver.cuMemcpyAsync(target, source, size, self._stream), "cuMemcpyAsync")

    def _record(self) -> driver.CUevent:
        flags = driver.CUevent_flags
        event = check(
            driver.cuEventCreate(flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate"
        )
        check(driver.cuEventRecord(event, self._stream), "cuEventRecord")
        return event

    def close(self) -> None:
        """Waits for what is queued, and gives the stream back."""
        with self._gpu.current():
            check(driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")
            check(driver.cuStreamDestroy(self._stream), "cuStreamDestroy")


def _wait(event: driver.CUevent) -> None:
    try:
        check(driver.cuEventSynchronize(event), "a copy between GPU and host memory")
    finally:
        driver.cuEventDestroy(event)
