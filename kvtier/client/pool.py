"""The device pool as a worker sees it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError, GpuError, SessionLostError
from kvtier.tiers.base import CudaIpc, PoolHandle, SharedMemoryFile

if TYPE_CHECKING:
    from kvtier.cuda_driver import CudaMemory

PoolMemory: TypeAlias = "npt.NDArray[np.uint8] | CudaMemory"
"""The pages of a pool, shape (num_pages, page_bytes), uint8; `torch.as_tensor` takes either without a copy."""


class PoolMapping:
    """The daemon's device pool, mapped into this process.

    The mapping outlives the daemon. It goes when nothing refers to `memory` any more: not the session, which lets go of
    it when it ends, and not the worker. Only then the next daemon may have the same memory for its own pool.
    """

    def __init__(self, handle: PoolHandle, epoch: str, pool_id: str) -> None:
        """Maps the pool; raises `ConfigurationError` when this process may not, or does not see the pool's GPU.

        `epoch` is the daemon's; `pool_id` is the same on all ranks of a model, and another once their pools are others.
        """
        self.epoch = epoch
        self.pool_id = pool_id
        self.num_pages = handle.num_pages
        self.page_bytes = handle.page_bytes
        self._memory: PoolMemory | None = _map(handle)
        self._forgets: list[Callable[[], None]] = []

    @property
    def is_lost(self) -> bool:
        """Whether the session has let go of the memory."""
        return self._memory is None

    @property
    def memory(self) -> PoolMemory:
        """The pages.

        Read only pages of a lease, write only its reserved ones. Raises `SessionLostError` when the session has let go.
        """
        if self._memory is None:
            raise SessionLostError("the session that mapped this pool has ended; take the pool of the next one")
        return self._memory

    def when_let_go(self, forget: Callable[[], None]) -> None:
        """Has `forget` called, in the thread that lets go, for who keeps `memory`; at once where that has happened."""
        self._forgets.append(forget)
        if self._memory is None:
            forget()

    def let_go(self) -> None:
        """Forgets the memory; who took `memory` before keeps it."""
        self._memory = None
        for forget in self._forgets:
            forget()


def _map(handle: PoolHandle) -> PoolMemory:
    if isinstance(handle.memory, SharedMemoryFile):
        return _map_file(handle.memory.path, handle.num_pages, handle.page_bytes)
    return _map_cuda(handle.memory, handle.num_pages, handle.page_bytes)


def _map_file(path: str, num_pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ConfigurationError(
            f"cannot map the daemon's pool {path}: {error.strerror}; daemon and worker must share /dev/shm and the "
            "user (containers: one IPC namespace)"
        ) from error
    try:
        mapped = mmap.mmap(descriptor, num_pages * page_bytes)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot map the {num_pages * page_bytes:,} bytes of the daemon's pool {path}: {error}; give this process "
            "the address space (ulimit -v), and daemon and worker one /dev/shm"
        ) from error
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=np.uint8).reshape(num_pages, page_bytes)


def _map_cuda(memory: CudaIpc, num_pages: int, page_bytes: int) -> CudaMemory:
    try:
        from kvtier.cuda_driver import CudaMemory
    except ImportError as error:
        raise ConfigurationError(
            f"the daemon's pool lies on {memory.device_uuid}; to map it, install 'kvtier[gpu]' ({error})"
        ) from error
    try:
        return CudaMemory.open(memory.ipc_handle, memory.device_uuid, num_pages, page_bytes)
    except GpuError as error:
        raise ConfigurationError(f"cannot map the daemon's pool on {memory.device_uuid}: {error}") from error
