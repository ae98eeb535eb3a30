"""Starts a daemon as a child process, as demo, benchmarks and tests do."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.client import Client
from kvtier.daemon.share import lock_owner
from kvtier.errors import ConfigurationError, DaemonUnavailableError
from kvtier.tiers.embedded import stop_embedded_redis

_POLL_S = 0.05
_START_S = 30.0
_STOP_S = 60.0


class DaemonProcess:
    """A running `kvtier serve`. Its log goes to `log`."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self.process = process
        self._socket = socket
        self.address = f"unix:{socket}"
        self.log = log

    @classmethod
    def start(cls, directory: Path, **settings: object) -> DaemonProcess:
        """Serves on `directory/kvtier.sock` with the given settings of `Config`; returns when it answers."""
        socket, log = directory / "kvtier.sock", directory / "kvtier.log"
        flags = {"socket": socket, "data_dir": directory / "data", "metrics": "off", **settings}
        command = [sys.executable, "-m", "kvtier", "serve"]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with log.open("ab") as output:
            daemon = cls(subprocess.Popen(command, stdout=output, stderr=output), socket, log)
        try:
            daemon._wait_until_it_serves()
        except BaseException:
            daemon.kill()
            raise
        return daemon

    def _wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ConfigurationError(f"the daemon did not start: {self.log.read_text()[-2000:]}")
            with Client(self.address, timeout_s=1.0) as client, contextlib.suppress(DaemonUnavailableError):
                # Another daemon that serves on this socket answers too.
                if client.is_serving() and lock_owner(self._socket) == self.process.pid:
                    return
            time.sleep(_POLL_S)
        raise DaemonUnavailableError(f"the daemon does not serve after {_START_S:.0f} s; its log is {self.log}")

    def stop(self) -> None:
        """Ends it gracefully; kills it, and raises `TimeoutExpired`, when that takes over a minute."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def daemon_process(directory: Path, **settings: object) -> Iterator[DaemonProcess]:
    """A daemon for the time of a block, and its embedded Redis, which would outlive it."""
    try:
        daemon = DaemonProcess.start(directory, **settings)
        try:
            yield daemon
        finally:
            if daemon.process.poll() is None:
                daemon.stop()
    finally:
        stop_embedded_redis(directory / "data")


def free_metrics_address() -> str:
    """An address on this machine for a daemon's metrics, free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
