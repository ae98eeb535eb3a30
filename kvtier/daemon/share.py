"""What the daemon leaves on the machine while it runs: its lock, its socket, the names of its shared memory."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared_memory import remove_stale

_log = logging.getLogger(__name__)

_MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, less the byte that ends it


class SocketLock:
    """The right to serve on a socket path. Taken before binding, kept until the process ends, however it ends."""

    def __init__(self, socket: Path) -> None:
        if len(os.fsencode(socket.absolute())) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(f"{socket} has over {_MAX_SOCKET_PATH_BYTES} bytes; choose a shorter --socket")
        self._socket = socket
        try:
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(_lock_path(socket), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot use {socket} ({error.strerror}); choose another --socket") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise ConfigurationError(
                f"a daemon (process {lock_owner(socket)}) serves on {socket}; stop it, or choose another --socket"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        # NOTE: The lock is ours, so a socket that lies here belongs to a daemon that was killed.
        socket.unlink(missing_ok=True)

    def claim_memory_prefix(self) -> str:
        """Prefix of this daemon's shared memory; removes what a killed daemon left under it.

        It follows from the lock file, not from its path: daemons in containers that share their shared memory may all
        see their sockets at one path.
        """
        file = os.fstat(self._descriptor)
        prefix = f"kvtier-{file.st_dev:x}-{file.st_ino:x}-"
        if num_removed := remove_stale(prefix):
            _log.warning("removed %d pieces of shared memory of a daemon that was killed", num_removed)
        return prefix

    def close(self) -> None:
        """Removes the socket and gives the lock up."""
        self._socket.unlink(missing_ok=True)
        os.close(self._descriptor)


def _lock_path(socket: Path) -> Path:
    return socket.with_name(socket.name + ".lock")


def lock_owner(socket: Path) -> int | None:
    """The process that took the lock of a socket last; None when none has."""
    path = _lock_path(socket)
    text = path.read_text() if path.is_file() else ""
    return int(text) if text else None
