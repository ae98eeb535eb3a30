"""`kvtier bench lookup`: what finding a long prefix costs, beside an echo of the same bytes.

Daemon, echo server and client are processes of their own. Rounds of everything that is compared are interleaved, so
that noise of the machine meets all alike; figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvtier.bench.echo import METHOD, OPTIONS
from kvtier.client import AsyncSession
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout

_PAGE_SIZE = 64
_LONG_TOKENS = 128 * 1024
_NEW_TOKENS = 1024
_DOCUMENT_PAGES = 100  # the tree is filled with documents of this length: thousands of nodes
_VOCAB_SIZE = 100_000
_NAMESPACE = "bench"
_IDENTITY = CacheIdentity("bench", "none", _VOCAB_SIZE, PageLayout(PageFormat.NVFP4, 1, 1, 16, _PAGE_SIZE))


class _Subject:
    """A daemon with a filled tree, and a session to it."""

    def __init__(self, daemon: DaemonProcess, session: AsyncSession, random: np.random.Generator) -> None:
        self.daemon = daemon
        self.session = session
        self._random = random
        self.prompt = self._tokens(_LONG_TOKENS)
        self.turn = self._tokens(_NEW_TOKENS)

    def _tokens(self, count: int) -> bytes:
        return self._random.integers(0, _VOCAB_SIZE, count, dtype=np.uint32).tobytes()

    async def _commit(self, tokens: bytes) -> None:
        num_pages = len(tokens) // 4 // _PAGE_SIZE
        lease = await self.session.acquire(_NAMESPACE, b"", reserve_pages=num_pages)
        await lease.commit(tokens, lease.reserved_pages)
        await lease.release()

    async def fill(self, num_pages: int) -> None:
        """Commits the long prompt with the turn behind it, and other documents up to `num_pages`."""
        await self._commit(self.prompt + self.turn)
        num_documents = (num_pages - (_LONG_TOKENS + _NEW_TOKENS) // _PAGE_SIZE) // _DOCUMENT_PAGES
        for _ in range(num_documents):
            await self._commit(self._tokens(_DOCUMENT_PAGES * _PAGE_SIZE))

    async def resident(self) -> float:
        """Seconds to acquire the long prompt."""
        return await self._acquire_prompt(self.session)

    async def first(self) -> float:
        """Seconds to acquire the long prompt as the first thing a new session does."""
        async with await AsyncSession.connect(self.daemon.address, _IDENTITY) as session:
            return await self._acquire_prompt(session)

    async def _acquire_prompt(self, session: AsyncSession) -> float:
        start = time.perf_counter()
        lease = await session.acquire(_NAMESPACE, self.prompt)
        seconds = time.perf_counter() - start
        assert lease.matched_tokens.device == _LONG_TOKENS, "the prompt is not resident"
        await lease.release()
        return seconds

    async def resident_and_release(self) -> float:
        """Seconds to acquire the long prompt and give it back."""
        start = time.perf_counter()
        await (await self.session.acquire(_NAMESPACE, self.prompt)).release()
        return time.perf_counter() - start

    async def continuation(self) -> float:
        """Seconds to acquire a short turn behind a lease on the long prompt."""
        parent = await self.session.acquire(_NAMESPACE, self.prompt)
        start = time.perf_counter()
        lease = await self.session.acquire(_NAMESPACE, self.turn, parent=parent)
        seconds = time.perf_counter() - start
        assert lease.matched_tokens.device == _NEW_TOKENS, "the turn is not resident"
        await lease.release()
        await parent.release()
        return seconds

    def cpu_seconds(self) -> float:
        """CPU time that the daemon has used, all threads."""
        tasks = Path(f"/proc/{self.daemon.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.asynccontextmanager
async def _subject(directory: Path, num_pages: int) -> AsyncIterator[_Subject]:
    directory.mkdir()
    page_bytes = _IDENTITY.layout.page_bytes
    pools = {"device_bytes": (num_pages + 1024) * page_bytes, "host_bytes": 64 * page_bytes}
    settings = {"redis": "none", "device": "shared-memory", **pools}
    with daemon_process(directory, **settings, log_level="warning") as daemon:
        async with await AsyncSession.connect(daemon.address, _IDENTITY, timeout_s=60) as session:
            subject = _Subject(daemon, session, np.random.default_rng(7))
            await subject.fill(num_pages)
            yield subject


@contextlib.asynccontextmanager
async def _echo_stream(socket: Path) -> AsyncIterator[Callable[[bytes], Awaitable[float]]]:
    async with grpc.aio.insecure_channel(f"unix:{socket}", OPTIONS) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        call = channel.stream_stream(METHOD)()

        async def echo(message: bytes) -> float:
            start = time.perf_counter()
            await call.write(message)
            assert len(await call.read()) == len(message)
            return time.perf_counter() - start

        await echo(bytes(100))  # as long as an Attach
        yield echo
        call.cancel()


async def _first_echo(socket: Path, message: bytes) -> float:
    async with _echo_stream(socket) as echo:
        return await echo(message)


@contextlib.contextmanager
def _echo_server(socket: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "kvtier.bench.echo", str(socket)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _measure(rounds: int, num_small: int, num_large: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as temporary:
        root = Path(temporary)
        socket = root / "echo.sock"
        with _echo_server(socket):
            async with (
                _echo_stream(socket) as echo,
                _subject(root / "small", num_small) as small,
                _subject(root / "large", num_large) as large,
            ):
                samples: dict[str, list[float]] = {}
                cases: dict[str, Callable[[], Awaitable[float]]] = {
                    "echo_128k": lambda: echo(small.prompt),
                    "resident_128k": small.resident,
                    "resident_128k_large": large.resident,
                    "acquire_and_release_128k": small.resident_and_release,
                    "first_echo_128k": lambda: _first_echo(socket, small.prompt),
                    "first_resident_128k": small.first,
                    "continue_1k": small.continuation,
                    "echo_1k": lambda: echo(small.turn),
                }
                for _ in range(rounds):
                    for name, case in cases.items():
                        await case()  # each case finds its own process awake and its data as warm as the others do
                        samples.setdefault(name, []).append(await case())
                cpu = await _daemon_cpu(small, rounds)
    median_ms = {name: statistics.median(values) * 1000 for name, values in samples.items()}
    return {
        **{f"{name}_p50_ms": value for name, value in median_ms.items()},
        "resident_over_echo": median_ms["resident_128k"] / median_ms["echo_128k"],
        "first_resident_over_first_echo": median_ms["first_resident_128k"] / median_ms["first_echo_128k"],
        "tree_1m_over_10k": median_ms["resident_128k_large"] / median_ms["resident_128k"],
        "daemon_cpu_ms_per_128k": cpu * 1000,
        "tree_pages": [num_small, num_large],
        "rounds": rounds,
    }


async def _daemon_cpu(subject: _Subject, rounds: int) -> float:
    """CPU seconds of the daemon for one acquire of the long prompt."""
    before = subject.cpu_seconds()
    leases = [await subject.session.acquire(_NAMESPACE, subject.prompt) for _ in range(rounds)]
    after = subject.cpu_seconds()
    for lease in leases:
        await lease.release()
    return (after - before) / rounds


def run(rounds: int = 200, num_small: int = 10_000, num_large: int = 1_000_000) -> dict[str, Any]:
    """Figures of lookups, times in milliseconds; see the keys."""
    return asyncio.run(_measure(rounds, num_small, num_large))
