"""Named POSIX shared memory that one process owns and others map."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError

_ROOT = Path("/dev/shm")

ByteArray = npt.NDArray[np.uint8]


class SharedMemory:
    """`num_bytes` of zeroed shared memory under a name, open to this user alone. `close` removes the name."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.path = _ROOT / name
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Takes the memory now: a file that only has a length kills whoever touches a page that does not fit.
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            self.path.unlink()
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ConfigurationError(
                    f"{num_bytes:,} bytes of shared memory do not fit: {_ROOT} has {free_bytes():,} free; make the "
                    f"pools smaller, or {_ROOT} larger (docker: --shm-size)"
                ) from error
            raise
        finally:
            os.close(descriptor)
        self.memory: ByteArray = np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Removes the name. The memory itself goes when the last process that mapped it does."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def free_bytes() -> int:
    """Bytes of shared memory that this machine has left."""
    status = os.statvfs(_ROOT)
    return status.f_bavail * status.f_frsize


def remove_stale(prefix: str) -> int:
    """Removes shared memory that a daemon of the same prefix left when it was killed; returns how many pieces."""
    stale = list(_ROOT.glob(f"{prefix}*"))
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)
