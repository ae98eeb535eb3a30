"""The device pool as a worker sees it."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.v1 import cache_pb2 as pb


class PoolMapping:
    """The daemon's device pool, mapped into this process.

    `memory` has shape (num_pages, page_bytes), uint8. Read only pages of a lease, write only its reserved ones. The
    mapping outlives the daemon: it goes when nothing refers to it any more.
    """

    def __init__(self, pool: pb.DevicePool, epoch: str) -> None:
        self.epoch = epoch
        self.num_pages = pool.num_pages
        self.page_bytes = pool.page_bytes
        num_bytes = pool.num_pages * pool.page_bytes
        try:
            descriptor = os.open(pool.shared_memory_path, os.O_RDWR)
        except OSError as error:
            raise ConfigurationError(
                f"cannot map the daemon's pool {pool.shared_memory_path}: {error.strerror}; daemon and worker must "
                "share /dev/shm and the user (containers: one IPC namespace)"
            ) from error
        try:
            mapped = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8).reshape(
            pool.num_pages, pool.page_bytes
        )
