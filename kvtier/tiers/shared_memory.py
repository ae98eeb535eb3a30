"""Named POSIX shared memory that one process owns and others map."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError

_ROOT = Path("/dev/shm")
_BLOCK_BYTES = 512  # in which stat counts, whatever those of the file system are

ByteArray = npt.NDArray[np.uint8]


class SharedMemory:
    """`num_bytes` of zeroed shared memory under a name, open to this user alone. `close` removes the name.

    The file is locked for as long as its owner lives: see `remove_stale`.

    NOTE: only what was taken may be touched: a file that only has a length kills whoever touches a part of it for which
    there is no memory.

    Args:
        taken_bytes: what is taken now, the first so many bytes; all when it is not given. Takes a second a gigabyte.

    Raises `ConfigurationError` when the machine does not have `num_bytes`, beside what others of this process are still
    to take.
    """

    _open: ClassVar[set[SharedMemory]] = set()
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, num_bytes: int, taken_bytes: int | None = None) -> None:
        self.path = _ROOT / name
        self.num_bytes = num_bytes
        self.taken_bytes = 0
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # NOTE: The lock ends with this process: workers open the file anew, no child inherits the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if free_bytes() < num_bytes:
                raise self._does_not_fit()
            os.ftruncate(self._descriptor, num_bytes)
            with self._open_lock:
                self._open.add(self)
            self.take(num_bytes if taken_bytes is None else taken_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        self.memory: ByteArray = np.frombuffer(self._map, dtype=np.uint8)

    def take(self, taken_bytes: int) -> None:
        """Takes the memory of the first so many bytes; raises `ConfigurationError` when it is not there."""
        if taken_bytes > self.taken_bytes:
            try:
                os.posix_fallocate(self._descriptor, self.taken_bytes, taken_bytes - self.taken_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM):
                    raise self._does_not_fit() from error
                raise
            self.taken_bytes = taken_bytes

    def read(self, num_bytes: int) -> bytes:
        """A copy of the first so many bytes. It maps no page, which the first reader of `memory` pays for."""
        return os.pread(self._descriptor, num_bytes, 0)

    def give_up_rest(self) -> None:
        """Takes no more than it has; what is behind that must not be touched."""
        os.ftruncate(self._descriptor, self.taken_bytes)
        self.num_bytes = self.taken_bytes

    def _does_not_fit(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.num_bytes:,} bytes of shared memory do not fit: {_ROOT} has {free_bytes():,} free; make the pools "
            f"smaller, or {_ROOT} larger (docker: --shm-size)"
        )

    @classmethod
    def untaken_bytes(cls) -> int:
        """What all that is open in this process is still to take."""
        with cls._open_lock:
            files = [os.fstat(memory._descriptor) for memory in cls._open]
        return sum(max(0, file.st_size - file.st_blocks * _BLOCK_BYTES) for file in files)

    def close(self) -> None:
        """Removes the name, unless it is another's. The memory goes when the last process that mapped it does."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        with self._open_lock:
            self._open.discard(self)
            os.close(self._descriptor)


def free_bytes() -> int:
    """Bytes of shared memory that this machine has left, without those that this process is still to take."""
    status = os.statvfs(_ROOT)
    return max(0, status.f_bavail * status.f_frsize - SharedMemory.untaken_bytes())


def remove_stale(prefix: str) -> int:
    """Removes shared memory of this prefix whose owner was killed; returns how many pieces."""
    return sum(_removed_if_stale(path) for path in _ROOT.glob(f"{prefix}*"))


def _removed_if_stale(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
        path.unlink()
        return True
    return False
